"""Compute bootstrapped rank correlations of many targets, and their noise ceiling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Ranking:
    """Values (subset, target), sorted once, so that a cumulative sum ranks any resample.

    Attributes
    ----------
    order
        Subsets of each target in ascending order of value, (target, subset).
    positions
        Position of each value in ``order.ravel()``, (target, subset).
    ties
        First and last position, as in ``positions``, of the run of equal values at each position of
        ``order``; None if no two values of a target are equal.
    unknown
        Targets that have a NaN, and whose ranks are therefore NaN.

    Examples
    --------
    >>> ranking = Ranking.of(np.array([[3.0], [1.0], [3.0]]))
    >>> ranking.centred(np.ones(3)).tolist()
    [[0.5, -1.0, 0.5]]
    """

    order: NDArray[np.intp]
    positions: NDArray[np.intp]
    ties: tuple[NDArray[np.intp], NDArray[np.intp]] | None
    unknown: NDArray[np.bool_]

    @classmethod
    def of(cls, values: Floats) -> Ranking:
        """Sort the values (subset, target) of each target."""
        rows = np.ascontiguousarray(values.T)
        order = np.argsort(rows, axis=1, kind="stable")
        unknown: NDArray[np.bool_] = np.any(np.isnan(rows), axis=1)
        start = np.arange(rows.shape[0])[:, None] * rows.shape[1]
        ties = _ties(np.take_along_axis(rows, order, axis=1), start)
        return cls(order, np.argsort(order, axis=1) + start, ties, unknown)

    def centred(self, counts: Floats) -> Floats:
        """Return the centred average ranks if subset s occurs ``counts[s]`` times.

        (target, subset). They are multiples of ½, so sums of their products are exact in any order.
        """
        occurrences = counts[self.order]
        upto = np.cumsum(occurrences, axis=1)
        if self.ties is None:
            sorted_ranks = upto - (occurrences - 1) / 2
        else:
            first, last = self.ties
            sorted_ranks = (np.take(upto - occurrences, first) + np.take(upto, last) + 1) / 2
        ranks = np.take(sorted_ranks, self.positions)
        ranks[self.unknown] = np.nan
        ranks -= (counts.sum() + 1) / 2
        return ranks


def _ties(
    ordered: Floats, start: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp]] | None:
    begins = np.ones(ordered.shape, bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    if begins.all():
        return None
    position, n = np.arange(ordered.shape[1]), ordered.shape[1]
    first = np.maximum.accumulate(np.where(begins, position, 0), axis=1)
    # A run ends where the next one begins; the roll works since the first position begins a run.
    ends = np.roll(begins, -1, axis=1)
    last = np.minimum.accumulate(np.where(ends, position, n)[:, ::-1], axis=1)[:, ::-1]
    return first + start, last + start


def correlation(a: Floats, b: Floats, counts: Floats) -> Floats:
    """Return the Spearman correlation of each target from centred ranks (target, subset).

    NaN where all ranks are equal.
    """
    covariance, *variances = ((x * y) @ counts for x, y in ((a, b), (a, a), (b, b)))
    with np.errstate(invalid="ignore"):
        return np.asarray(covariance / np.sqrt(variances[0] * variances[1]))


def lds(truth: Ranking, predicted: Sequence[Ranking], counts: Floats) -> Floats:
    """Return the Spearman correlations of the truth with each prediction, (prediction, target)."""
    reference = truth.centred(counts)
    return np.stack([correlation(reference, r.centred(counts), counts) for r in predicted])


def between_seeds(seeds: Sequence[Ranking], counts: Floats) -> Floats:
    """Return the mean Spearman correlation over pairs of seeds, (target,); NaN for one seed."""
    ranks = [ranking.centred(counts) for ranking in seeds]
    pairs = list(combinations(ranks, 2))
    if not pairs:
        return np.full(len(ranks[0]), np.nan)
    return np.asarray(np.mean([correlation(b, a, counts) for a, b in pairs], axis=0))


def reliability(between: Floats, n_seeds: int | Floats) -> Floats:
    """Return the correlation of a mean of k = ``n_seeds`` models with that of k other ones.

    By the Spearman-Brown formula k r / (1 + (k - 1) r), where r is the correlation between single
    models. A negative r is treated as 0.

    Examples
    --------
    >>> reliability(np.array([1.0, 0.5, -0.1]), 2).round(3).tolist()
    [1.0, 0.667, 0.0]
    """
    clipped = np.clip(between, 0, 1)
    return np.asarray(n_seeds * clipped / (1 + (n_seeds - 1) * clipped))


def ceiling(between: Floats, n_seeds: int) -> Floats:
    """Return the Spearman correlation of a perfect prediction with a mean of noisy models.

    The correlation of the mean with its own expectation is the square root of its reliability.

    Examples
    --------
    >>> ceiling(np.array([1.0, 0.5, -0.1]), 2).round(3).tolist()
    [1.0, 0.816, 0.0]
    """
    return np.asarray(np.sqrt(reliability(between, n_seeds)))


def mean_of_known(values: Floats) -> Floats:
    """Return the mean of the values that are not NaN along the last axis; NaN if all are NaN."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, values, 0).sum(axis=-1) / known.sum(axis=-1))


