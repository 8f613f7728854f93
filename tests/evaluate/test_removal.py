"""Removals on a model whose answer is known: ridge regression by downdating."""

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


SCORES = xr.DataArray(
    np.array([ridge_without([]) - ridge_without([i]) for i in range(N)]), dims=("sample", "target")
)


@pytest.mark.parametrize("helpful", [True, False])
def test_removal_curve__equals_downdates_of_the_fit(helpful: bool) -> None:
    fractions, counts = [0.05, 0.2, 0.5], [3, 12, 30]
    curve = td.evaluate.removal_curve(
        ridge, SCORES, fractions, helpful=helpful, n_random=2, random_seed=5, seeds=2
    ).compute()
    mean = SCORES.values.mean(axis=1)
    order = np.argsort(-mean if helpful else mean).tolist()
    expected = np.array([ridge_without(order[:k]) for k in counts])
    np.testing.assert_allclose(curve.output, expected.T)
    np.testing.assert_allclose(curve.mean_output, expected.mean(axis=1))
    assert (curve.mean_output < curve.mean_full_output).values.tolist() == [helpful] * 3
    random = [
        [ridge_without(np.random.default_rng([5, i]).permutation(N)[:k].tolist()) for i in (0, 1)]
        for k in counts
    ]
    np.testing.assert_allclose(curve.random_output.T, np.mean(random, axis=1))
    bounds = stats.t.interval(0.95, M - 1, expected.mean(axis=1), stats.sem(expected, axis=1))
    np.testing.assert_allclose(curve.interval, bounds)
    assert curve.fraction.values.tolist() == fractions


def test_removal_curve__failed_samples_go_last() -> None:
    scores = SCORES.copy()
    scores[:40] = np.nan
    ranked = scores[40:].mean("target").values
    curve = td.evaluate.removal_curve(ridge, scores, [1 / 3, 0.5]).compute()
    order = [*(40 + np.argsort(-ranked)), *range(10)]
    np.testing.assert_allclose(curve.output[:, 0], ridge_without(order[:20]))
    np.testing.assert_allclose(curve.output[:, 1], ridge_without(order))


def test_removal_curve__store_shares_models_with_other_experiments(tmp_path: Path) -> None:
    trained = []

    def counted(positions: np.ndarray, seed: int) -> np.ndarray:
        trained.append(positions)
        return ridge(positions, seed)

    options = {"store": tmp_path / "s", "tag": "ridge", "progress": False}
    first = td.evaluate.removal_curve(counted, SCORES.chunk(sample=9), [0.1, 0.5], **options)
    assert len(trained) == 1 + 2 * (1 + 3)
    xr.testing.assert_identical(
        first, td.evaluate.removal_curve(ridge, SCORES, [0.1, 0.5]).compute()
    )
    two = {"same": SCORES, "minus": -SCORES}
    td.evaluate.removal_curve(counted, two, [0.1, 0.5], **options)
    assert len(trained) == 1 + 2 * (1 + 3) + 2  # only the new ranking is trained
