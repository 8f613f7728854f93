"""Scores of parts: each against numpy, and their sums against the scores of whole samples."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.testing import raise_if_dask_computes, simulate_features
from trakdask.variables import load_coords

N, P, C, PARTS = 20, 4, 3, 5
X = simulate_features(N, P, C, chunks=8).astype("f8")
T = simulate_features(6, P, C, chunks=4, seed=1).astype("f8")
OPTIONS = {
    "trak": {"estimator": "trak", "damping": 0.1},
    "soft": {"estimator": "soft", "damping": 0.1},
    "relatif": {"estimator": "relatif", "damping": 0.1},
    "grad_dot": {"estimator": "grad_dot"},
    "grad_cos": {"estimator": "grad_cos"},
    "tracin": {"estimator": "tracin", "learning_rates": {"c0": 0.1, "c1": 0.2, "c2": 0.3}},
}


def divided(ds: xr.Dataset, dim: str = "token", seed: int = 0) -> xr.Dataset:
    """The same samples in random parts that add up to them."""
    random = np.random.default_rng(seed)
    shares = random.standard_normal((ds.sizes["sample"], PARTS, P, C))
    shares[:, -1] += ds.feature.values - shares.sum(1)
    words = [[f"{i}.{j}" for j in range(PARTS)] for i in range(ds.sizes["sample"])]
    feature = (("sample", dim, "proj_dim", "checkpoint"), shares)
    made = load_coords(ds.assign(feature=feature).chunk(sample=3, checkpoint=1))
    coords = {"text": (("sample", dim), np.array(words))}
    return made.assign_coords(coords if dim == "token" else {dim: list("abcde")})


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_score__parts_of_targets_add_up(options) -> None:
    found = td.score(X, divided(T), **options)
    assert found.dims == ("sample", "target", "token")
    np.testing.assert_allclose(found.sum("token"), td.score(X, T, **options), rtol=1e-8)
    assert found.target_text.dims == ("target", "token")
    assert found.target_text.values[2, 3] == "2.3"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_score__parts_of_samples_add_up(options) -> None:
    chosen = [3, 11, 17]
    found = td.score(X, T, of=divided(X).isel(sample=chosen), **options)
    assert found.dims == ("sample", "token", "target")
    expected = td.score(X, T, **options).isel(sample=chosen)
    np.testing.assert_allclose(found.sum("token"), expected, rtol=1e-8)
    assert found.label.values.tolist() == expected.label.values.tolist()
    assert found.coords["text"].values[1, 0] == "11.0"


def test_score__part_by_part_against_numpy() -> None:
    of, targets = divided(X, seed=2), divided(T)
    found = td.score(X, targets, of=of, estimator="trak", damping=td.Absolute(0.7))
    assert found.dims == ("sample", "token", "target", "target_token")
    expected = 0
    for c in range(C):
        x = X.feature.values[..., c]
        inverse = np.linalg.inv(x.T @ x + 0.7 * np.eye(P))
        ours, theirs = of.feature.values[..., c], targets.feature.values[..., c]
        expected = expected + np.einsum("zip,pq,tjq->zitj", ours, inverse, theirs) / C
    q = X.out_to_loss.values.mean(1)[:, None, None, None]
    np.testing.assert_allclose(found, expected * q, rtol=1e-7, atol=1e-12)


def test_score__parts_by_checkpoint() -> None:
    apart = td.score(X, divided(T), of=divided(X, "module"), damping=0.1, average=False)
    assert apart.dims == ("sample", "module", "target", "token", "checkpoint")
    together = td.score(X, divided(T), of=divided(X, "module"), damping=0.1)
    np.testing.assert_allclose(apart.mean("checkpoint"), together, rtol=1e-8, atol=1e-12)
    assert together.module.values.tolist() == list("abcde")


def test_group_score__of_parts_of_targets() -> None:
    found = td.group_score(X, divided(T, "module"), by="label", damping=0.1)
    assert found.dims == ("label", "target", "module")
    expected = td.score(X, divided(T, "module"), damping=0.1).groupby("label").sum()
    np.testing.assert_allclose(found, expected.transpose(*found.dims), rtol=1e-8)
    assert found.module.values.tolist() == list("abcde")


def test_score__of_parts_is_lazy_and_does_not_depend_on_chunks() -> None:
    targets, of = divided(T), divided(X)
    with raise_if_dask_computes():
        lazy = td.score(X, targets, of=of, damping=0.1)
    again = td.score(X, targets.chunk(sample=1), of=of.chunk(sample=20), damping=0.1)
    np.testing.assert_allclose(lazy, again, rtol=1e-8, atol=1e-12)


def test_score__parts_of_failed_samples_are_nan() -> None:
    of = divided(X).compute()
    of.feature[4] = np.nan
    found = td.score(X, T, of=of, damping=0.1)
    assert np.isnan(found[4]).all()
    assert np.isfinite(found.drop_isel(sample=4)).all()


def test_score__ranks_training_samples_for_a_single_token() -> None:
    scores = td.score(X, divided(T), damping=0.1)
    top = td.top_k(scores.isel(target=0).rename(token="target"), 3)
    expected = np.argsort(-scores[:, 0].values, axis=0)[:3].T
    np.testing.assert_array_equal(top.position, expected)


@pytest.mark.parametrize("n_parts", [None, 3, 5000])
def test_score__many_targets_in_one_chunk_are_divided(n_parts: int | None) -> None:
    """So that scores of a few targets need few of the others, in any chunks of the targets."""
    n = 5000 if n_parts is None else 2000 if n_parts == 3 else 2
    targets = simulate_features(n, P, C, chunks=n).astype("f8")
    if n_parts is not None:
        shares = np.random.default_rng(0).standard_normal((n, n_parts, P, C))
        feature = (("sample", "token", "proj_dim", "checkpoint"), shares)
        targets = targets.assign(feature=feature).chunk(sample=n, checkpoint=1)
    found = td.score(X, targets, estimator="grad_cos")
    rows = found.data.chunksize[1] * (n_parts or 1)
    assert rows <= max(4096, n_parts or 0)
    small = td.score(X, targets.chunk(sample=7), estimator="grad_cos")
    np.testing.assert_allclose(found, small, rtol=1e-12)
    last = found.isel(target=[n - 1])
    np.testing.assert_array_equal(last, found.compute().isel(target=[n - 1]))


@pytest.mark.parametrize("of_parts", [False, True])
@pytest.mark.parametrize("side", ["targets", "of"])
def test_score__a_side_that_was_made_otherwise_is_refused(side: str, of_parts: bool) -> None:
    sides = {"targets": T, "of": X}
    if of_parts:
        sides[side] = divided(sides[side])
    spec = sides[side].attrs["projector"] | {"seed": 7}
    sides[side] = sides[side].assign_attrs(projector=spec)
    with pytest.raises(td.StoreMismatchError, match="seed"):
        td.score(X, damping=0.1, **sides)
