"""Agreement of seeds and with random models, on scores whose noise is known."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from scipy import stats

import trakdask as td
from trakdask.testing import raise_if_dask_computes

N, M, SEEDS = 400, 10, 4
RNG = np.random.default_rng(2)
SIGNAL = RNG.standard_normal((N, M, 1))
RUNS = xr.DataArray(
    SIGNAL + 1.5 * RNG.standard_normal((N, M, SEEDS)),
    dims=("sample", "target", "run"),
    coords={"run": list("abcd"), "name": ("target", [f"t{i}" for i in range(M)])},
)


def test_randomization_check__of_every_target() -> None:
    scores, randomized = RUNS.isel(run=0, drop=True), RUNS.isel(run=[1, 2])
    with raise_if_dask_computes():
        result = td.evaluate.randomization_check(
            scores.chunk(sample=30, target=3), randomized.chunk(sample=50, run=1)
        )
    result = result.compute()
    for t in range(M):
        for i in range(2):
            expected = stats.spearmanr(scores[:, t], randomized[:, t, i]).statistic
            np.testing.assert_allclose(result.correlation[t, i], expected)
    np.testing.assert_allclose(result.correlation_mean, result.correlation.mean("target"))
    assert (result.interval[0] < result.correlation_mean).all()
    assert (result.interval[1] > result.correlation_mean).all()
    assert result.run.values.tolist() == ["b", "c"]
    assert result["name"].values[1] == "t1"


def test_randomization_check__within_the_class() -> None:
    """Scores of other classes are left out; random scores of the same labels then agree no more."""
    label, target_label = RNG.integers(2, size=N), RNG.integers(2, size=M)
    same = xr.DataArray(label[:, None] == target_label, dims=("sample", "target"))
    one, other = (
        same * 5 + xr.DataArray(RNG.standard_normal((N, M)), dims=("sample", "target"))
        for _ in range(2)
    )
    everywhere = td.evaluate.randomization_check(one, other).compute()
    within = td.evaluate.randomization_check(one.where(same), other).compute()
    assert float(everywhere.correlation_mean) > 0.6
    assert within.interval[0] < 0 < within.interval[1]
    expected = stats.spearmanr(one[same[:, 3].values, 3], other[same[:, 3].values, 3]).statistic
    np.testing.assert_allclose(within.correlation[3], expected)


def test_seed_agreement__of_every_pair() -> None:
    with raise_if_dask_computes():
        lazy = td.evaluate.seed_agreement(RUNS.chunk(sample=30, target=3, run=1), "run")
    result = lazy.compute()
    matrices = np.stack([stats.spearmanr(RUNS[:, t]).statistic for t in range(M)])
    upper = np.triu_indices(SEEDS, 1)
    np.testing.assert_allclose(result.agreement, matrices[:, *upper].mean(axis=1))
    np.testing.assert_allclose(result.pairs, matrices.mean(axis=0))
    assert result.pairs.sel(run="a", run_1="b") == result.pairs.sel(run="b", run_1="a")
    assert result.interval[0] < result.agreement_mean < result.interval[1]


def test_seed_agreement__reliability_is_that_of_new_models() -> None:
    """What four models predict for means of k is what means of k other ones show."""
    result = td.evaluate.seed_agreement(RUNS, "run", n_models=[1, 4, 16]).compute()
    rng = np.random.default_rng(3)
    for k in (1, 4, 16):
        one, other = (
            (SIGNAL + 1.5 * rng.standard_normal((N, M, k))).mean(axis=2) for _ in range(2)
        )
        seen = np.mean([stats.spearmanr(one[:, t], other[:, t]).statistic for t in range(M)])
        assert float(result.reliability.sel(n_models=k)) == pytest.approx(seen, abs=0.04)
    low, high = result.reliability_interval.transpose("bound", ...).values
    assert (low < result.reliability.values).all()
    assert (high > result.reliability.values).all()


def test_seed_agreement__of_checkpoints() -> None:
    features = td.testing.simulate_features(n_samples=20, proj_dim=4, n_checkpoints=3)
    scores = td.score(features, features.isel(sample=slice(3)), average=False)
    result = td.evaluate.seed_agreement(scores, resamples=20).compute()
    names = features.checkpoint.values.tolist()
    assert result.checkpoint.values.tolist() == result.checkpoint_1.values.tolist() == names
    chunked = td.evaluate.seed_agreement(scores.chunk(sample=3, target=1), resamples=20).compute()
    xr.testing.assert_identical(result, chunked)
