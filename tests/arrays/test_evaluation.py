"""Statistics of evaluation, by scipy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from trakdask.arrays import evaluation
from trakdask.arrays.evaluation import Ranking


def spearman(a: np.ndarray, b: np.ndarray, counts: np.ndarray) -> list[float]:
    """scipy, target by target, on rows that are written out as often as they count."""
    rows = np.repeat(np.arange(len(a)), counts)
    return [stats.spearmanr(a[rows, t], b[rows, t]).statistic for t in range(a.shape[1])]


@given(st.integers(0, 2**32), st.integers(3, 40), st.sampled_from([2, 5, 10**9]))
def test_correlation__equals_scipy_of_the_resample(seed: int, n: int, distinct: int) -> None:
    """With ties (few distinct values) and without, whole and resampled."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(distinct, size=(2, n, 4)).astype(np.float64)
    a[:2], b[1:3] = [[0], [1]], [[0], [1]]
    for counts in (np.ones(n, int), 1 + rng.multinomial(n, np.full(n, 1 / n))):
        weights = counts.astype(np.float64)
        centred = (Ranking.of(x).centred(weights) for x in (a, b))
        found = evaluation.correlation(*centred, weights)
        np.testing.assert_allclose(found, spearman(a, b, counts), atol=1e-12)


def test_statistics__the_ceiling_is_of_the_mean_over_pairs_of_seeds() -> None:
    rng = np.random.default_rng(0)
    x, ones = rng.standard_normal((30, 4)) + rng.standard_normal((3, 30, 4)), np.ones(30, int)
    pairs = [spearman(x[i], x[j], ones) for i, j in ((0, 1), (0, 2), (1, 2))]
    seeds = [Ranking.of(one) for one in x]
    (found,) = evaluation.statistics(seeds[0], [], seeds, np.ones(30))
    expected = evaluation.ceiling(np.mean(pairs, axis=0), 3)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert (expected > 0.3).all()  # and none that was treated as 0
    assert evaluation.ceiling(np.array([0.5]), 3)[0] == pytest.approx(0.75**0.5)
    assert np.isnan(evaluation.statistics(seeds[0], [], seeds[:1], np.ones(30))).all()


def test_bootstrap__same_resamples_for_all_predictions() -> None:
    """There is one target, so that only subsets are drawn: each draw equals written-out rows."""
    rng = np.random.default_rng(1)
    truth, other, predicted = rng.standard_normal((3, 20, 1))
    truth += predicted
    rankings = [Ranking.of(predicted), Ranking.of(other), Ranking.of(predicted)]
    seeds = [Ranking.of(truth), Ranking.of(predicted)]
    found, means, draws = evaluation.bootstrap(
        Ranking.of(truth), rankings, seeds, repeats=3, seed=4
    )
    np.testing.assert_array_equal(draws[0], draws[2])
    rng, rows = np.random.default_rng(4), []
    for _ in range(3):
        counts = rng.multinomial(20, np.full(20, 1 / 20))
        rows.append(spearman(truth, predicted, counts)[0])
    whole = spearman(truth, predicted, np.ones(20, int))[0]
    assert found[0] == means[0] == pytest.approx(whole)
    expected = np.array(rows) - 2 * (np.mean(rows) - whole)
    np.testing.assert_allclose(draws[0], np.minimum(expected, 1))
    reached = evaluation.ceiling(np.array(rows), 2)
    bias = reached.mean() - evaluation.ceiling(whole, 2)
    assert means[-1] == pytest.approx(min(found[-1, 0] - bias, 1))


def test_bootstrap__targets_that_differ_widen_the_draws_by_as_much() -> None:
    """Without noise of subsets, what is left is the spread of targets, over √40.

    A prediction is the truth or its negative: ±1 for every resample.
    """
    truth = np.random.default_rng(0).standard_normal((50, 40))
    sign = np.where(np.arange(40) % 4 == 0, -1, 1)
    same = [Ranking.of(truth)] * 2
    _, means, draws = evaluation.bootstrap(
        Ranking.of(truth), [Ranking.of(truth * sign)], same, repeats=1500, seed=0
    )
    assert means[0] == pytest.approx(0.5)
    student = (39 / 37) ** 0.5  # the spread of t with 39 degrees of freedom
    expected = student * np.std(sign, ddof=1) / 40**0.5
    assert draws[0].std() == pytest.approx(expected, rel=0.05)
    np.testing.assert_allclose(draws[1], 1)


# ------------------------------------------------- how well scores separate two classes


@pytest.mark.parametrize("distinct", [3, 10**9])
def test_roc_auc__equals_all_pairs(distinct: int) -> None:
    """The share of pairs in which the positive one is higher, where ties count half; by DeLong."""
    rng = np.random.default_rng(0)
    positive = rng.random(60) < 0.3
    values = rng.integers(distinct, size=60) + 0.6 * positive * distinct
    area, (low, high) = evaluation.roc_auc(values, positive, 0.95)
    above = values[positive][:, None] - values[~positive]
    wins = (above > 0) + 0.5 * (above == 0)
    assert area == pytest.approx(wins.mean())
    variance = sum(wins.mean(axis=a).var(ddof=1) / wins.shape[1 - a] for a in (0, 1))
    error = 1.959964 * variance**0.5 / (area * (1 - area))
    logits = np.log([low / (1 - low), area / (1 - area), high / (1 - high)])
    np.testing.assert_allclose(np.diff(logits), error, rtol=1e-6)


def test_roc_auc__perfect_and_unknown() -> None:
    positive = np.array([False, False, True, True])
    area, bounds = evaluation.roc_auc(np.arange(4.0), positive, 0.95)
    assert (area, bounds.tolist()) == (1.0, [1.0, 1.0])
    area, bounds = evaluation.roc_auc(np.array([0, np.nan, 1, 2]), positive, 0.95)
    assert np.isnan([area, *bounds]).all()
