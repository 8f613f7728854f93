"""Rank correlations between models, against scipy, one pair at a time."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from scipy import stats

from trakdask.arrays.agreement import mean_of_pairs, rank_correlations

RNG = np.random.default_rng(0)
SCORE = RNG.standard_normal((30, 5, 1)) + RNG.standard_normal((30, 5, 4))
CASES = {
    "distinct": SCORE,
    "ties": np.round(SCORE).astype("f4"),
    "unknown": np.where(RNG.random(SCORE.shape) < 0.1, np.nan, SCORE),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunks", [(7, 2, 1), (30, 5, 4), (1, 3, 2)])
def test_rank_correlations__of_every_pair(case: str, chunks: tuple[int, ...]) -> None:
    score = CASES[case]
    result = rank_correlations(da.from_array(score, chunks)).compute()
    for t in range(5):
        known = ~np.isnan(score[:, t]).any(axis=1)
        expected = stats.spearmanr(score[known, t]).statistic
        np.testing.assert_allclose(result[t], expected)


def test_rank_correlations__undefined() -> None:
    score = SCORE.copy()
    score[:, 0, 1] = 3  # a constant
    score[1:, 1, 2] = np.nan  # one sample left
    score[:, 2] = np.nan
    result = rank_correlations(da.from_array(score)).compute()
    assert np.isnan(result[0, 1]).all()
    assert result[0, 0, 2] == pytest.approx(stats.spearmanr(score[:, 0, 0], score[:, 0, 2])[0])
    assert np.isnan(result[1:3]).all()
    assert not np.isnan(result[3:]).any()


def test_mean_of_pairs__leaves_out_the_diagonal() -> None:
    matrix = np.array([[1.0, 0.2, 0.4], [0.2, 1.0, 0.9], [0.4, 0.9, 1.0]])
    assert float(mean_of_pairs(matrix)) == pytest.approx(0.5)
