"""How well scores separate two classes, by scipy and counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from trakdask.arrays.evaluation import proportion_interval, roc_auc


def auc(values: np.ndarray, positive: np.ndarray) -> float:
    """Share of pairs in which the positive one is higher; ties count half."""
    above = values[positive][:, None] - values[~positive]
    return float(np.mean((above > 0) + 0.5 * (above == 0)))


def delong(values: np.ndarray, positive: np.ndarray) -> float:
    """Variance of the area, from the pairs."""
    above = values[positive][:, None] - values[~positive]
    wins = (above > 0) + 0.5 * (above == 0)
    return sum(wins.mean(axis=a).var(ddof=1) / wins.shape[1 - a] for a in (0, 1))


@pytest.mark.parametrize("distinct", [3, 10**9])
def test_roc_auc__equals_all_pairs(distinct: int) -> None:
    rng = np.random.default_rng(0)
    positive = rng.random(60) < 0.3
    values = rng.integers(distinct, size=60) + 0.6 * positive * distinct
    area, (low, high) = roc_auc(values, positive, 0.95)
    assert area == pytest.approx(auc(values, positive))
    error = 1.959964 * delong(values, positive) ** 0.5 / (area * (1 - area))
    logits = np.log([low / (1 - low), area / (1 - area), high / (1 - high)])
    np.testing.assert_allclose(np.diff(logits), error, rtol=1e-6)


def test_roc_auc__perfect_and_unknown() -> None:
    positive = np.array([False, False, True, True])
    area, bounds = roc_auc(np.arange(4.0), positive, 0.95)
    assert (area, bounds.tolist()) == (1.0, [1.0, 1.0])
    area, bounds = roc_auc(np.array([0, np.nan, 1, 2]), positive, 0.95)
    assert np.isnan([area, *bounds]).all()


def test_roc_auc__interval_covers() -> None:
    """300 experiments, 25 of 200 positives, of an area that is known: normals, 1 apart."""
    truth, rng = stats.norm.cdf(1 / 2**0.5), np.random.default_rng(0)
    positive = np.arange(200) < 25
    covered = 0
    for _ in range(300):
        values = rng.standard_normal(200) + positive
        low, high = roc_auc(values, positive, 0.95)[1]
        covered += low <= truth <= high
    assert 0.92 <= covered / 300 <= 0.98


@pytest.mark.parametrize("n", [1, 20, 500])
def test_proportion_interval__equals_scipy(n: int) -> None:
    for count in {0, 1, n // 3, n}:
        found = proportion_interval(np.array(count / n), n, 0.9)
        expected = stats.binomtest(count, n).proportion_ci(0.9, method="wilson")
        np.testing.assert_allclose(found, expected, atol=1e-12)
