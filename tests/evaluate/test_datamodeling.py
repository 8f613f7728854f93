"""Masks; LDS against a loop over scipy's spearmanr, its intervals against a known truth."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from distributed import Client
from scipy import stats

import trakdask as td
from tests.laziness import raise_if_dask_computes
from trakdask.testing import simulate_features

lds = td.evaluate.lds
FEATURES = simulate_features(n_samples=30, proj_dim=4)


def test_subsets__lazy_seeded_and_labelled() -> None:
    with raise_if_dask_computes():
        masks = td.evaluate.subsets(td.score(FEATURES, FEATURES), 12, fraction=0.2, seed=3)
        assert "mask" in repr(masks)
    assert (masks.dims, masks.dtype) == (("subset", "sample"), bool)
    assert (masks.sum("sample") == 6).all()
    assert set(masks.coords) == {"label"}
    plain = td.evaluate.subsets(30, 20, fraction=0.2, seed=3)
    np.testing.assert_array_equal(plain[:12], masks)
    assert (td.evaluate.subsets(30, 12, fraction=0.2) != masks).any()


@pytest.mark.parametrize("form", ["coord", "array"])
def test_subsets__by_label(form: str) -> None:
    source = np.array(list("abcdef") * 4 + list("aabbbf"), dtype=object)
    samples = FEATURES.assign_coords(source=("sample", source))
    by = {"coord": "source", "array": source}[form]
    masks = td.evaluate.subsets(samples, 8, by=by, fraction=1 / 3)
    for mask in masks.values:
        assert len(set(source[mask])) == 2
        assert not set(source[mask]) & set(source[~mask])


def test_leave_one_out__each_once_or_some() -> None:
    with raise_if_dask_computes():
        masks = td.evaluate.leave_one_out(FEATURES)
        some = td.evaluate.leave_one_out(30, [7, 7, 2])
    np.testing.assert_array_equal(~masks, np.eye(30, dtype=bool))
    assert (~some.values).nonzero()[1].tolist() == some.left_out.values.tolist() == [7, 7, 2]


# --- lds -----------------------------------------------------------------------------------------


def spearmans(scores: np.ndarray, masks: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """One target after the other, NaN where anything is; outputs (subset, seed, target)."""
    found = np.full(scores.shape[1], np.nan)
    for t in range(scores.shape[1]):
        predicted = [scores[mask, t].astype(np.float64).sum() for mask in masks]
        retrained = outputs[:, :, t].mean(axis=1)
        if np.isnan(scores[:, t]).any() or np.isnan(retrained).any():
            continue
        if len(set(predicted)) > 1 and len(set(retrained)) > 1:
            found[t] = stats.spearmanr(predicted, retrained).statistic
    return found


# Integers, so that sums are exact and many predictions and outputs are equal.
RNG = np.random.default_rng(0)
SCORES = xr.DataArray(RNG.integers(9, size=(40, 7)).astype(np.float32), dims=("sample", "target"))
MASKS = td.evaluate.subsets(40, 30).compute(scheduler="synchronous")
OUTPUTS = xr.dot(MASKS, SCORES, dim="sample").expand_dims(seed=2, axis=1)
OUTPUTS = OUTPUTS + RNG.integers(27, size=(30, 2, 7))


def test_lds__equals_a_loop_over_scipy() -> None:
    scores, outputs = SCORES.copy(), OUTPUTS.copy()
    scores[3, 1] = np.nan
    outputs[4, 1, 2] = np.nan
    scores[:, 3] = 0
    outputs[:, :, 4] = 5
    found = lds(scores, MASKS, outputs, resamples=20).compute()
    expected = spearmans(scores.values, MASKS.values, outputs.values)
    assert np.isnan(expected).tolist() == [False, True, True, True, True, False, False]
    np.testing.assert_allclose(found.lds, expected, atol=1e-12)
    assert float(found.lds_mean) == pytest.approx(np.nanmean(expected))
    assert found.interval.notnull().all()  # a draw without any known target is left out


def test_lds__ceiling_of_each_target() -> None:
    found = lds(SCORES, MASKS, OUTPUTS, resamples=5).ceiling.values
    first, second = OUTPUTS.values[:, 0], OUTPUTS.values[:, 1]
    r = np.array([stats.spearmanr(first[:, t], second[:, t]).statistic for t in range(7)])
    np.testing.assert_allclose(found, np.sqrt(2 * r / (1 + r)), atol=1e-12)
    one = lds(SCORES, MASKS, OUTPUTS.isel(seed=0), resamples=5).compute()
    np.testing.assert_allclose(
        one.lds, spearmans(SCORES.values, MASKS.values, OUTPUTS.values[:, :1])
    )
    assert one.ceiling.isnull().all()


def test_lds__further_dimensions_share_their_resamples() -> None:
    several = {"plain": SCORES, "minus": -SCORES, "again": SCORES}
    result = lds(several, MASKS, OUTPUTS, resamples=50).compute()
    alone = lds(SCORES, MASKS, OUTPUTS, resamples=50)
    assert result.lds.dims == ("target", "estimator")
    for name in ("plain", "again"):
        for variable in ("lds", "lds_mean", "ceiling", "ceiling_mean"):
            found = result[variable].sel(estimator=name) if "lds" in variable else result[variable]
            np.testing.assert_array_equal(found, alone[variable])
    np.testing.assert_allclose(result.lds.sel(estimator="minus"), -alone.lds)
    draws = result.draws.transpose("estimator", "draw").values
    np.testing.assert_allclose(draws[0], draws[2], atol=1e-12)
    np.testing.assert_allclose(draws[0], -draws[1], atol=1e-12)


def test_lds__chunks_order_of_dimensions_and_scheduler_are_invisible(
    process_client: Client,
) -> None:
    scores, outputs = SCORES.chunk(sample=3, target=2), OUTPUTS.chunk(subset=7)
    result = lds(scores.T, MASKS.chunk(subset=4).T, outputs.transpose("target", ...), resamples=20)
    expected = lds(SCORES, MASKS, OUTPUTS, resamples=20).compute(scheduler="sync").drop_attrs()
    for scheduler in ("sync", "threads", process_client):
        found = result.compute(scheduler=scheduler).drop_attrs()
        xr.testing.assert_identical(found, expected)


def test_lds__lazy_and_labelled() -> None:
    features = simulate_features(n_samples=40, proj_dim=8)
    with raise_if_dask_computes():
        scores = td.score(features, features, average=False)
        outputs = xr.DataArray(np.zeros((9, 40)), dims=("subset", "target")).chunk()
        result = lds(scores, td.evaluate.subsets(features, 9), outputs, confidence=0.9)
        assert "lds" in repr(result)
    assert result.lds.chunks is not None
    assert result.lds.dims == ("target", "checkpoint")
    assert result.draws.dims == ("draw", "checkpoint")
    assert result.target_label.dims == ("target",)
    assert result.attrs == {"resamples": 1000, "seed": 0, "confidence": 0.9}


def test_lds__ties_of_leave_one_out() -> None:
    """With masks of all but one, it is the correlation of scores with what leaving out costs."""
    rng = np.random.default_rng(0)
    scores = xr.DataArray(rng.standard_normal((40, 3)), dims=("sample", "target"))
    lost = rng.standard_normal((40, 3)) + scores.values
    outputs = xr.DataArray(7 - lost, dims=("subset", "target"))
    found = lds(scores, td.evaluate.leave_one_out(40), outputs, resamples=2).lds
    expected = [stats.spearmanr(scores[:, t], lost[:, t]).statistic for t in range(3)]
    np.testing.assert_allclose(found, expected, atol=1e-12)


# --- coverage -------------------------------------------------------------------------------------


class World:
    """Linear models with noise of training: sums of θ, scores that are θ with errors, in targets.

    Sums over random halves are normal, as good as; then the Spearman correlation of any two is
    6/π arcsin(r/2), with Pearson's r of the sums.
    """

    def __init__(self, n: int = 60, m: int = 4000) -> None:
        rng = np.random.default_rng(99)
        self.theta = 0.7 * rng.standard_normal((n, 1)) + rng.standard_normal((n, m))
        errors = np.exp(0.5 * rng.standard_normal(m))
        self.scores = self.theta + errors * rng.standard_normal((n, m))
        self.worse = self.scores + 0.5 * rng.standard_normal((n, m))
        centred = self.theta - self.theta.mean(axis=0)
        self.spread = np.sqrt((centred**2).sum(axis=0) * n / (4 * (n - 1)))
        self.noise = self.spread * np.exp(0.5 * rng.standard_normal(m))

    def truth(self, n_seeds: int) -> list[np.ndarray]:
        """LDS of both scores, and ceiling, of every target, had it infinitely many subsets."""
        reached = self.spread / np.sqrt(self.spread**2 + self.noise**2 / n_seeds)
        pearson = [reached * _correlation(self.theta, x) for x in (self.scores, self.worse)]
        return [6 / np.pi * np.arcsin(x / 2) for x in (*pearson, reached)]

    def sample(
        self, seed: int, n_subsets: int, targets: np.ndarray, n_seeds: int
    ) -> tuple[xr.DataArray, xr.DataArray, xr.DataArray]:
        masks = td.evaluate.subsets(len(self.theta), n_subsets, seed=seed).compute()
        noise = np.random.default_rng(seed).standard_normal((n_subsets, n_seeds, len(targets)))
        outputs = (masks.values @ self.theta[:, targets])[:, None] + self.noise[targets] * noise
        both = np.stack([self.scores[:, targets], self.worse[:, targets]], axis=2)
        scores = xr.DataArray(both, dims=("sample", "target", "kind"))
        return scores, masks, xr.DataArray(outputs, dims=("subset", "seed", "target"))


def _correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.array([np.corrcoef(x, y)[0, 1] for x, y in zip(a.T, b.T, strict=True)])


def test_world__truth_is_that_of_very_many_subsets() -> None:
    world, targets = World(m=10), np.arange(10)
    scores, masks, outputs = world.sample(0, 10_000, targets, n_seeds=2)
    for kind in (0, 1):
        found = spearmans(scores.values[:, :, kind], masks.values, outputs.values)
        np.testing.assert_allclose(found, world.truth(2)[kind], atol=0.02)
    expected = masks.values @ world.theta
    mean = outputs.values.mean(axis=1)
    reached = [stats.spearmanr(expected[:, t], mean[:, t]).statistic for t in targets]
    np.testing.assert_allclose(reached, world.truth(2)[2], atol=0.02)


@pytest.mark.slow
def test_lds__intervals_cover_and_ceiling_is_unbiased() -> None:
    """50 experiments, each with its own subsets, training noise and targets of one population."""
    world = World()
    truth, worse, reached = (values.mean() for values in world.truth(n_seeds=2))
    rows = []
    for seed in range(50):
        targets = np.random.default_rng([7, seed]).integers(world.theta.shape[1], size=40)
        inputs = world.sample(seed, 40, targets, n_seeds=2)
        result = lds(*inputs, resamples=120, seed=seed).compute(scheduler="sync")
        difference = (result.draws.sel(kind=0) - result.draws.sel(kind=1)).quantile([0.025, 0.975])
        rows.append([
            covers(result.interval.sel(kind=0), truth),
            covers(difference, truth - worse),
            covers(result.ceiling_interval, reached),
            float(result.ceiling_mean) - reached,
        ])  # fmt: skip
    *covered, off = np.mean(rows, axis=0)
    shown = ", ".join(f"{share:.1%}" for share in covered)
    print(f"LDS, difference, ceiling covered: {shown}; ceiling off by {off:+.4f}")
    assert all(0.86 <= share <= 0.99 for share in covered)
    assert abs(off) < np.std(rows, axis=0)[-1] / 2


def covers(interval: xr.DataArray, truth: float) -> bool:
    low, high = interval.values
    return low <= truth <= high
