"""Statistics of evaluation: rank correlations, their ceiling, intervals, areas, and agreement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy import special

from trakdask.arrays.blocks import Floats

# ------------------------------------------------------------ rank correlations of many targets


@dataclass(frozen=True)
class Ranking:
    """Values (subset, target), sorted once, so that counting them ranks any resample.

    Attributes
    ----------
    places
        (target, subset): how many smaller values than this one the target has, equal ones counted
        once, plus the number of subsets for each target before it.
    unknown
        Targets that have a NaN, and whose ranks are therefore NaN.

    Examples
    --------
    >>> ranking = Ranking.of(np.array([[3.0], [1.0], [3.0]]))
    >>> ranking.centred(np.ones(3)).tolist()
    [[0.5, -1.0, 0.5]]
    """

    places: NDArray[np.intp]
    unknown: NDArray[np.bool_]

    @classmethod
    def of(cls, values: Floats) -> Ranking:
        """Sort the values (subset, target) of each target."""
        unknown: NDArray[np.bool_] = np.any(np.isnan(values), axis=0)
        rows = values.T
        order = np.argsort(rows, axis=1)
        ascending = np.take_along_axis(rows, order, axis=1)
        places = np.zeros(rows.shape, np.intp)
        larger = np.cumsum(ascending[:, 1:] != ascending[:, :-1], axis=1)
        np.put_along_axis(places, order[:, 1:], larger, axis=1)
        return cls(places + len(values) * np.arange(len(places))[:, None], unknown)

    def centred(self, counts: Floats) -> Floats:
        """Return the centred average ranks if subset s occurs ``counts[s]`` times.

        (target, subset). They are multiples of ½, so sums of their products are exact in any order.
        """
        shape = self.places.shape
        repeated = np.broadcast_to(counts, shape).ravel()
        occurrences = np.bincount(self.places.ravel(), repeated, repeated.size).reshape(shape)
        ranks = np.take(np.cumsum(occurrences, axis=1) - (occurrences - 1) / 2, self.places)
        ranks[self.unknown] = np.nan
        ranks -= (counts.sum() + 1) / 2
        return ranks


def correlation(a: Floats, b: Floats, counts: Floats) -> Floats:
    """Return the correlation of each row of centred values (target, subset), as often as counted.

    Pearson's correlation, which of ranks is Spearman's. NaN where all values of a row are 0.
    """
    covariance, *variances = ((x * y) @ counts for x, y in ((a, b), (a, a), (b, b)))
    with np.errstate(invalid="ignore"):
        return np.asarray(covariance / np.sqrt(variances[0] * variances[1]))


def ceiling(between: Floats, n_seeds: int) -> Floats:
    """Return the Spearman correlation of a perfect prediction with a mean of noisy models.

    By the Spearman-Brown formula, means of k = ``n_seeds`` models correlate by k r / (1 + (k - 1)
    r), where r is the correlation between single models. The correlation of such a mean with its
    own expectation is the square root of that. A negative r is treated as 0.

    Examples
    --------
    >>> ceiling(np.array([1.0, 0.5, -0.1]), 2).round(3).tolist()
    [1.0, 0.816, 0.0]
    """
    clipped = np.clip(between, 0, 1)
    return np.asarray(np.sqrt(n_seeds * clipped / (1 + (n_seeds - 1) * clipped)))


def mean_without_nan(values: Floats) -> Floats:
    """Return the mean of the values that are not NaN along the last axis; NaN if all are NaN."""
    present = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(present, values, 0).sum(axis=-1) / present.sum(axis=-1))


def percentiles(draws: Floats, confidence: float) -> Floats:
    """Return the central interval (bound, ...) of the draws (..., draw) that are not NaN.

    Examples
    --------
    >>> percentiles(np.array([[0.0, 1.0, 2.0, np.nan], [np.nan] * 4]), 0.5).tolist()
    [[0.5, nan], [1.5, nan]]
    """
    bounds = [(1 - confidence) / 2, (1 + confidence) / 2]
    present = (row[~np.isnan(row)] for row in draws.reshape(-1, draws.shape[-1]))
    intervals = [np.quantile(row, bounds) if len(row) else np.full(2, np.nan) for row in present]
    return np.stack(intervals, axis=1).reshape(2, *draws.shape[:-1])


def statistics(
    truth: Ranking, predicted: Sequence[Ranking], seeds: Sequence[Ranking], counts: Floats
) -> Floats:
    """Return the LDS of each prediction and, last, the ceiling, (prediction + 1, target).

    The LDS is the Spearman correlation of the truth with a prediction. The ceiling follows from the
    mean Spearman correlation over pairs of seeds; it is NaN for one seed.
    """
    reference = truth.centred(counts)
    lds = [correlation(reference, r.centred(counts), counts) for r in predicted]
    pairs = list(combinations([ranking.centred(counts) for ranking in seeds], 2))
    between = np.full(len(reference), np.nan)
    if pairs:
        between = np.mean([correlation(b, a, counts) for a, b in pairs], axis=0)
    return np.vstack([*lds, ceiling(between, len(seeds))])


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
    from a Student distribution. Its covariance is the covariance of the statistics over targets
    minus the noise due to subsets, which the resamples estimate. Resampling targets as well would
    count that noise up to three times (Owen 2007), and make intervals of differences between
    predictions, which are mostly noise, too wide.

    References
    ----------
    Owen 2007, "The pigeonhole bootstrap"; Efron and Tibshirani 1993, section 10.6 (bias).
    """
    # 1. The same resamples of subsets for all rows and targets.
    rng, n_subsets = np.random.default_rng(seed), truth.places.shape[1]
    observed = statistics(truth, predicted, seeds, np.ones(n_subsets))
    draws, noise = np.empty((len(observed), repeats)), np.zeros((len(observed), len(observed)))
    for i in range(repeats):
        counts = rng.multinomial(n_subsets, np.full(n_subsets, 1 / n_subsets)).astype(np.float64)
        drawn = statistics(truth, predicted, seeds, counts)
        draws[:, i] = mean_without_nan(drawn)
        noise += _covariance(drawn - observed) / repeats
    # 2. On average the draws differ from the estimate by as much as the estimate differs from the
    #    truth. Twice this bias is subtracted from the draws, and once from the estimate, so that
    #    quantiles of the draws are an interval around the corrected estimate.
    means = mean_without_nan(observed)
    bias = mean_without_nan(draws) - means
    draws -= 2 * bias[:, None]
    means[-1] = np.minimum(means[-1] - bias[-1], 1)
    # 3. The covariance of the means over other targets, from the covariances over targets.
    present = (~np.isnan(observed)).astype(np.float64)
    numbers = np.maximum(present.sum(axis=1), 1)
    shared = present @ present.T / np.outer(numbers, numbers)
    values, vectors = np.linalg.eigh((_covariance(observed) - noise) * shared)
    # 4. Draws from Student's t with the positive part of this estimate.
    normal = vectors * np.sqrt(np.maximum(values, 0)) @ rng.standard_normal((len(values), repeats))
    freedom = max(observed.shape[1] - 1, 1)
    draws += normal * np.sqrt(freedom / rng.chisquare(freedom, repeats))
    return observed, means, np.minimum(draws, 1)


