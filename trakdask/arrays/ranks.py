"""Rank correlations of many targets at once, resampled, and what noise lets them reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    "resample",
]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Ranking:
    """Values (subset, target), sorted once, so that ranks of any resample are one running sum.

    Attributes
    ----------
    order
        Subsets of each target by rising value.
    ties
        First and last place of the equal values around each place of ``order``; None if no two
        values of a target are equal.
    unknown
        Targets with a NaN: their ranks are NaN.

    Examples
    --------
    >>> ranking = Ranking.of(np.array([[3.0], [1.0], [3.0]]))
    >>> ranking.centred(np.ones(3))[:, 0].tolist()
    [0.5, -1.0, 0.5]
    """

    order: NDArray[np.intp]
    ties: tuple[NDArray[np.intp], NDArray[np.intp]] | None
    unknown: NDArray[np.bool_]

    @classmethod
    def of(cls, values: Floats) -> Ranking:
        """Sort the values of each target."""
        order = np.argsort(values, axis=0, kind="stable")
        unknown: NDArray[np.bool_] = np.any(np.isnan(values), axis=0)
        return cls(order, _ties(np.take_along_axis(values, order, axis=0)), unknown)

    def centred(self, counts: Floats) -> Floats:
        """Mean ranks where subset s is there ``counts[s]`` times, less their mean."""
        here = counts[self.order]
        upto = np.cumsum(here, axis=0)
        if self.ties is None:
            sorted_ranks = upto - (here - 1) / 2
        else:
            first, last = self.ties
            below = np.take_along_axis(upto - here, first, axis=0)
            sorted_ranks = (below + np.take_along_axis(upto, last, axis=0) + 1) / 2
        ranks = np.empty(self.order.shape)
        np.put_along_axis(ranks, self.order, sorted_ranks, axis=0)
        ranks[:, self.unknown] = np.nan
        ranks -= (counts.sum() + 1) / 2
        return ranks


def _ties(ordered: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]] | None:
    starts = np.ones(ordered.shape, bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    if starts.all():
        return None
    place = np.arange(len(ordered))[:, None]
    first = np.maximum.accumulate(np.where(starts, place, 0), axis=0)
    ends = np.roll(starts, -1, axis=0)  # the next place starts anew; the first one always does
    last = np.where(ends, place, len(ordered))[::-1]
    return first, np.minimum.accumulate(last, axis=0)[::-1]


def correlation(a: Floats, b: Floats, counts: Floats) -> Floats:
    """Spearman for each target, of centred ranks (subset, target); NaN where all are equal."""
    covariance = np.einsum("s,st,st->t", counts, a, b)
    variances = (np.einsum("s,st,st->t", counts, x, x) for x in (a, b))
    with np.errstate(invalid="ignore"):
        return np.asarray(covariance / np.sqrt(np.prod(list(variances), axis=0)))


def lds(truth: Ranking, predicted: Sequence[Ranking], counts: Floats) -> Floats:
    """(prediction, target): Spearman of the truth with each prediction."""
    reference = truth.centred(counts)
    return np.stack([correlation(reference, r.centred(counts), counts) for r in predicted])


def between_seeds(seeds: Sequence[Ranking], counts: Floats) -> Floats:
    """(target,): Spearman between models of one subset, mean over pairs of seeds; NaN of one."""
    ranks = [ranking.centred(counts) for ranking in seeds]
    pairs = list(combinations(ranks, 2))
    if not pairs:
        return np.full(ranks[0].shape[1], np.nan)
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


def resample(
    rng: np.random.Generator, n_subsets: int, n_targets: int, repeats: int
) -> Iterator[tuple[Floats, NDArray[np.int64]]]:
    """Yield bootstrap samples: how often each subset is there, and which targets."""
    for _ in range(repeats):
        counts = rng.multinomial(n_subsets, np.full(n_subsets, 1 / n_subsets)).astype(np.float64)
        yield counts, rng.integers(n_targets, size=n_targets)


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
    return np.minimum(draws - 2 * bias[..., None], 1), np.minimum(estimate - bias, 1)


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


def bootstrap(
    truth: Ranking,
    predicted: Sequence[Ranking],
    seeds: Sequence[Ranking],
    *,
    repeats: int,
    seed: int,
) -> tuple[Floats, Floats]:
    """Mean LDS (prediction, draw) and mean ceiling (draw,), of the same resamples for all."""
    rng = np.random.default_rng(seed)
    means, ceilings = np.empty((len(predicted), repeats)), np.empty(repeats)
    n_subsets, n_targets = truth.order.shape
    for i, (counts, targets) in enumerate(resample(rng, n_subsets, n_targets, repeats)):
        means[:, i] = mean_of_known(lds(truth, predicted, counts)[:, targets])
        reached = ceiling(between_seeds(seeds, counts), len(seeds))
        ceilings[i] = mean_of_known(reached[targets])
    return means, ceilings
