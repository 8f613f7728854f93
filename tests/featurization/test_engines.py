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
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 2)


class Scaled(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))


class Custom(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(Doubled.apply(self.first(x)) * self.scale) @ self.second.weight


class Autocast(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.second(torch.tanh(self.first(x)))
        return y.float()


class InPlace(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.ones(x.shape)
        y *= x * self.scale
        return self.second(torch.tanh(self.first(y)))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, length.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.head(self.rnn(packed)[1][0][-1])


class Graph(Layers):
    """Nodes of all graphs in one list, with the graph of each; a graph has any number of nodes."""

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        present = torch.arange(x.shape[1]) < length[:, None]
        batch = present.nonzero()[:, 0]
        nodes = torch.tanh(self.first(x[present]))
        return self.second(nodes.new_zeros(len(x), 5).index_add(0, batch, nodes))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(9, 5, mode="mean"), nn.Linear(5, 2)

    def forward(self, ids: Tensor, length: Tensor) -> Tensor:
        flat = ids[torch.arange(ids.shape[1]) < length[:, None]]
        return self.head(self.bag(flat, length.cumsum(0) - length))


def t5() -> nn.Module:
    import transformers

    config = transformers.T5Config(
        vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t5 = transformers.T5ForConditionalGeneration(config)

        def forward(self, ids: Tensor) -> Tensor:
            return self.t5(input_ids=ids, decoder_input_ids=ids).logits.mean(1)

    return Logits()


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class Quantized(Layers):
    """Rounds the weight of a layer, whose gradient passes straight through."""

    def forward(self, x: Tensor) -> Tensor:
        weight = Rounded.apply(self.second.weight * 8) / 8
        return nn.functional.linear(torch.tanh(self.first(x)), weight, self.second.bias)


class Distinct(nn.Module):
    """Embeds each word of a batch once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 5), nn.Linear(5, 2)

    def forward(self, ids: Tensor) -> Tensor:
        words, places = ids.unique(return_inverse=True)
        return self.head(torch.tanh(self.embed(words))[places].mean(1))


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
    "autocast": (partial(Autocast, 32), ("x",)),
    "T5": (t5, ("ids",)),
    "in place": (InPlace, ("x",)),
    "packed LSTM": (Packed, ("rows", "length")),
    "flat graphs": (Graph, ("rows", "length")),
    "offsets": (Bags, ("ids", "length")),
    "straight-through estimator": (Quantized, ("x",)),
    "distinct words": (Distinct, ("ids",)),
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
    engine, times = ("vmap" if kind == "T5" else "loop"), ", which takes .* times as long"
    # A model that takes single samples has no backward pass of a batch to be compared with.
    assert re.match(f"gradients by {engine}{'' if kind == 'single samples' else times}", line)
    assert all(f"{name} failed (" in line for name in ("hooks", "vmap") if name != engine)
    assert len(calls) == 1 or engine == "vmap"  # not once for each of the four blocks
    assert np.array_equal(features(samples, model), found)
    with dask.config.set(scheduler="threads", num_workers=2):
        lazy = td.featurize(samples, model, projector=td.Identity(), batch_size=1)
        np.testing.assert_allclose(lazy.feature.values[..., 0], found, rtol=1e-5, atol=1e-6)
    assert len(said(caplog)) == 1


class CentredFunction(Custom):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - y.mean(0)


class NormalizedResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)[..., None].repeat(1, 1, 2)
        return nn.functional.batch_norm(y, None, None, training=True)[..., 0]


class DroppedPacked(Packed):
    def forward(self, rows: Tensor, length: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(rows, length), 0.5)


class Adapted(Residual):
    """Takes a step of training on the whole batch first."""

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        loss = self.net(x).square().mean()
        steps = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        moved = {name: w - step for (name, w), step in zip(weights.items(), steps, strict=True)}
        return torch.func.functional_call(self.net, moved, x)


@pytest.mark.parametrize(
    ("build", "variables"),
    [
        (CentredFunction, ("x",)),
        (NormalizedResidual, ("x",)),
        (Adapted, ("x",)),
        (DroppedPacked, ("rows", "length")),
    ],
)
def test_auto__models_that_mix_samples_are_not_looped(build: Any, variables: Any) -> None:
    samples = td.from_arrays({name: DATA[name] for name in variables}, chunks=4)
    with pytest.raises(td.errors.BlockError, match="the model is random, mixes the samples"):
        features(samples, td.Model(build(), task=First(*variables)))


@pytest.mark.parametrize("kind", ["packed LSTM", "flat graphs"])
def test_auto__a_broken_sample_is_recorded(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    _, model, samples = model_of(kind)
    samples = samples.chunk(sample=4)
    expected = features(samples, model)
    rows = samples.rows.values.copy()
    rows[1] = np.nan
    length = samples.length.values.copy()
    length[5] = -1 if kind == "packed LSTM" else 0
    broken = samples.assign(rows=(samples.rows.dims, rows), length=("sample", length))
    lazy = td.featurize(broken.chunk(sample=4), model, td.Identity(), on_error="record")
    found = lazy.compute(scheduler="sync")
    bad = [1, 5] if kind == "packed LSTM" else [1]
    assert np.flatnonzero(found.error.values[:, 0] != "").tolist() == bad
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


@pytest.mark.parametrize("fit", [td.fits.curvature, td.fit])
def test_auto__fits_count_every_sample_once(fit: Any) -> None:
    """A micro-batch by hooks, and one by the loop, add up."""
    model, samples = later()
    samples, options = samples.chunk(sample=8), {"batch_size": 4}
    if fit is td.fit:
        options |= {"curvature": True, "sketch": td.Identity(), "progress": False}
    with dask.config.set(scheduler="sync"):
        found, expected = (fit(samples, model, gradients=g, **options) for g in ("auto", "loop"))
        if fit is td.fits.curvature:
            arrays = (each.arrays["curvature_scale"] for each in (found, expected))
        else:
            made = [
                td.featurize(samples, model, each).feature.values[..., 0]
                for each in (found, expected)
            ]
            arrays = (each @ each.T for each in made)
        np.testing.assert_allclose(*arrays, rtol=1e-3)


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


class SparseFunction(Sparse):
    def forward(self, ids: Tensor) -> Tensor:
        x = nn.functional.embedding(ids, self.embed.weight, sparse=True)
        return self.head(torch.tanh(x.sum(1)))


@pytest.mark.parametrize(
    ("build", "layer", "gradients"),
    [
        *((Sparse, nn.Embedding, name) for name in ("auto", *ENGINES)),
        *((Sparse, nn.EmbeddingBag, name) for name in ("auto", *ENGINES)),
        (SparseFunction, nn.Embedding, "auto"),
        (SparseFunction, nn.Embedding, "loop"),
    ],
)
def test_featurize__sparse_gradients(build: Any, layer: Any, gradients: str) -> None:
    torch.manual_seed(0)
    module = build(layer)
    samples = td.from_arrays({"ids": DATA["ids"]}, chunks=4)
    found = features(samples, td.Model(module, task=First("ids")), gradients=gradients)
    assert distance(found, backward(module, ("ids",))) < 1e-6


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 3, num_layers=2, dropout=0.5, batch_first=True, **options)
        self.head = nn.LazyLinear(2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.rnn(rows)[0][:, -1])


@pytest.mark.parametrize(
    ("kind", "options"),
    [(nn.LSTM, {}), (nn.GRU, {"bidirectional": True}), (nn.RNN, {"nonlinearity": "relu"})],
)
def test_featurize__recurrent_layers_in_training_mode(kind: Any, options: Any) -> None:
    """In which cuDNN can differentiate them; results are those of evaluation, bit by bit."""
    torch.manual_seed(0)
    module = Recurrent(kind, **options).eval()
    module(torch.tensor(DATA["rows"]))
    model = td.Model(module, task=First("rows"))
    assert [name for name, part in model.meta_module().named_modules() if part.training] == ["rnn"]
    samples = td.from_arrays({"rows": DATA["rows"]}, chunks=4)
    found = features(samples, model, gradients="loop")
    np.testing.assert_array_equal(found, backward(module, ("rows",)).astype("f4"))
    assert distance(features(samples, model), found) < 1e-6


class Keyed(First):
    def output(self, forward, batch):
        return forward(batch["x"])["logits"]


class ThatReturns(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"output": super().forward(x)[:, 0]}


class Always(First):
    def output(self, forward, batch):
        raise RuntimeError("nine")


class AlwaysValues(First):
    def output(self, forward, batch):
        raise ValueError("nine; try ten")


NO_ADVICE = [
    (ThatReturns(4, 2), Keyed("x"), "KeyError: 'logits'"),
    (nn.Linear(4, 2), Always("x"), "RuntimeError: nine"),
    (nn.Linear(4, 2), AlwaysValues("x"), "ValueError: nine; try ten"),
    (nn.Linear(5, 2), First("x"), "RuntimeError: mat1 and mat2 shapes|size mismatch"),
]


@pytest.mark.parametrize(
    ("module", "task", "error", "gradients"),
    [
        *((*case, "auto") for case in NO_ADVICE),
        *((*NO_ADVICE[i], name) for name, i in (("hooks", 0), ("vmap", 1), ("loop", 3))),
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