def _covariance(values: Floats) -> Floats:
    """Return the covariances of rows, (row, row), over the targets that neither row has as NaN."""
    present = (~np.isnan(values)).astype(np.float64)
    centred = np.nan_to_num(values - mean_without_nan(values)[:, None])
    return np.asarray(centred @ centred.T / np.maximum(present @ present.T - 1, 1))


# --------------------------------------------------------------------- intervals of means


def mean_interval(values: Floats, confidence: float) -> Floats:
    """Return Student's interval (bound, ...) of the mean along the last axis.

    Examples
    --------
    >>> mean_interval(np.array([[1.0, 2.0, 3.0]]), 0.95).round(2).tolist()
    [[-0.48], [4.48]]
    """
    n, mean = values.shape[-1], values.mean(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.sqrt(((values - mean[..., None]) ** 2).sum(axis=-1) / (n - 1) / n)
        half = special.stdtrit(n - 1, (1 + confidence) / 2) * error
    return np.stack([mean - half, mean + half])


# ------------------------------------------------- how well scores separate two classes


def roc_auc(values: Floats, positive: NDArray[np.bool_], confidence: float) -> tuple[float, Floats]:
    """Return the area under the ROC curve of one score, and its interval (bound,).

    Parameters
    ----------
    values
        (sample,), expected to be higher for positives; ties count half.
    positive
        (sample,), with at least one positive and one negative.
    confidence
        Confidence level of the interval.

    Notes
    -----
    Only the ranks of the values matter. The variance is DeLong's. The interval is symmetric for the
    logit of the area, so that it stays within [0, 1]; for an area of 0 or 1 it has no width. A NaN
    makes all results NaN.

    References
    ----------
    DeLong et al. 1988; Sun and Xu 2014 (by ranks).

    Examples
    --------
    >>> area, bounds = roc_auc(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0, 1, 0, 1], bool), 0.95)
    >>> area
    0.75
    """
    from scipy.stats import rankdata  # takes a second to import, and only evaluation needs it

    n1, n0 = int(positive.sum()), int((~positive).sum())
    ranks = rankdata(values)  # all of them NaN, if one value is
    # The fraction of samples of the other class that each sample ranks above.
    above = (ranks[positive] - rankdata(values[positive])) / n0
    below = (ranks[~positive] - rankdata(values[~positive])) / n1
    area = float(above.mean())
    # The variance of one sample of a class is unknown.
    parts = (np.var(x, ddof=1) / len(x) if len(x) > 1 else np.nan for x in (above, below))
    variance = float(sum(parts))
    if not 0 < area < 1:
        return area, np.full(2, area)
    half = special.ndtri((1 + confidence) / 2) * np.sqrt(variance) / (area * (1 - area))
    bounds: Floats = special.expit(special.logit(area) + np.array([-half, half]))
    return area, bounds


def proportion_interval(fraction: Floats, n: int, confidence: float) -> Floats:
    """Return Wilson's interval (bound, ...) of proportions observed in n trials.

    Examples
    --------
    >>> proportion_interval(np.array([0.0, 0.5]), 10, 0.95).round(3).tolist()
    [[0.0, 0.237], [0.278, 0.763]]
    """
    z = float(special.ndtri((1 + confidence) / 2))
    centre = (fraction + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * np.sqrt(fraction * (1 - fraction) / n + (z / (2 * n)) ** 2) / (1 + z**2 / n)
    return np.clip(np.stack([centre - half, centre + half]), 0, 1)


# ---------------------------------------------------------- agreement of checkpoints


def mean_agreement(scores: Floats) -> Floats:
    """Return the mean correlation between two checkpoints, (group,) float64; 0 of one.

    Parameters
    ----------
    scores
        (sample, target, group, checkpoint), where target i is sample i: this score is left out,
        because training draws it near to its sample. So is the mean of each target.

    Examples
    --------
    >>> one = np.random.default_rng(0).standard_normal((9, 4, 1, 1))
    >>> mean_agreement(np.concatenate([one, 2 * one], -1)).round(6).tolist()
    [1.0]
    """
    n_samples, n_targets, n_groups, n = scores.shape
    others = np.arange(n_samples)[:, None] != np.arange(n_targets)
    wide = scores.astype(np.float64) * others[..., None, None]
    wide = (wide - wide.sum(0) / (n_samples - 1)) * others[..., None, None]
    flat = np.moveaxis(wide, 2, 0).reshape(n_groups, -1, n)
    length = np.linalg.norm(flat, axis=1, keepdims=True)
    flat /= np.where(length > 0, length, 1)
    products = flat.mT @ flat
    total = products.sum((1, 2)) - np.trace(products, axis1=1, axis2=2)
    return total / max(n * (n - 1), 1)
