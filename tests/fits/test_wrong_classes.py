"""The curvature between wrong classes, against explicit Jacobians and solves in float64."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import trakdask as td

RNG = np.random.default_rng(0)
N_CLASSES = 5
FIT = {"curvature": False, "components": False, "sketch": td.Identity(), "dtype": "float64"}


def arrays(n: int) -> dict[str, np.ndarray]:
    return {"x": RNG.normal(size=(n, 4)), "label": np.arange(n) % N_CLASSES}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, N_CLASSES)).double()


SAMPLES = td.from_arrays(arrays(60), chunks=40)
STATES = []
for seed in range(3):
    torch.manual_seed(seed)
    STATES.append({name: 2 * tensor for name, tensor in net().state_dict().items()})
MODEL = td.Model(net, dict(zip("abc", STATES, strict=True)), task="classification")


@functools.cache
def projector() -> Any:
    return td.fit(SAMPLES, MODEL, n_samples=15, progress=False, **FIT)


def featurized(samples: xr.Dataset, model: td.Model = MODEL) -> xr.Dataset:
    return td.featurize(samples, model, projector(), dtype="float64")


@functools.cache
def features() -> xr.Dataset:
    return featurized(SAMPLES).compute()


@functools.cache
def targets() -> xr.Dataset:
    return td.featurize(td.from_arrays(arrays(7)), MODEL, like=features()).compute()


def rows_of_part() -> np.ndarray:
    return np.sort(np.random.default_rng(0).permutation(60)[:15])


def jacobians(state: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return logits (sample, class) and their derivative (sample, class, parameter)."""
    module = net()

    def logits(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, weights, (x[None],))[0]

    x = torch.tensor(SAMPLES.x.values)
    by_name = torch.func.vmap(torch.func.jacrev(logits), in_dims=(None, 0))(state, x)
    flat = torch.cat([by_name[name].flatten(2) for name in state], 2)
    return torch.func.vmap(logits, in_dims=(None, 0))(state, x).detach().numpy(), flat.numpy()


