"""Models that mix the samples of a batch are refused, by every engine and for every batch size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import trakdask as td
from tests.bad_inputs.small_models import After

N = 16
ENGINES = ("hooks", "vmap", "loop")
ENGINES_AND_BATCHES = [("hooks", 8), ("hooks", 1), ("vmap", 3), ("loop", 8), ("loop", 1)]


class MixingQ(td.tasks.ImageClassification):
    def out_to_loss(self, forward, batch):
        q = super().out_to_loss(forward, batch)
        return q - q.mean()


def samples(n: int = N) -> xr.Dataset:
    image = np.random.default_rng(0).standard_normal((n, 4)).astype("f4")
    return td.from_arrays({"image": image}, coords={"label": np.arange(n) % 3}, chunks=8)


def featurize(model: td.Model, data: xr.Dataset | None = None, **options) -> xr.Dataset:
    data = samples() if data is None else data
    lazy = td.featurize(data, model, projector=td.Identity(), **options)
    return lazy.compute(scheduler="sync")


MIXING = {
    "softmax": td.Model(After(lambda y: 2 * y.softmax(0))),  # no probabilities
    "mean": td.Model(After(lambda y: y - y.mean(0))),
    "constant_mean": td.Model(After(lambda y: y - y.mean(0).detach())),
    "batch_size": td.Model(After(lambda y: y / len(y))),
    "cumulative_sum": td.Model(After(lambda y: y.cumsum(0))),
    "normalised": td.Model(After(lambda y: (y - y.mean()) / (1e-5 + y.std(correction=0)))),
    "q": td.Model(After(), task=MixingQ()),
}


BATCHES = [(1, "raise"), (1, "record"), (3, "raise"), (8, "record")]


@pytest.mark.parametrize("number", range(len(ENGINES)))
@pytest.mark.parametrize("name", MIXING)
def test_check_once__models_that_mix_samples(name: str, number: int) -> None:
    """Every model meets every engine, and every engine every kind of batch."""
    batch_size, on_error = BATCHES[([*MIXING].index(name) + number) % len(BATCHES)]
    options = {"gradients": ENGINES[number], "batch_size": batch_size, "on_error": on_error}
    with pytest.raises(td.errors.BlockError, match=r"the \w+ of sample \d+ .*alone"):
        featurize(MIXING[name], **options)


def test_check_once__after_a_block_of_one_sample() -> None:
    """One sample tells nothing about mixing, so that the next block is checked again."""
    model = MIXING["mean"]
    featurize(model, samples(1))
    with pytest.raises(td.errors.BlockError, match="mixes the samples"):
        featurize(model)


class Decides(td.tasks.ImageClassification):
    """Decides by the values of all samples of the batch, for Q too."""

    def output(self, forward, batch):
        sign = 1.0 if batch["image"].sum() > 0 else -1.0
        return sign * super().output(forward, batch)

    def out_to_loss(self, forward, batch):
        sign = 1.0 if batch["image"].sum() > 0 else -1.0
        return sign * super().out_to_loss(forward, batch)


def test_loop__shared_decisions_do_not_reach_q() -> None:
    model = td.Model(After(), task=Decides())
    expected = featurize(model, gradients="loop", batch_size=1)
    for batch_size in (3, 8):
        found = featurize(model, gradients="loop", batch_size=batch_size)
        xr.testing.assert_equal(found, expected)
    for batch_size in (3, 8):
        with pytest.raises(td.errors.BlockError, match=r"branches on values.*try gradients='loop'"):
            featurize(model, gradients="hooks", batch_size=batch_size)


class Layers(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)


class InPlace(Layers):
    """Changes its input, and what layers return, in place."""

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        y = self.second(nn.functional.relu_(self.first(x)))
        return y.softmax(1) - y.mean(1, keepdim=True)  # of each sample by itself


class OutOfPlace(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.relu(self.first(x - 0.5)))
        return y.softmax(1) - y.mean(1, keepdim=True)


@pytest.mark.parametrize(("gradients", "batch_size"), ENGINES_AND_BATCHES)
def test_featurize__model_that_works_in_place(gradients: str, batch_size: int) -> None:
    found = featurize(td.Model(InPlace()), gradients=gradients, batch_size=batch_size)
    expected = featurize(td.Model(OutOfPlace()), gradients=gradients, batch_size=batch_size)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-7)


class Reorders(Layers):
    """Sorts the batch, and restores the order afterwards: f and Q are right for every sample."""

    def __init__(self, seed: int = 0, least: float = -9) -> None:
        super().__init__(seed)
        self.least = least

    def forward(self, x: Tensor) -> Tensor:
        order = torch.argsort(
            torch.where(x[:, 0].max() > self.least, x[:, 0], torch.arange(len(x)).float())
        )
        return self.second(torch.tanh(self.first(x[order])))[torch.argsort(order)]


@pytest.mark.parametrize("seed", range(2))
def test_featurize__model_that_reorders_its_batch(seed: int) -> None:
    """Two samples are in order by chance for every other seed; eight are not."""
    image = np.random.default_rng(seed).standard_normal((N, 4)).astype("f4")
    data = td.from_arrays({"image": image}, coords={"label": np.arange(N) % 3}, chunks=8)
    with pytest.raises(td.errors.BlockError, match=r"reorder or mix .*try gradients='vmap'"):
        featurize(td.Model(Reorders(seed)), data, gradients="hooks")
    found = featurize(td.Model(Reorders(seed)), data)
    expected = featurize(td.Model(Reorders(seed)), data, gradients="loop")
    np.testing.assert_allclose(found.feature, expected.feature, rtol=1e-4, atol=1e-6)


class UsesTwice(Layers):
    """Uses a weight outside of its layer, for samples that are marked."""

    def forward(self, x: Tensor) -> Tensor:
        marked = (x[:, :1] > 5).float()
        return self.second(self.first(x) + marked * nn.functional.linear(x, self.first.weight))


class MixesIfMarked(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        return y - torch.where(x[:, 0].max() > 5, y.flip(0), torch.zeros_like(y))


def marked(which: list[int]) -> xr.Dataset:
    image = samples().image.values.copy()
    image[which, 0] = 9
    return samples().assign(image=(("sample", "image_1"), image)).chunk(sample=8)


@pytest.mark.parametrize(
    ("module", "which"),
    [(UsesTwice(), range(8, 16)), (MixesIfMarked(), [9]), (Reorders(least=5), [15])],
    ids=lambda each: type(each).__name__,
)
def test_featurize__what_is_wrong_from_the_second_block_on(module: nn.Module, which) -> None:
    model, data = td.Model(module), marked(list(which))
    lazy = td.featurize(data, model, projector=td.Identity(), gradients="hooks")
    lazy.isel(sample=slice(8)).compute(scheduler="sync")
    with pytest.raises(td.errors.BlockError, match="samples 8:16 "):
        lazy.isel(sample=slice(8, 16)).compute(scheduler="sync")
    if isinstance(module, MixesIfMarked):  # which no other engine makes right
        with pytest.raises(td.errors.BlockError, match="mixes the samples"):
            featurize(model, data)
        return
    found, expected = featurize(model, data), featurize(model, data, gradients="loop")
    np.testing.assert_allclose(found.feature, expected.feature, rtol=1e-4, atol=1e-6)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embed = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        return self.head((h * attention_mask[..., None]).sum(1))


def test_featurize__transformer_encoder_with_a_padding_mask() -> None:
    draw = np.random.default_rng(0)
    mask = (np.arange(6) < draw.integers(2, 7, (N, 1))).astype("i8")
    data = td.from_arrays(
        {"input_ids": draw.integers(0, 11, (N, 6)), "attention_mask": mask},
        coords={"label": np.arange(N) % 3},
        chunks=8,
    )
    model = td.Model(Padded().eval(), task="text_classification")
    assert torch.backends.mha.get_fastpath_enabled()
    lazy = td.featurize(data, model, projector=td.Identity(), gradients="hooks")
    found = lazy.compute(scheduler="threads", num_workers=2)
    assert torch.backends.mha.get_fastpath_enabled()
    expected = featurize(model, data, gradients="loop")
    np.testing.assert_allclose(found.feature, expected.feature, rtol=1e-3, atol=1e-5)
