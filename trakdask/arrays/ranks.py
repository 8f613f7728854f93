"""Rank correlations of many targets at once, resampled, and what noise lets them reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Ranking",
    "between_seeds",
    "bootstrap",
    "ceiling",
    "correlation",
    "lds",
    "less_bias",
    "mean_of_known",
    "percentiles",
    "statistics",
]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Ranking:
    """Values (subset, target), sorted once, so that ranks of any resample are one running sum.

    Attributes
    ----------
    order
        Subsets of each target by rising value, (target, subset).
    places
        Where each value stands in ``order.ravel()``, (target, subset).
    ties
        First and last place, as in ``places``, of the equal values around each place of ``order``;
        None if no two values of a target are equal.
    unknown
        Targets with a NaN: their ranks are NaN.

    Examples
    --------
    >>> ranking = Ranking.of(np.array([[3.0], [1.0], [3.0]]))
    >>> ranking.centred(np.ones(3)).tolist()
    [[0.5, -1.0, 0.5]]
    """

    order: NDArray[np.intp]
    places: NDArray[np.intp]
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
        """Mean ranks where subset s is there ``counts[s]`` times, less their mean.

        (target, subset); multiples of ½, so that sums of their products are exact in any order.
        """
        here = counts[self.order]
        upto = np.cumsum(here, axis=1)
        if self.ties is None:
            sorted_ranks = upto - (here - 1) / 2
        else:
            first, last = self.ties
            sorted_ranks = (np.take(upto - here, first) + np.take(upto, last) + 1) / 2
        ranks = np.take(sorted_ranks, self.places)
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
    place, n = np.arange(ordered.shape[1]), ordered.shape[1]
    first = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    ends = np.roll(begins, -1, axis=1)  # the next place begins anew; the first one always does
    last = np.minimum.accumulate(np.where(ends, place, n)[:, ::-1], axis=1)[:, ::-1]
    return first + start, last + start


def correlation(a: Floats, b: Floats, counts: Floats) -> Floats:
    """Spearman for each target, of centred ranks (target, subset); NaN where all are equal."""
    covariance, *variances = ((x * y) @ counts for x, y in ((a, b), (a, a), (b, b)))
    with np.errstate(invalid="ignore"):
        return np.asarray(covariance / np.sqrt(variances[0] * variances[1]))


def lds(truth: Ranking, predicted: Sequence[Ranking], counts: Floats) -> Floats:
    """(prediction, target): Spearman of the truth with each prediction."""
    reference = truth.centred(counts)
    return np.stack([correlation(reference, r.centred(counts), counts) for r in predicted])


def between_seeds(seeds: Sequence[Ranking], counts: Floats) -> Floats:
    """(target,): Spearman between models of one subset, mean over pairs of seeds; NaN of one."""
    ranks = [ranking.centred(counts) for ranking in seeds]
    pairs = list(combinations(ranks, 2))
    if not pairs:
        return np.full(len(ranks[0]), np.nan)
    return np.asarray(np.mean([correlation(b, a, counts) for a, b in pairs], axis=0))


def ceiling(between: Floats, n_seeds: int) -> Floats:
    """Spearman that a perfect prediction has with the mean of ``n_seeds`` noisy models.

    By Spearman and Brown: a mean of k has the reliability k r / (1 + (k - 1) r), and correlates
    with its own expectation by the square root of that. r < 0 counts as 0.

    Examples
    --------
    >>> ceiling(np.array([1.0, 0.5, -0.1]), 2).round(3).tolist()
    [1.0, 0.816, 0.0]
    """
    clipped = np.clip(between, 0, 1)
    return np.asarray(np.sqrt(n_seeds * clipped / (1 + (n_seeds - 1) * clipped)))


def mean_of_known(values: Floats) -> Floats:
    """Mean along the last axis of what is not NaN; NaN where nothing is known."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, values, 0).sum(axis=-1) / known.sum(axis=-1))


