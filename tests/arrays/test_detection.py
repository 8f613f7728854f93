"""How well scores separate two classes, by scikit-learn, scipy and counting by hand."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from trakdask.arrays.detection import class_ranks, proportion_interval, roc_auc

N, M, COUNTS = 40, 6, [1, 4, 40]
RNG = np.random.default_rng(0)
CODES = np.stack([RNG.integers(3, size=N), RNG.integers(2, size=N)], axis=1)
TARGET_CODES = np.stack([RNG.integers(3, size=M), RNG.integers(2, size=M)], axis=1)
SCORES = {
    "distinct": RNG.standard_normal((N, M, 2)),
    "ties": RNG.integers(4, size=(N, M, 2)).astype("f4"),
    "infinite": np.where(RNG.random((N, M, 2)) < 0.2, np.inf, RNG.standard_normal((N, M, 2))),
    "unknown": np.where(RNG.random((N, M, 2)) < 0.2, np.nan, RNG.integers(9, size=(N, M, 2))),
}


def by_hand(values: np.ndarray, relevant: np.ndarray) -> list[float]:
    """AUC of scikit-learn; ranks by counting, samples of other classes first among equals."""
    finite = np.unique(values, return_inverse=True)[1]  # scikit-learn refuses inf
    rank = [
        1 + sum(v > own for v in values[relevant]) + sum(values[~relevant] >= own) + before
        for own, before in zip(values[relevant], ties_before(values[relevant]), strict=True)
    ]
    found = [sum(r <= k for r in rank) for k in COUNTS]
    precision = [n / k for n, k in zip(found, COUNTS, strict=True)]
    return [roc_auc_score(relevant, finite), *precision]


def ties_before(values: np.ndarray) -> list[int]:
    return [int((values[:i] == values[i]).sum()) for i in range(len(values))]


@pytest.mark.parametrize("case", SCORES)
@pytest.mark.parametrize("chunks", [(7, 4, 1), (40, 1, 2), (1, 6, 2)])
def test_class_ranks__by_hand(case: str, chunks: tuple[int, ...]) -> None:
    scores = SCORES[case]
    result = class_ranks(da.from_array(scores, chunks), CODES, TARGET_CODES, COUNTS).compute()
    assert result.shape == (M, 2, 1 + len(COUNTS))
    for t in range(M):
        for e in range(2):
            column = scores[:, t, e]
            ranked = (CODES[:, 1] == TARGET_CODES[t, 1]) & ~np.isnan(column)
            relevant = CODES[ranked, 0] == TARGET_CODES[t, 0]
            np.testing.assert_allclose(result[t, e], by_hand(column[ranked], relevant))


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
