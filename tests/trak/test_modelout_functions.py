"""Model outputs against their definitions, and against the TRAK package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.trak._models import (
    Classifier,
    Pair,
    built,
    images,
    margin_of,
    pair_batch,
    texts,
    untrained,
)
from trakdask.trak.modelout_functions import (
    CLIPModelOutput,
    ImageClassificationModelOutput,
    IterativeImageClassificationModelOutput,
    TextClassificationModelOutput,
)

DIM, N = 5, 6


@pytest.fixture(autouse=True)
def class_as_it_was() -> Iterator[None]:
    """A value that one test sets on the class must not be seen by the next."""
    names = ("image_embeddings", "text_embeddings", "num_computed_embeddings", "sim_batch_size")
    before = {name: getattr(CLIPModelOutput, name) for name in (*names, "_digest")}
    yield
    for name, value in before.items():
        setattr(CLIPModelOutput, name, value)


def state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return dict(module.named_parameters()), dict(module.named_buffers())


def embedded(module: nn.Module, n: int = 9, **options: Any) -> CLIPModelOutput:
    task = CLIPModelOutput(**options)
    task.get_embeddings(module, [pair_batch(n, seed=5)], batch_size=n, embedding_dim=DIM)
    return task


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize(
    "kind",
    [
        ImageClassificationModelOutput,
        IterativeImageClassificationModelOutput,
        TextClassificationModelOutput,
    ],
)
def test_classifiers__margin_has_no_temperature_and_q_has(kind: Any, temperature: float) -> None:
    is_text = kind is TextClassificationModelOutput
    module = untrained(Classifier) if is_text else built("mlp")
    *inputs, labels = batch = texts(N) if is_text else images(N)
    logits = module(*inputs)
    task = kind(temperature)
    if kind is IterativeImageClassificationModelOutput:  # takes the batch and the own weights
        found = task.get_output(module, None, None, *batch)
    else:
        samples = zip(*batch, strict=True)
        found = torch.stack([task.get_output(module, *state(module), *one) for one in samples])
    expected = torch.stack([margin_of(logits[i], int(labels[i])) for i in range(N)])
    torch.testing.assert_close(found.double(), expected)
    q = task.get_out_to_loss_grad(module, *state(module), batch)
    exps = (logits.double() / temperature).exp()
    p = exps[torch.arange(N), labels] / exps.sum(1)
    torch.testing.assert_close(q.double(), 1 - p[:, None])
    assert not q.requires_grad
    assert task.loss_temperature == temperature
    assert isinstance(task.softmax, nn.Softmax)


# ------------------------------------------------------------------------------------------ CLIP


def test_clip__is_its_definition() -> None:
    module, (image, text) = untrained(Pair), pair_batch(N)
    task = embedded(module, simulated_batch_size=4)
    phi, psi, scale = (tensor.detach().double() for tensor in module(image, text))
    keys = np.random.Philox(key=0).random_raw(9)
    rows = [i for i in range(9) if (keys < keys[i]).sum() < 4]
    others = [tensor.detach().double()[rows] for tensor in module(*pair_batch(9, seed=5))[:2]]
    for i in range(N):
        right = phi[i] @ psi[i]
        by_text = sum((phi[i] @ other - right).exp() for other in others[1])
        by_image = sum((psi[i] @ other - right).exp() for other in others[0])
        found = task.get_output(module, *state(module), image[i], text[i])
        torch.testing.assert_close(found.double(), -torch.log(by_text) - torch.log(by_image))
    products = scale * phi @ psi.T
    p = (products.softmax(0) + products.softmax(1)).diag() / 2
    q = task.get_out_to_loss_grad(module, *state(module), [image, text])
    assert q.shape == (N, 1)  # what the store takes
    torch.testing.assert_close(q.double(), 1 - p[:, None])


def test_clip__instances_do_not_share_embeddings() -> None:
    one, other = untrained(Pair), Pair().eval()
    first = embedded(one, simulated_batch_size=9)
    expected = first.image_embeddings
    assert expected is not None
    second = embedded(other, n=7, simulated_batch_size=7)
    assert first.image_embeddings is expected
    assert (first.sim_batch_size, first.num_computed_embeddings) == (9, 9)
    assert second.num_computed_embeddings == 7
    assert CLIPModelOutput.image_embeddings is None
    assert CLIPModelOutput().image_embeddings is None


def test_clip__embeddings_of_the_class_serve_instances_that_have_none() -> None:
    module, (image, text) = untrained(Pair), pair_batch(N)
    embedding = embedded(module, simulated_batch_size=9)
    loader = [pair_batch(9, seed=5)]
    CLIPModelOutput.get_embeddings(module, loader, batch_size=9, embedding_dim=DIM)
    bare = CLIPModelOutput(simulated_batch_size=9)
    found, expected = (
        task.get_output(module, *state(module), image[0], text[0]) for task in (bare, embedding)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("size", "n"), [(50_000, 10), (6, 6), (4, 4)])
def test_get_embeddings__of_batches_of_any_size(size: int, n: int) -> None:
    module, (image, text) = untrained(Pair), pair_batch(10, seed=5)
    loader = zip(image.split([4, 3, 3]), text.split([4, 3, 3]), strict=True)
    phi, psi, _ = module(image, text)
    task = CLIPModelOutput()
    task.get_embeddings(module, loader, batch_size=4, embedding_dim=DIM, size=size)
    assert task.num_computed_embeddings == n
    torch.testing.assert_close(task.image_embeddings, phi[:n].detach())
    torch.testing.assert_close(task.text_embeddings, psi[:n].detach())


def test_clip__errors_before_and_after_get_embeddings() -> None:
    module, (image, text) = untrained(Pair), pair_batch(N)
    with pytest.raises(AssertionError, match="get_embeddings"):
        CLIPModelOutput().get_output(module, *state(module), image[0], text[0])
    task = embedded(module, simulated_batch_size=300)
    with pytest.raises(ValueError, match=r"1\.\.9 .*got 300; try .*simulated_batch_size=9"):
        task.get_output(module, *state(module), image[0], text[0])


# --------------------------------------------------------------------------- the original, beside