def less_bias(draws: Floats, estimate: Floats) -> tuple[Floats, Floats]:
    """Return bootstrap draws (..., draw) and their estimate (...) without the bias they show.

    The draws lie as far from the estimate as that from the truth, on average. Both biases are taken
    from the draws, so that their quantiles are those of an interval around the corrected estimate.

    References
    ----------
    Efron and Tibshirani 1993, section 10.6.
    """
    bias = mean_of_known(draws) - estimate
    return draws - 2 * bias[..., None], np.minimum(estimate - bias, 1)


def percentiles(draws: Floats, confidence: float) -> Floats:
    """Interval (bound, ...) that holds the middle part of the draws (..., draw) that are not NaN.

    Examples
    --------
    >>> percentiles(np.array([[0.0, 1.0, 2.0, np.nan], [np.nan] * 4]), 0.5).tolist()
    [[0.5, nan], [1.5, nan]]
    """
    bounds = [(1 - confidence) / 2, (1 + confidence) / 2]
    known = (row[~np.isnan(row)] for row in draws.reshape(-1, draws.shape[-1]))
    found = [np.quantile(row, bounds) if len(row) else np.full(2, np.nan) for row in known]
    return np.stack(found, axis=1).reshape(2, *draws.shape[:-1])


def statistics(
    truth: Ranking, predicted: Sequence[Ranking], seeds: Sequence[Ranking], counts: Floats
) -> Floats:
    """(prediction + 1, target): LDS of each prediction, and last what a perfect one would reach."""
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
    """Return the statistics of all subsets, their means over targets, and draws of the means.

    Returns
    -------
    ``statistics`` (row, target); their means (row,), that of the last row less its bias; draws
    (row, draw) of what the means would be with other subsets and other targets, less their bias.

    Notes
    -----
    Subsets are resampled, the same for all rows and targets. Other targets are a Student draw,
    whose covariance is that of the statistics over targets less the part that is noise of the
    subsets, as the resamples show it. Resampling targets as well would count that noise up to three
    times (Owen 2007): too wide for differences of predictions, which are mostly noise.

    References
    ----------
    Owen 2007, "The pigeonhole bootstrap".
    """
    rng, n_subsets = np.random.default_rng(seed), truth.order.shape[1]
    found = statistics(truth, predicted, seeds, np.ones(n_subsets))
    draws, noise = np.empty((len(found), repeats)), np.zeros((len(found), len(found)))
    for i in range(repeats):
        counts = rng.multinomial(n_subsets, np.full(n_subsets, 1 / n_subsets)).astype(np.float64)
        drawn = statistics(truth, predicted, seeds, counts)
        draws[:, i] = mean_of_known(drawn)
        noise += _covariance(drawn - found) / repeats
    means = mean_of_known(found)
    draws, unbiased = less_bias(draws, means)
    means[-1] = unbiased[-1]
    between = (_covariance(found) - noise) * _shared(found)
    draws += _student(rng, between, repeats, found.shape[1] - 1)
    return found, means, np.minimum(draws, 1)


def _covariance(values: Floats) -> Floats:
    """(row, row): covariance over the targets that both rows know."""
    known = (~np.isnan(values)).astype(np.float64)
    centred = np.nan_to_num(values - mean_of_known(values)[:, None])
    return np.asarray(centred @ centred.T / np.maximum(known @ known.T - 1, 1))


def _shared(values: Floats) -> Floats:
    """(row, row): what makes a covariance over targets one of means over targets."""
    known = (~np.isnan(values)).astype(np.float64)
    counts = np.maximum(known.sum(axis=1), 1)
    return np.asarray(known @ known.T / np.outer(counts, counts))


def _student(rng: np.random.Generator, covariance: Floats, n: int, freedom: int) -> Floats:
    """(row, draw): Student's t of a covariance, its positive part, that was itself estimated."""
    values, vectors = np.linalg.eigh(covariance)
    normal = vectors * np.sqrt(np.maximum(values, 0)) @ rng.standard_normal((len(values), n))
    freedom = max(freedom, 1)
    return np.asarray(normal * np.sqrt(freedom / rng.chisquare(freedom, n)))
