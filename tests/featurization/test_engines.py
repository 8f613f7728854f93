"""Engines are tried until one runs the model right; the last one is a loop of backward passes."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import trakdask as td
from trakdask.models.gradients import ENGINES

N = 8


class First:
    """f is the first output, and Q is 1."""

    def __init__(self, *variables: str) -> None:
        self.variables = variables

    def output(self, forward, batch):
        return forward(*(batch[name] for name in self.variables))[:, 0]

    def out_to_loss(self, forward, batch):
        return torch.ones_like(self.output(forward, batch))


class Residual(nn.Module):
    """Differentiates itself, as a network that solves a differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        u = self.net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u + (du**2).sum(1, keepdim=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # without setup_context
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)


class Custom(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Doubled.apply(self.first(x)) * self.scale) @ self.second.weight


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, length.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.head(self.rnn(packed)[1][0][-1])


class Recomputed(nn.Module):
    """Runs a part again for the backward pass, which reads what the call has left in attributes."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant, self.n_calls = use_reentrant, 0
        self.first, self.second, self.tied = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.tied.weight = self.second.weight
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.n_calls += 1
        y = self.first(x)
        self.scale = y.detach().mean(1, keepdim=True) * self.n * self.n_calls
        return checkpoint(self.part, y, use_reentrant=self.use_reentrant)

    def part(self, y: Tensor) -> Tensor:
        return self.tied(torch.tanh(self.second(y))) * self.scale


class RecomputedLayers(nn.Module):
    """Layers of all kinds, in a module that loads itself."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.rnn = nn.Linear(4, 5), nn.LSTM(5, 5, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.Dropout(), nn.BatchNorm1d(5), nn.Tanh())

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.rnn, self.first(x)[:, None], use_reentrant=self.use_reentrant)[0]
        return checkpoint_sequential(self.layers, 2, y[:, 0], use_reentrant=self.use_reentrant)


class Alone(Layers):
    """Takes no batch of several samples."""

    def forward(self, x: Tensor) -> Tensor:
        (one,) = x
        one = one.to_sparse()
        return self.second(torch.tanh(self.first(one.to_dense())))[None]


RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.standard_normal((N, 4)).astype("f4"),
    "rows": RNG.standard_normal((N, 6, 4)).astype("f4"),
    "ids": RNG.integers(1, 9, (N, 6)),
    "length": np.array([3, 6, 2, 1, 5, 4, 6, 2]),
}
KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "PINN": (Residual, ("x",)),
    "Function without setup_context": (Custom, ("x",)),
    "packed LSTM": (Packed, ("rows", "length")),
    "single samples": (Alone, ("x",)),
    **{
        f"{build.__name__}({again})": (partial(build, again), ("x",))
        for build in (Recomputed, RecomputedLayers)
        for again in (False, True)
    },
}


def backward(module: nn.Module, variables: tuple[str, ...], data=DATA) -> np.ndarray:
    """The gradients of single samples by a loop of backward()."""
    module.eval()
    rows = []
    for i in range(N):
        alone = copy.deepcopy(module)
        alone(*(torch.tensor(data[name][i : i + 1]) for name in variables))[0, 0].backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()]
        rows.append(torch.cat([g.to_dense().flatten() for g in grads]))
    return torch.stack(rows).double().numpy()


def model_of(kind: str) -> tuple[nn.Module, td.Model, xr.Dataset]:
    build, variables = KINDS[kind]
    torch.manual_seed(0)
    module = build()
    samples = td.from_arrays({name: DATA[name] for name in variables}, chunks=2)
    return module, td.Model(module, task=First(*variables)), samples


def features(samples: xr.Dataset, model: td.Model, **options: Any) -> np.ndarray:
    lazy = td.featurize(samples, model, projector=td.Identity(), **options)
    return lazy.feature.compute(scheduler="sync").values[:, :, 0]


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("gradients by ")]


pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap


