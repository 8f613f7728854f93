"""The power of the weights of samples: from what a store keeps, or from the outputs."""

from __future__ import annotations

from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.attribution.estimators import resolve
from trakdask.testing import simulate_features

N, P = 120, 4
DEVIATIONS = {"c0": 0.7, "c1": 1.0, "c2": 1.3}


def features(seed: int = 0) -> xr.Dataset:
    """Margins that vary by known amounts, at each checkpoint."""
    made = simulate_features(N, P, 3, chunks=32, seed=seed)
    logit = np.random.default_rng(seed).standard_normal((N, 3))
    logit = (logit - logit.mean(0)) / logit.std(0) * list(DEVIATIONS.values()) + 3
    q = da.from_array((1 / (1 + np.exp(logit))).astype("f4"), chunks=(32, 1), name=f"q-{seed}")
    output = da.from_array(logit.astype("f4"), chunks=(32, 1), name=f"f-{seed}")
    dims = ("sample", "checkpoint")
    made = made.assign(out_to_loss=(dims, q), output=(dims, output))
    return made.assign_attrs(default_estimator="soft")


def power(ds: xr.Dataset) -> float | None:
    found = resolve(ds, "auto").of_scores(ds).power
    return float(found.compute()) if isinstance(found, da.Array) else found


def expected(*deviations: float) -> float:
    return np.interp(np.sqrt(np.mean(np.square(deviations))), (0.8, 1.4), (1, 0.5))


def test_power__is_that_of_the_mean_variance() -> None:
    assert power(features()) == pytest.approx(expected(0.7, 1.0, 1.3), rel=1e-6)
    assert power(features().isel(checkpoint=[0])) == 1
    assert power(features().isel(checkpoint=[2])) == pytest.approx(expected(1.3), rel=1e-6)


def test_power__of_selected_rows_is_that_of_all(tmp_path: Path) -> None:
    saved = td.save(features(), tmp_path / "f.zarr", progress=False)
    stored = resolve(saved, "auto").of_scores(saved).power
    assert stored == pytest.approx(expected(0.7, 1.0, 1.3), rel=1e-6)  # not lazy
    sure = np.flatnonzero(saved.output.mean("checkpoint") > 3)
    assert power(saved.isel(sample=sure)) == power(saved)
    targets, estimator = features(1).isel(sample=slice(5)), td.Soft(damping=td.Absolute(1.0))
    found = td.score(saved.isel(sample=sure), targets, estimator)
    assert f"q^{stored:g}" in found.attrs["formula"]
    lazily = td.score(features(), targets, estimator)
    assert "q^b" in lazily.attrs["formula"]
    np.testing.assert_allclose(found, lazily[sure], rtol=1e-4, atol=1e-6)


def test_power__follows_an_append_and_a_drop(tmp_path: Path) -> None:
    td.save(features(), tmp_path / "f.zarr", progress=False)
    other = features(5)
    wide = other.assign(out_to_loss=other.out_to_loss**3).assign_attrs(source="other")
    both = td.save(wide, tmp_path / "f.zarr", append_dim="sample", progress=False)
    assert power(both) == pytest.approx(power(both.drop_vars("damping")), rel=1e-6)
    assert power(both) == 0.5
    left = td.drop(tmp_path / "f.zarr", where=xr.DataArray(np.arange(2 * N) >= N, dims="sample"))
    assert power(left) == pytest.approx(expected(0.7, 1.0, 1.3), rel=1e-6)
