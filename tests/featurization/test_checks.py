"""Models that mix the samples of a batch are refused, by every engine and for every batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import trakdask as td
from trakdask.featurization import checks

N = 16
ENGINES = ("auto", "hooks", "vmap", "loop")


class Net(nn.Module):
    """A linear layer, and what becomes of its outputs."""

    def __init__(self, after: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 3)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.head(x))


class MixingQ(td.tasks.ImageClassification):
    def out_to_loss(self, forward, batch):
        q = super().out_to_loss(forward, batch)
        return q - q.mean()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    checks._checked.clear()
    yield
    checks._checked.clear()


def samples(n: int = N) -> xr.Dataset:
    image = np.random.default_rng(0).standard_normal((n, 4)).astype("f4")
    return td.from_arrays({"image": image}, coords={"label": np.arange(n) % 3}, chunks=8)


def featurize(model: td.Model, data: xr.Dataset | None = None, **options) -> xr.Dataset:
    data = samples() if data is None else data
    lazy = td.featurize(data, model, projector=td.Identity(), **options)
    return lazy.compute(scheduler="sync")


MIXING = {
    "softmax": td.Model(Net(lambda y: y.softmax(0))),
    "mean": td.Model(Net(lambda y: y - y.mean(0))),
    "constant_mean": td.Model(Net(lambda y: y - y.mean(0).detach())),
    "batch_size": td.Model(Net(lambda y: y / len(y))),
    "q": td.Model(Net(), task=MixingQ()),
}


@pytest.mark.parametrize("model", MIXING.values(), ids=MIXING)
@pytest.mark.parametrize("gradients", ENGINES)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("on_error", ["raise", "record"])
def test_check_once__models_that_mix_samples(
    model: td.Model, gradients: str, batch_size: int, on_error: str
) -> None:
    with pytest.raises(td.BlockError, match=r"expected the \w+ of sample \d+ .*alone and in a"):
        featurize(model, gradients=gradients, batch_size=batch_size, on_error=on_error)


@pytest.mark.parametrize("gradients", ENGINES)
def test_check_micro_batch__mixing_from_five_samples_on(gradients: str) -> None:
    """Of f, which ``vmap`` and ``loop`` take of each sample alone, and of Q."""
    made = td.Model(Net(lambda y: y - y.mean(0).detach() if len(y) > 4 else y))
    expected = featurize(made, gradients=gradients, batch_size=4)
    found = featurize(made, gradients=gradients, batch_size=3)
    np.testing.assert_allclose(found.out_to_loss, expected.out_to_loss, rtol=1e-5)
    with pytest.raises(td.BlockError, match=r"sample \d+ .*batch of 8\b"):
        featurize(made, gradients=gradients, batch_size=8)


def test_check_once__after_a_block_of_one_sample() -> None:
    """One sample tells nothing about mixing, so that the next block is checked again."""
    model = MIXING["mean"]
    featurize(model, samples(1))
    with pytest.raises(td.BlockError, match="mixes the samples"):
        featurize(model)


@pytest.mark.parametrize("gradients", ENGINES)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_check_once__accepts_what_treats_samples_apart(gradients: str, batch_size: int) -> None:
    def after(y: Tensor) -> Tensor:
        return y.softmax(1) - y.mean(1, keepdim=True)

    model = td.Model(Net(after))
    found = featurize(model, gradients=gradients, batch_size=batch_size)
    expected = featurize(model, gradients="loop", batch_size=1)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)


class Decides(td.tasks.ImageClassification):
    """Decides by the values of all samples of the batch, for Q too."""

    def output(self, forward, batch):
        sign = 1.0 if batch["image"].sum() > 0 else -1.0
        return sign * super().output(forward, batch)

    def out_to_loss(self, forward, batch):
        sign = 1.0 if batch["image"].sum() > 0 else -1.0
        return sign * super().out_to_loss(forward, batch)


def test_loop__shared_decisions_do_not_reach_q() -> None:
    model = td.Model(Net(), task=Decides())
    expected = featurize(model, gradients="loop", batch_size=1)
    for batch_size in (3, 8):
        found = featurize(model, gradients="loop", batch_size=batch_size)
        xr.testing.assert_equal(found, expected)
    for batch_size in (3, 8):
        with pytest.raises(td.BlockError, match=r"branches on values.*try gradients='loop'"):
            featurize(model, gradients="hooks", batch_size=batch_size)


class InPlace(nn.Module):
    """Changes its input, and what layers return, in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return self.second(nn.functional.relu_(self.first(x)))


class OutOfPlace(InPlace):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x - 0.5)))


@pytest.mark.parametrize("gradients", ENGINES)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_featurize__model_that_works_in_place(gradients: str, batch_size: int) -> None:
    found = featurize(td.Model(InPlace()), gradients=gradients, batch_size=batch_size)
    expected = featurize(td.Model(OutOfPlace()), gradients=gradients, batch_size=batch_size)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("gradients", ENGINES)
def test_featurize__in_place_after_what_backward_needs(gradients: str) -> None:
    def after(y: Tensor) -> Tensor:
        y = torch.sigmoid(y)
        y += 1
        return y

    with pytest.raises(td.BlockError, match=r"in place.*ReLU\(inplace=False\)"):
        featurize(td.Model(Net(after)), gradients=gradients)