def less_bias(draws: Floats, estimate: Floats) -> tuple[Floats, Floats]:
    """Return bootstrap draws (..., draw) and their estimate (...), both corrected for bias.

    On average the draws differ from the estimate by as much as the estimate differs from the truth.
    Twice this bias is subtracted from the draws, and once from the estimate, so that quantiles of
    the draws are an interval around the corrected estimate.

    References
    ----------
    Efron and Tibshirani 1993, section 10.6.
    """
    bias = mean_of_known(draws) - estimate
    return draws - 2 * bias[..., None], np.minimum(estimate - bias, 1)


def percentiles(draws: Floats, confidence: float) -> Floats:
    """Return the central interval (bound, ...) of the draws (..., draw) that are not NaN.

    Examples
    --------
    >>> percentiles(np.array([[0.0, 1.0, 2.0, np.nan], [np.nan] * 4]), 0.5).tolist()
    [[0.5, nan], [1.5, nan]]
    """
    bounds = [(1 - confidence) / 2, (1 + confidence) / 2]
    known = (row[~np.isnan(row)] for row in draws.reshape(-1, draws.shape[-1]))
    intervals = [np.quantile(row, bounds) if len(row) else np.full(2, np.nan) for row in known]
    return np.stack(intervals, axis=1).reshape(2, *draws.shape[:-1])


def statistics(
    truth: Ranking, predicted: Sequence[Ranking], seeds: Sequence[Ranking], counts: Floats
) -> Floats:
    """Return the LDS of each prediction and, last, the ceiling, (prediction + 1, target)."""
    reached = ceiling(between_seeds(seeds, counts), len(seeds))
    return np.vstack([lds(truth, predicted, counts), reached])


def bootstrap(
    truth: Ranking,
    predicted: Sequence[Ranking],
    seeds: Sequence[Ranking],
    *,
    repeats: int,
    seed: int,
) -> tuple[Floats, Floats, Floats]:
    """Return the statistics from all subsets, their means over targets, and draws of the means.

    Returns
    -------
    ``statistics`` (row, target); their means (row,), where the last row, the ceiling, is corrected
    for bias; and draws (row, draw) of the means for other subsets and other targets, corrected for
    bias.

    Notes
    -----
    Subsets are resampled, identically for all rows and targets. The variation over targets is drawn
    from a Student distribution, whose covariance is that of the statistics over targets minus the
    noise due to subsets, which the resamples estimate. Resampling targets as well would count that
    noise up to three times (Owen 2007), and make intervals of differences between predictions,
    which are mostly noise, too wide.

    References
    ----------
    Owen 2007, "The pigeonhole bootstrap".
    """
    rng, n_subsets = np.random.default_rng(seed), truth.order.shape[1]
    observed = statistics(truth, predicted, seeds, np.ones(n_subsets))
    draws, noise = np.empty((len(observed), repeats)), np.zeros((len(observed), len(observed)))
    for i in range(repeats):
        counts = rng.multinomial(n_subsets, np.full(n_subsets, 1 / n_subsets)).astype(np.float64)
        drawn = statistics(truth, predicted, seeds, counts)
        draws[:, i] = mean_of_known(drawn)
        noise += _covariance(drawn - observed) / repeats
    means = mean_of_known(observed)
    draws, unbiased = less_bias(draws, means)
    means[-1] = unbiased[-1]
    between = (_covariance(observed) - noise) * _shared(observed)
    draws += _student(rng, between, repeats, observed.shape[1] - 1)
    return observed, means, np.minimum(draws, 1)


def _covariance(values: Floats) -> Floats:
    """Return the covariances of rows, (row, row), over the targets that neither row has as NaN."""
    known = (~np.isnan(values)).astype(np.float64)
    centred = np.nan_to_num(values - mean_of_known(values)[:, None])
    return np.asarray(centred @ centred.T / np.maximum(known @ known.T - 1, 1))


def _shared(values: Floats) -> Floats:
    """Return the factors, (row, row), from covariances over targets to covariances of means."""
    known = (~np.isnan(values)).astype(np.float64)
    counts = np.maximum(known.sum(axis=1), 1)
    return np.asarray(known @ known.T / np.outer(counts, counts))


def _student(rng: np.random.Generator, covariance: Floats, n: int, freedom: int) -> Floats:
    """Draw from Student's t with the positive part of an estimated covariance, (row, draw)."""
    values, vectors = np.linalg.eigh(covariance)
    normal = vectors * np.sqrt(np.maximum(values, 0)) @ rng.standard_normal((len(values), n))
    freedom = max(freedom, 1)
    return np.asarray(normal * np.sqrt(freedom / rng.chisquare(freedom, n)))
