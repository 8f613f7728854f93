"""Matching of images and texts against a loop over negatives, written as in the paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trakdask as td
from trakdask.models.tasks import Batch, Clip, task_spec


class Towers(nn.Module):
    """Two towers with the results of open_clip's."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Linear(6, 4, dtype=torch.float64)
        self.textual = nn.Linear(5, 4, dtype=torch.float64)
        self.logit_scale = nn.Parameter(torch.tensor(1.2, dtype=torch.float64))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embeddings = self.visual(image.flatten(1)), self.textual(text)
        normed = (functional.normalize(e, dim=-1) for e in embeddings)
        return (*normed, self.logit_scale.exp())


def towers(seed: int = 0) -> Towers:
    torch.manual_seed(seed)
    return Towers()


def pairs(n: int = 5, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(n, 2, 3, generator=generator, dtype=torch.float64)
    return Batch(image=image, text=torch.randn(n, 5, generator=generator, dtype=torch.float64))


def model(task: str | Clip = "clip", seeds: tuple[int, ...] = (0, 1)) -> td.Model:
    return td.Model(Towers, {f"c{seed}": towers(seed).state_dict() for seed in seeds}, task=task)


def clip(seed: int = 2, **options) -> Clip:
    return Clip(Clip.negatives_of(td.Model(towers(), task="clip"), pairs(8, seed)), **options)


def margins(module: nn.Module, data: Batch, negatives: Batch, scale: float) -> list[list[Tensor]]:
    """log p/(1-p) among texts and among images, for each sample."""
    image, text, _ = module(data["image"], data["text"])
    with torch.no_grad():
        images, texts, _ = module(negatives["image"], negatives["text"])
    found = []
    for x, y in zip(image, text, strict=True):
        among_texts = torch.stack([x @ y] + [x @ other for other in texts]) * scale
        among_images = torch.stack([x @ y] + [other @ y for other in images]) * scale
        both = (logits.softmax(0)[0] for logits in (among_texts, among_images))
        found.append([(p / (1 - p)).log() for p in both])
    return found


def test_clip__gradients(check_gradients) -> None:
    def output(module: nn.Module, sample: Batch) -> Tensor:
        (both,) = margins(module, sample, pairs(8, seed=2), 1.0)
        return sum(both)

    check_gradients(towers(), clip(), pairs(), output)


@pytest.mark.parametrize("temperature", [None, 1.0, 0.2])
def test_clip__q_is_the_slope_of_the_loss(run, temperature: float | None) -> None:
    """Both cross-entropies of a sample's pair among the negatives, while both margins rise."""
    module = towers()
    scale = module.logit_scale.exp().item() if temperature is None else 1 / temperature
    expected = []
    for by_text, by_image in margins(module, pairs(), pairs(8, seed=2), scale):
        epsilon = torch.zeros((), dtype=torch.float64, requires_grad=True)
        loss = sum(functional.softplus(-(m.detach() + epsilon)) for m in (by_text, by_image))
        (slope,) = torch.autograd.grad(loss, epsilon)
        expected.append(-slope / 2)  # f, the sum of both, rises by 2
    _, _, q = run(module, clip(temperature=temperature), pairs())
    torch.testing.assert_close(q, torch.stack(expected).float())


def test_clip__spec_names_what_it_was_compared_with() -> None:
    one, same, other = clip(), clip(), clip(seed=3)
    assert (task_spec(one), one, hash(one)) == (task_spec(same), same, hash(same))
    assert task_spec(one) != task_spec(other)
    assert "tensor" not in task_spec(one)


def test_clip__featurized_at_each_checkpoint() -> None:
    data = {name: value.numpy() for name, value in pairs(6).items()}
    samples = td.from_arrays(data, chunks=4)
    negatives = Clip.negatives_of(model(), samples, batch_size=4)
    task, exact = Clip(negatives), {"projector": td.Identity()}
    found = td.featurize(samples, model(task), **exact).compute()
    for seed in (0, 1):
        image, text, _ = towers(seed)(*pairs(6).values())
        torch.testing.assert_close(negatives[f"c{seed}"], (image.detach(), text.detach()))
        alone = td.featurize(samples, model(task, (seed,)), **exact).compute()
        np.testing.assert_array_equal(found.feature[:, :, seed], alone.feature[:, :, 0])
    assert not np.array_equal(found.output[:, 0], found.output[:, 1])