@pytest.mark.parametrize("kind", KINDS)
def test_auto__ends_at_the_loop(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, model, samples = model_of(kind)
    calls = []
    vmap = ENGINES["vmap"]
    monkeypatch.setitem(ENGINES, "vmap", lambda *a, **k: calls.append(1) or vmap(*a, **k))
    found = features(samples, model)
    assert distance(found, backward(module, KINDS[kind][1])) < 2e-7
    (line,) = said(caplog)
    # A model that takes single samples has no backward pass of a batch to be compared with.
    times = "" if kind == "single samples" else ", which takes .* times as long"
    assert re.match(f"gradients by loop{times}", line)
    assert all(f"{name} failed (" in line for name in ("hooks", "vmap"))
    assert len(calls) == 1  # not once for each of the four blocks
    assert np.array_equal(features(samples, model), found)
    with dask.config.set(scheduler="threads", num_workers=2):
        lazy = td.featurize(samples, model, projector=td.Identity(), batch_size=1)
        np.testing.assert_allclose(lazy.feature.values[..., 0], found, rtol=1e-5, atol=1e-6)
    assert len(said(caplog)) == 1


class CentredFunction(Custom):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - y.mean(0)


class DroppedPacked(Packed):
    def forward(self, rows: Tensor, length: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(rows, length), 0.5)


@pytest.mark.parametrize(
    ("build", "variables"),
    [
        (CentredFunction, ("x",)),
        (DroppedPacked, ("rows", "length")),
    ],
)
def test_auto__models_that_mix_samples_are_not_looped(build: Any, variables: Any) -> None:
    samples = td.from_arrays({name: DATA[name] for name in variables}, chunks=4)
    with pytest.raises(td.errors.BlockError, match="the model is random, mixes the samples"):
        features(samples, td.Model(build(), task=First(*variables)))


def test_auto__a_broken_sample_is_recorded() -> None:
    _, model, samples = model_of("packed LSTM")
    samples = samples.chunk(sample=4)
    expected = features(samples, model)
    rows = samples.rows.values.copy()
    rows[1] = np.nan
    length = samples.length.values.copy()
    length[5] = -1
    broken = samples.assign(rows=(samples.rows.dims, rows), length=("sample", length))
    lazy = td.featurize(broken.chunk(sample=4), model, td.Identity(), on_error="record")
    found = lazy.compute(scheduler="sync")
    assert np.flatnonzero(found.error.values[:, 0] != "").tolist() == [1, 5]
    good = np.setdiff1d(np.arange(N), [1, 5])
    np.testing.assert_array_equal(found.feature.values[good, :, 0], expected[good])


class Raises(First):
    def output(self, forward, batch):
        if (batch["x"][:, 0] == 9).any():
            raise RuntimeError("nine")
        return super().output(forward, batch)


def test_auto__broken_samples_are_no_reason_to_leave_hooks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = DATA["x"].copy()
    x[[2, 5], 0] = 9
    model = td.Model(nn.Linear(4, 2), task=Raises("x"))
    samples = td.from_arrays({"x": x}, chunks=4)
    lazy = td.featurize(samples, model, td.Identity(), on_error="record")
    found = lazy.compute(scheduler="sync")
    assert np.flatnonzero(found.error.values[:, 0]).tolist() == [2, 5]
    assert found.error.values[2, 0] == "RuntimeError: nine"
    assert not said(caplog)


class UsesTwiceLater(Layers):
    """Uses a weight outside of its layer, for samples whose first value is large."""

    def forward(self, x: Tensor) -> Tensor:
        marked = (x[:, :1] > 5).float()
        y = self.first(x) + marked * Doubled.apply(nn.functional.linear(x, self.first.weight))
        return self.second(y) if marked.any() else self.second(self.first(x))


def later() -> tuple[td.Model, xr.Dataset]:
    torch.manual_seed(0)
    x = DATA["x"].copy()
    x[4:, 0] = 9
    return td.Model(UsesTwiceLater(), task=First("x")), td.from_arrays({"x": x}, chunks=4)


def test_auto__a_store_that_began_with_hooks_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, samples = later()
    some = samples.isel(sample=slice(4))
    with dask.config.set(scheduler="sync"):
        store = td.save(td.featurize(some, model, td.Identity()), tmp_path / "a.zarr")
        assert not said(caplog)
        more = td.featurize(samples.isel(sample=slice(4, 8)), model, like=store)
        store = td.save(more, tmp_path / "a.zarr", append_dim="sample")
    assert len(said(caplog)) == 1
    expected = features(samples, model, gradients="loop")
    assert distance(store.feature.values[:, :, 0], expected) < 1e-6


def test_auto__fits_count_every_sample_once() -> None:
    """A micro-batch by hooks, and one by the loop, add up."""
    model, samples = later()
    samples, options = samples.chunk(sample=8), {"batch_size": 4, "progress": False}
    options |= {"curvature": True, "sketch": td.Identity()}
    products = []
    with dask.config.set(scheduler="sync"):
        for gradients in ("auto", "loop"):
            fitted = td.fit(samples, model, gradients=gradients, **options)
            made = td.featurize(samples, model, fitted).feature.values[..., 0]
            products.append(made @ made.T)
    np.testing.assert_allclose(*products, rtol=1e-3)


class Words(nn.Module):
    """Embeds each word of a batch once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, ids: Tensor) -> Tensor:
        words, places = ids.unique(return_inverse=True)
        return self.head(self.embed(words)[places])


def test_score_parts__of_modules_goes_to_the_loop_and_of_tokens_says_so() -> None:
    samples = td.from_arrays({"ids": DATA["ids"]}, chunks=4)
    model = td.Model(Words(), task=td.tasks.CausalLM(inputs="ids", positional=True))
    with dask.config.set(scheduler="sync"):
        features = td.featurize(samples, model, td.SJLT(64)).compute()
        targets, options = features.isel(sample=[0, 1]), {"estimator": "grad_dot", "of": samples}
        scores = td.score(features, targets, "grad_dot").values
        parts = td.score_parts(features, targets, model, parts=["embed", "head"], **options)
        largest = abs(scores).max()
        np.testing.assert_allclose(parts.sum("module"), scores, atol=1e-3 * largest)
        words = td.score_parts(features, targets, model, **options)
        with pytest.raises(td.errors.BlockError, match="runs these samples; try names of modules"):
            words.compute()


class Sparse(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        options = {"mode": "sum"} if layer is nn.EmbeddingBag else {}
        self.embed, self.head = layer(9, 5, sparse=True, **options), nn.Linear(5, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(torch.tanh(x if x.ndim == 2 else x.sum(1)))


@pytest.mark.parametrize(
    ("build", "layer", "gradients"),
    [
        *((Sparse, layer, name) for layer in (nn.Embedding, nn.EmbeddingBag) for name in ENGINES),
    ],
)
def test_featurize__sparse_gradients(build: Any, layer: Any, gradients: str) -> None:
    torch.manual_seed(0)
    module = build(layer)
    samples = td.from_arrays({"ids": DATA["ids"]}, chunks=4)
    found = features(samples, td.Model(module, task=First("ids")), gradients=gradients)
    assert distance(found, backward(module, ("ids",))) < 1e-6


class Always(First):
    def output(self, forward, batch):
        raise RuntimeError("nine")


NO_ADVICE = [
    (nn.Linear(4, 2), Always("x"), "RuntimeError: nine"),
    (nn.Linear(5, 2), First("x"), "RuntimeError: mat1 and mat2 shapes|size mismatch"),
]


@pytest.mark.parametrize(
    ("module", "task", "error", "gradients"),
    [
        *((*case, "auto") for case in NO_ADVICE),
        *((*NO_ADVICE[0], name) for name in ENGINES),
    ],
)
def test_featurize__no_advice_on_engines_for_errors_that_all_of_them_have(
    module: nn.Module, task: Any, error: str, gradients: str
) -> None:
    samples = td.from_arrays({"x": np.full_like(DATA["x"], 9)})
    with pytest.raises(td.errors.BlockError, match=error) as caught:
        features(samples, td.Model(module, task=task), gradients=gradients)
    assert "x float32 (8, 4)" in str(caught.value)
    assert not re.search("gradients=|eager|vmap|loop", str(caught.value))


@pytest.mark.parametrize(
    ("kind", "gradients"), [("PINN", "hooks"), ("Function without setup_context", "vmap")]
)
def test_featurize__advice_on_engines_where_it_helps(kind: str, gradients: str) -> None:
    _, model, samples = model_of(kind)
    with pytest.raises(
        td.errors.BlockError, match=r"The loop runs these .* try gradients=.*'loop'"
    ):
        features(samples, model, gradients=gradients)
