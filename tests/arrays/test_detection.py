"""Ranks of classes and agreement of models, by scikit-learn, scipy and counting by hand."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import average_precision_score, roc_auc_score

from trakdask.arrays.evaluation import average_precision, class_ranks, rank_correlations

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
    recall = [n / relevant.sum() for n in found]
    return [roc_auc_score(relevant, finite), 1 / min(rank), *precision, *recall]


def ties_before(values: np.ndarray) -> list[int]:
    return [int((values[:i] == values[i]).sum()) for i in range(len(values))]


@pytest.mark.parametrize("case", SCORES)
@pytest.mark.parametrize("chunks", [(7, 4, 1), (40, 1, 2), (1, 6, 2)])
def test_class_ranks__by_hand(case: str, chunks: tuple[int, ...]) -> None:
    scores = SCORES[case]
    result = class_ranks(da.from_array(scores, chunks), CODES, TARGET_CODES, COUNTS).compute()
    assert result.shape == (M, 2, 2 + 2 * len(COUNTS))
    for t in range(M):
        for e in range(2):
            column = scores[:, t, e]
            ranked = (CODES[:, 1] == TARGET_CODES[t, 1]) & ~np.isnan(column)
            relevant = CODES[ranked, 0] == TARGET_CODES[t, 0]
            np.testing.assert_allclose(result[t, e], by_hand(column[ranked], relevant))


@pytest.mark.parametrize("case", SCORES)
def test_average_precision__as_in_scikit_learn(case: str) -> None:
    scores, positive = SCORES[case], np.arange(N) % 5 == 0
    result = average_precision(da.from_array(scores, (7, 4, 1)), positive).compute()
    for t in range(M):
        for e in range(2):
            known = ~np.isnan(scores[:, t, e])
            finite = np.unique(scores[known, t, e], return_inverse=True)[1]
            expected = average_precision_score(positive[known], finite)
            np.testing.assert_allclose(result[t, e], expected)


MODELS = RNG.standard_normal((30, 5, 1)) + RNG.standard_normal((30, 5, 4))
AGREEMENT = {
    "distinct": MODELS,
    "ties": np.round(MODELS).astype("f4"),
    "unknown": np.where(RNG.random(MODELS.shape) < 0.1, np.nan, MODELS),
}


@pytest.mark.parametrize("case", AGREEMENT)
@pytest.mark.parametrize("chunks", [(7, 2, 1), (30, 5, 4), (1, 3, 2)])
def test_rank_correlations__of_every_pair(case: str, chunks: tuple[int, ...]) -> None:
    score = AGREEMENT[case]
    result = rank_correlations(da.from_array(score, chunks)).compute()
    for t in range(5):
        known = ~np.isnan(score[:, t]).any(axis=1)
        expected = stats.spearmanr(score[known, t]).statistic
        np.testing.assert_allclose(result[t], expected)


def test_rank_correlations__undefined() -> None:
    score = MODELS.copy()
    score[:, 0, 1] = 3  # a constant
    score[1:, 1, 2] = np.nan  # one sample left
    score[:, 2] = np.nan
    result = rank_correlations(da.from_array(score)).compute()
    assert np.isnan(result[0, 1]).all()
    assert result[0, 0, 2] == pytest.approx(stats.spearmanr(score[:, 0, 0], score[:, 0, 2])[0])
    assert np.isnan(result[1:3]).all()
    assert not np.isnan(result[3:]).any()