def explicit(state: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return K with h = √q (1 - q), and the mean of 2 √q ψ ψᵀ, ψ = vᵀ (e_k - r), of some."""
    total, between = 0.0, 0.0
    triples = zip(*jacobians(state), SAMPLES.label.values, strict=True)
    for row, (z, v, y) in enumerate(triples):
        p = np.exp(z) / np.exp(z).sum()
        r = np.where(np.arange(N_CLASSES) == y, 0, p) / (1 - p[y])
        margin, wrong = np.eye(N_CLASSES)[y] - r, np.eye(N_CLASSES)[r.argmax()] - r
        total += np.sqrt(1 - p[y]) * p[y] * np.outer(margin @ v, margin @ v)
        if row in rows_of_part():
            between += 2 * np.sqrt(1 - p[y]) * np.outer(wrong @ v, wrong @ v) / 15
        # What the outer product stands for: over all k, its mean is the covariance of classes.
        drawn = np.einsum("k,ki,kj->ij", r, np.eye(N_CLASSES) - r, np.eye(N_CLASSES) - r)
        np.testing.assert_allclose(drawn, np.diag(r) - np.outer(r, r), atol=1e-12)
    return np.asarray(total), np.asarray(between)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("is_stored", [False, True])
def test_scores__have_both_matrices_in_k_before_lambda(is_stored: bool, tmp_path: Path) -> None:
    train, soft = features(), td.Soft(power=0.5)
    if is_stored:
        train = td.save(train, tmp_path / "f.zarr", estimator=soft, progress=False)
    scores = td.score(train, targets(), soft, average=False)
    influence = td.self_influence(train, soft, average=False)
    lam = td.damping(train, soft).damping.values
    assert "wrong classes" in scores.attrs["gram_weights"]
    g = np.sqrt(features().out_to_loss.values.astype(float)).mean(1)
    for c, state in enumerate(STATES):
        total, between = explicit(state)
        np.testing.assert_allclose(train.wrong_classes[..., c], between, rtol=1e-4, atol=1e-7)
        k = total + 60 * between
        if is_stored:
            np.testing.assert_allclose(train.gram[..., c], k, rtol=1e-4, atol=1e-6)
        phi, psi = (ds.feature.values[:, :, c].astype(float) for ds in (features(), targets()))
        inverse = np.linalg.inv(k + lam[c] * np.eye(len(k)))
        expected = g[:, None] * (phi @ inverse @ psi.T)
        np.testing.assert_allclose(scores[..., c], expected, rtol=1e-4, atol=1e-6)
        forms = np.einsum("ij,jk,ik->i", phi, inverse, phi)
        np.testing.assert_allclose(influence[:, c], g**2 * forms, rtol=1e-4, atol=1e-6)
        trace = td.damping(train, td.Soft(power=0.5, damping="trace")).damping.values[c]
        np.testing.assert_allclose(trace, np.trace(k) / 60, rtol=1e-5)
    without = features().drop_vars("wrong_classes")
    for estimator in ("trak", td.Trak(damping=0.1)):
        np.testing.assert_allclose(
            td.score(train, targets(), estimator), td.score(without, targets(), estimator),
            rtol=1e-4, atol=1e-6,
        )  # fmt: skip
    left_out = td.score(train, targets(), td.Soft(wrong_classes=False))
    np.testing.assert_allclose(left_out, td.score(without, targets()), rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_store__keeps_the_mean_when_samples_come_and_go(tmp_path: Path) -> None:
    store, soft = tmp_path / "f.zarr", td.Soft(power=0.5)
    first, last = (SAMPLES.isel(sample=rows) for rows in (slice(40), slice(40, None)))
    opened = td.save(featurized(first), store, progress=False)
    mean = opened.wrong_classes.values
    more = td.featurize(last, MODEL, like=opened)
    opened = td.save(more, store, append_dim="sample", progress=False)
    np.testing.assert_array_equal(opened.wrong_classes, mean)
    h = features().out_to_loss ** 0.5 * (1 - features().out_to_loss)

    def expected(rows: slice) -> np.ndarray:
        some, weights = features().isel(sample=rows), h.isel(sample=rows)
        n = some.sizes["sample"]
        return td.gram(some, weights=weights).values + n * mean

    np.testing.assert_allclose(opened.gram, expected(slice(None)), rtol=1e-5, atol=1e-6)
    left = td.drop(store, where=xr.DataArray(SAMPLES.label.values < 1, dims="sample"))
    keep = np.flatnonzero(SAMPLES.label.values >= 1)
    np.testing.assert_allclose(left.gram, expected(keep), rtol=1e-5, atol=1e-6)
    whole = left.isel(sample=[3, 11])  # rows keep the matrices of all
    np.testing.assert_allclose(
        td.score(whole, targets(), soft), td.score(left, targets(), soft)[[3, 11]], rtol=1e-6
    )
    assert not len(td.verify(store, checksums=True))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("stored") / "f.zarr"
    td.save(features(), store, progress=False)
    return store


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("columns", [slice(None, None, -1), [4, 1], [1, 0], slice(1, 3)])
def test_store__of_some_columns_knows_both_halves_of_their_matrix(
    stored: Path, columns: Any
) -> None:
    """A store has the upper triangle alone, of all columns in their order."""
    expected = features().isel(proj_dim=columns)
    explained = targets().isel(proj_dim=columns)
    soft = td.Soft(power=0.5, damping=td.Absolute(1.0))
    for door, dims in itertools.product(
        (td.open, xr.open_zarr), (["proj_dim"], ["proj_dim", "proj_dim_1"])
    ):
        found = door(stored).isel(dict.fromkeys(dims, columns), missing_dims="ignore")
        for ask in (functools.partial(td.score, targets=explained), td.self_influence):
            scores = (ask(ds, estimator=soft) for ds in (found, expected))
            np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_store__of_more_checkpoints(tmp_path: Path) -> None:
    store, of_a = tmp_path / "f.zarr", MODEL.at_checkpoints(["a"])
    td.save(featurized(SAMPLES, of_a), store, progress=False)
    lazy = featurized(SAMPLES)
    with pytest.raises(td.errors.StoreMismatchError, match=r"'wrong_classes'.*\['b', 'c'\]"):
        td.save(lazy.drop_vars("wrong_classes"), store, append_dim="checkpoint", progress=False)
    opened = td.save(lazy, store, append_dim="checkpoint", progress=False)
    once = td.save(lazy, tmp_path / "once.zarr", progress=False)
    for name in ("wrong_classes", "gram", "damping"):
        np.testing.assert_allclose(opened[name], once[name], rtol=1e-9)


def test_features__without_wrong_classes(tmp_path: Path) -> None:
    regression = td.Model(nn.Linear(4, 1).double(), task="regression")
    samples = td.from_arrays({"x": np.random.default_rng(0).normal(size=(8, 4)), "y": np.ones(8)})
    made = td.fit(samples, regression, 2, sketch=td.SJLT(4), dtype="float64", progress=False)
    assert "wrong_classes" not in td.featurize(samples, regression, made)
    assert "wrong_classes" not in td.featurize(SAMPLES, MODEL, td.SJLT(8))
    for estimator in (None, "trak", td.Soft(wrong_classes=False)):
        path = tmp_path / f"{estimator!r:.6}.zarr"
        lazy = featurized(SAMPLES)
        saved = td.save(lazy, path, estimator=estimator, progress=False)
        assert "wrong_classes" not in saved


def test_matrix__of_two_classes_is_zero() -> None:
    model = td.Model(nn.Linear(4, 2).double(), task="classification")
    samples = SAMPLES.assign(label=SAMPLES.label % 2)
    assert not td.fit(samples, model, progress=False, **FIT).arrays["wrong_classes"].any()


@pytest.mark.parametrize(("rho", "seed", "noise"), [(0.2, 9, 0.3), (5.0, 1, 1.0)])
def test_damping__follows_outputs_within_a_decade_of_the_prior(
    rho: float, seed: int, noise: float
) -> None:
    """Rows that a checkpoint was not trained on would ask for too much, so it has to know all."""
    ds = features()
    g = np.sqrt(ds.out_to_loss.values).mean(1)
    lam = td.damping(ds, td.Soft(power=0.5, damping="trace")).damping.values * rho
    totals = 0.0
    for c, state in enumerate(STATES):
        k, phi = np.add(*np.multiply(explicit(state), [[[1]], [[60]]])), ds.feature.values[:, :, c]
        totals += phi @ np.linalg.solve(k + lam[c] * np.eye(len(k)), phi.T @ g)
    noises = noise * totals.std() * np.random.default_rng(seed).normal(size=totals.shape)
    ds = ds.assign(output=ds.output.copy(data=np.repeat((totals + noises)[:, None], 3, axis=1)))
    chosen = td.damping(ds).compute()
    near = chosen.curve.sel(relative_damping=slice(0.099, 10.1))
    assert float(chosen.relative) == float(near.idxmax()) != 1
    knows = xr.DataArray(np.ones((60, 3), bool), dims=("sample", "checkpoint"))
    assert float(td.damping(ds.assign(trained_on=knows)).relative) == 1


class Logged(td.tasks.Classification):
    """Means the same as its class, and says so."""

    loss_kind = "cross-entropy"

    def output(self, forward: Any, batch: Any) -> torch.Tensor:
        return super().output(forward, batch) + 0


class Silent(td.tasks.Classification):
    def output(self, forward: Any, batch: Any) -> torch.Tensor:
        return super().output(forward, batch) * 2


class Halved(td.tasks.Classification):
    """Has logits of its own, as the matrix between wrong classes must have."""

    def _logits(self, forward: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, label = super()._logits(forward, batch)
        return logits / 2, label


def test_wrong_classes__of_subclasses_that_mean_the_same() -> None:
    states = dict(zip("abc", STATES, strict=True))
    found = {
        kind: td.fit(SAMPLES, td.Model(net, states, kind()), n_samples=15, progress=False, **FIT)
        for kind in (td.tasks.Classification, Logged, Silent, Halved)
    }
    plain, same, other, halved = (fit.arrays.get("wrong_classes") for fit in found.values())
    np.testing.assert_array_equal(same, plain)
    assert other is None
    assert np.isfinite(halved).all()
    assert not np.allclose(halved, plain, rtol=0.1)
    weighted = td.tasks.Classification(weights=[1.0] * N_CLASSES)
    fit = td.fit(SAMPLES, td.Model(net, states, weighted), n_samples=15, progress=False, **FIT)
    assert fit.arrays.get("wrong_classes") is None


@pytest.mark.parametrize("columns", [[3, 0, 2], [*range(1, 32), 0]])
def test_wrong_classes__follow_the_columns_that_are_selected(columns: list[int]) -> None:
    """``isel(proj_dim=...)`` selects along one of the two axes of their matrix."""
    some, estimator = {"proj_dim": columns}, td.Soft(power=0.5, damping=td.Absolute(1.0))
    both = features().wrong_classes.isel(some).values[:, columns]
    expected = td.score(
        features().isel(some).drop_vars(["wrong_classes", "proj_column"]).assign(
            wrong_classes=(("proj_dim", "proj_dim_1", "checkpoint"), both)
        ),
        targets().isel(some).drop_vars(["wrong_classes", "proj_column"]),
        estimator,
    )  # fmt: skip
    found = td.score(features().isel(some), targets().isel(some), estimator)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
