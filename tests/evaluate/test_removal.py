"""Removals on models whose answer is known: nearest neighbour, and ridge by downdating."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from scipy import stats

import trakdask as td

RNG = np.random.default_rng(0)
N, M = 60, 12
X, X_TARGET = RNG.standard_normal((N, 2)), RNG.standard_normal((M, 2))
LABEL = np.where(X[:, 0] + 0.3 * RNG.standard_normal(N) > 0, 1, -1)
TARGET_LABEL = np.where(X_TARGET[:, 0] > 0, 1, -1)
DISTANCE = np.linalg.norm(X[:, None] - X_TARGET, axis=2)
SAME = LABEL[:, None] == TARGET_LABEL


def nearest_neighbour(positions: np.ndarray, seed: int) -> np.ndarray:
    """Margin: how much nearer the nearest sample of the target's class is than any other."""
    near = np.where(SAME[positions], DISTANCE[positions], np.inf).min(axis=0)
    far = np.where(SAME[positions], np.inf, DISTANCE[positions]).min(axis=0)
    return far - near


# The nearer of the target's class, the more helpful; no other sample helps.
SCORES = xr.DataArray(np.where(SAME, 10 - DISTANCE, -1), dims=("sample", "target"))


def needed_to_flip() -> np.ndarray:
    """For each target, how many samples of its class are nearer than the nearest other one."""
    far = np.where(SAME, np.inf, DISTANCE).min(axis=0)
    return (SAME & (far > DISTANCE)).sum(axis=0)


Y = RNG.standard_normal(N)


def ridge(positions: np.ndarray, seed: int) -> np.ndarray:
    x = X[positions]
    return X_TARGET @ np.linalg.solve(x.T @ x + np.eye(2), x.T @ Y[positions])


def ridge_without(removed: list[int]) -> np.ndarray:
    """Sherman–Morrison, one sample after the other, from the fit of all."""
    inverse, moment = np.linalg.inv(X.T @ X + np.eye(2)), X.T @ Y
    for i in removed:
        direction = inverse @ X[i]
        inverse = inverse + np.outer(direction, direction) / (1 - X[i] @ direction)
        moment = moment - Y[i] * X[i]
    return X_TARGET @ inverse @ moment


RIDGE_SCORES = xr.DataArray(
    np.array([ridge_without([]) - ridge_without([i]) for i in range(N)]), dims=("sample", "target")
)


# --- brittleness ----------------------------------------------------------------------------------


def test_brittleness__nearest_neighbour_flips_when_it_must() -> None:
    ks, needed = [1, 3, 5, 9, 20], needed_to_flip()
    result = td.evaluate.brittleness(nearest_neighbour, SCORES, ks).compute()
    flips = np.array([[0 < needed[t] <= k for k in ks] for t in range(M)])
    assert 0 < flips.mean() < 1
    np.testing.assert_array_equal(result.full_output > 0, needed > 0)
    np.testing.assert_array_equal(result.flips, flips)
    assert result.flips.dtype == bool
    np.testing.assert_allclose(result.flip_fraction, flips.mean(axis=0))
    for i, count in enumerate(flips.sum(axis=0).tolist()):
        expected = stats.binomtest(count, M).proportion_ci(method="wilson")
        np.testing.assert_allclose(result.interval[:, i], expected)
    assert result.k.values.tolist() == ks


def test_brittleness__outputs_are_those_without_the_top_k() -> None:
    result = td.evaluate.brittleness(ridge, RIDGE_SCORES, [1, 7], seeds=2).compute()
    for t in range(M):
        top = np.argsort(-RIDGE_SCORES.values[:, t]).tolist()
        expected = [ridge_without(top[:k])[t] for k in (1, 7)]
        np.testing.assert_allclose(result.output[t], expected)
    np.testing.assert_allclose(result.full_output, ridge_without([]))


def test_brittleness__random_removals_by_hand() -> None:
    result = td.evaluate.brittleness(
        ridge, RIDGE_SCORES, [10, 30], n_random=4, random_seed=5, threshold=0.05
    ).compute()
    full, fractions = ridge_without([]) > 0.05, []
    for k in (10, 30):
        removed = [np.random.default_rng([5, i]).permutation(N)[:k].tolist() for i in range(4)]
        fractions.append(np.mean([(ridge_without(some) > 0.05) != full for some in removed]))
    assert 0 < fractions[1] < 1
    np.testing.assert_allclose(result.random_flip_fraction, fractions)
    assert (result.random_interval[0] < result.random_flip_fraction).all()
    assert (result.random_interval[1] > result.random_flip_fraction).all()


def test_brittleness__store_shares_models_with_other_experiments(tmp_path: Path) -> None:
    trained = []

    def counted(positions: np.ndarray, seed: int) -> np.ndarray:
        trained.append(positions)
        return ridge(positions, seed)

    options = {"store": tmp_path / "s", "tag": "ridge", "progress": False}
    first = td.evaluate.brittleness(counted, RIDGE_SCORES, [6, 30], **options)
    distinct = len(trained)
    again = td.evaluate.brittleness(counted, RIDGE_SCORES, [6, 30], **options)
    assert len(trained) == distinct
    xr.testing.assert_identical(first, again)
    xr.testing.assert_identical(
        first, td.evaluate.brittleness(ridge, RIDGE_SCORES, [6, 30]).compute()
    )
    curve = td.evaluate.removal_curve(counted, RIDGE_SCORES, [0.1, 0.5], **options)
    assert len(trained) - distinct == 2  # all samples and random removals are there
    np.testing.assert_array_equal(curve.full_output, first.full_output)


# --- removal curve --------------------------------------------------------------------------------


@pytest.mark.parametrize("helpful", [True, False])
def test_removal_curve__ridge(helpful: bool) -> None:
    fractions, counts = [0.05, 0.2, 0.5], [3, 12, 30]
    curve = td.evaluate.removal_curve(
        ridge, RIDGE_SCORES, fractions, helpful=helpful, n_random=2
    ).compute()
    mean = RIDGE_SCORES.values.mean(axis=1)
    order = np.argsort(-mean if helpful else mean).tolist()
    expected = np.array([ridge_without(order[:k]) for k in counts])
    np.testing.assert_allclose(curve.output, expected.T)
    np.testing.assert_allclose(curve.mean_output, expected.mean(axis=1))
    assert (curve.mean_output < curve.mean_full_output).values.tolist() == [helpful] * 3
    random = [
        [ridge_without(np.random.default_rng([0, i]).permutation(N)[:k].tolist()) for i in (0, 1)]
        for k in counts
    ]
    np.testing.assert_allclose(curve.random_output.T, np.mean(random, axis=1))
    bounds = stats.t.interval(0.95, M - 1, expected.mean(axis=1), stats.sem(expected, axis=1))
    np.testing.assert_allclose(curve.interval, bounds)
    assert curve.fraction.values.tolist() == fractions
