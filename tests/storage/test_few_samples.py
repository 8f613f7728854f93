"""Stores of fewer samples than dimensions, which have that many eigenvectors, against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.testing import simulate_features

N, P, C = 60, 96, 3


SOFT = {"estimator": "soft", "progress": False}
pytestmark = pytest.mark.filterwarnings("ignore:outputs of the training rows", "ignore:λ")


def features(n: int = N, seed: int = 0, chunks: int = 16) -> xr.Dataset:
    made = simulate_features(n, P, C, chunks=16, seed=seed)
    scale = xr.DataArray(0.95 ** np.arange(P, dtype="f4"), dims="proj_dim")
    made = made.assign(feature=(made.feature + np.float32(0.3)) * scale)
    return made.chunk(sample=chunks).assign_attrs(source=f"few {n} {seed}")


TARGETS = features(7, seed=3)


def oracle(ds: xr.Dataset, lam: np.ndarray) -> np.ndarray:
    """Soft scores of power ½ by dense solves in float64."""
    x, t, q = (a.values.astype("f8") for a in (ds.feature, TARGETS.feature, ds.out_to_loss))
    scores = np.zeros((len(x), t.shape[0]))
    for c in range(C):
        k = (x[..., c] * (q**0.5 * (1 - q))[:, [c]]).T @ x[..., c] + lam[c] * np.eye(P)
        scores += x[..., c] @ np.linalg.solve(k, t[..., c].T) / C
    return scores * (q**0.5).mean(1)[:, None]


def assert_scores(ds: xr.Dataset, found: xr.DataArray, lam: np.ndarray, rtol: float = 1e-5) -> None:
    expected = oracle(ds, lam)
    np.testing.assert_allclose(found, expected, rtol=10 * rtol, atol=rtol * np.abs(expected).max())


@pytest.mark.parametrize("damping", ["auto", "completeness", 0.01, td.Absolute(0.02)])
def test_score__equals_the_float64_solve(tmp_path: Path, damping: object) -> None:
    saved = td.save(features(), tmp_path / "f.zarr", **SOFT)
    assert saved.sizes["component"] == N
    lam = td.damping(saved, td.Soft(damping=damping)).damping.values
    dense = td.damping(features(), td.Soft(damping=damping)).damping.values
    np.testing.assert_allclose(lam, dense, rtol=1e-6)
    assert_scores(saved, td.score(saved, TARGETS, td.Soft(damping=damping)), lam)
    loaded = saved.compute()
    assert_scores(saved, td.score(loaded, TARGETS, td.Soft(damping=damping)), lam)
    one = td.score(saved.isel(sample=[5, 9]), TARGETS, td.Soft(damping=damping))
    np.testing.assert_allclose(one, oracle(saved, lam)[[5, 9]], rtol=1e-3, atol=1e-4)


def test_save__append_and_drop_renew_the_eigenvectors(tmp_path: Path) -> None:
    path = tmp_path / "f.zarr"
    td.save(features(48), path, **SOFT)
    after = td.save(features(16, seed=1), path, append_dim="sample", **SOFT)
    assert after.sizes["component"] == 64
    assert_scores(after, td.score(after, TARGETS, "soft"), after.damping.values)
    after = td.save(features(48, seed=2), path, append_dim="sample", **SOFT)
    assert after.sizes["component"] == P
    assert_scores(after, td.score(after, TARGETS, "soft"), after.damping.values)
    left = td.drop(path, where=lambda ds: ds.label % 2 == 1)
    assert left.sizes["component"] == left.sizes["sample"] < P
    assert_scores(left, td.score(left, TARGETS, "soft"), left.damping.values, rtol=1e-4)
