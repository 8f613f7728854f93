"""How well scores separate two classes: ranks of a class, the area under the ROC curve, shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
from numpy.typing import NDArray
from scipy import special

from trakdask.arrays.blocks import blockwise, whole_columns
from trakdask.arrays.evaluation import Floats

Codes = NDArray[np.signedinteger[Any]]


def class_ranks(
    score: da.Array, codes: Codes, target_codes: Codes, counts: Sequence[int]
) -> da.Array:
    """Return how high the samples of each target's class rank among the samples of its group.

    Parameters
    ----------
    score
        (sample, target, ...), float, any chunks. Samples with a NaN are left out.
    codes
        Class and group of each sample, (sample, 2).
    target_codes
        Class and group of each target, (target, 2). Samples of other groups are left out.
    counts
        Numbers of top samples, k.

    Returns
    -------
    (target, ..., 1 + counts) float64, lazy: the area under the ROC curve, then the precision at
    each k. NaN where no sample, or every sample, is of the target's class.

    Notes
    -----
    Equal scores count half in the area. In the precision samples of other classes rank first among
    equal scores, so that nothing depends on the order of the samples.

    Examples
    --------
    >>> score = da.from_array(np.array([[3.0], [2.0], [1.0]]))
    >>> of_samples, of_targets = np.array([[0, 0], [1, 0], [1, 0]]), np.array([[1, 0]])
    >>> class_ranks(score, of_samples, of_targets, [2]).compute().tolist()
    [[0.0, 0.5]]
    """
    columns, more = whole_columns(score), "xyz"[: score.ndim - 2]
    of_targets = da.from_array(target_codes, chunks=(columns.chunks[1], 2))
    return blockwise(
        _class_ranks, f"t{more}r",
        columns, f"st{more}", da.from_array(codes, chunks=-1), "sp", of_targets, "tp",
        new_axes={"r": 1 + len(counts)}, concatenate=True, name="ranks-of-class", dtype=np.float64,
        counts=tuple(counts),
    )  # fmt: skip


def _class_ranks(
    score: Floats, codes: Codes, target_codes: Codes, *, counts: tuple[int, ...]
) -> Floats:
    from scipy.stats import rankdata  # takes a second to import, and only evaluation needs it

    k, results = np.array(counts), np.full((*score.shape[1:], 1 + len(counts)), np.nan)
    for t, (target_class, target_group) in enumerate(target_codes):
        for entry in np.ndindex(score.shape[2:]):
            values = score[(slice(None), t, *entry)]
            is_ranked = (codes[:, 1] == target_group) & ~np.isnan(values)
            values, relevant = values[is_ranked], codes[is_ranked, 0] == target_class
            n, n_relevant = len(values), int(relevant.sum())
            if 0 < n_relevant < n:
                above = rankdata(values)[relevant].sum() - n_relevant * (n_relevant + 1) / 2
                hits = np.cumsum(relevant[np.lexsort((relevant, -values))])
                area = above / (n_relevant * (n - n_relevant))
                results[(t, *entry)] = [area, *(hits[np.minimum(k, n) - 1] / k)]
    return results


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

    if np.isnan(values).any():
        return float("nan"), np.full(2, np.nan)
    n1, n0 = int(positive.sum()), int((~positive).sum())
    ranks = rankdata(values)
    # The fraction of samples of the other class that each sample ranks above.
    above = (ranks[positive] - rankdata(values[positive])) / n0
    below = (ranks[~positive] - rankdata(values[~positive])) / n1
    area = float(above.mean())
    variance = sum(_variance(x) / len(x) for x in (above, below))
    if not 0 < area < 1:
        return area, np.full(2, area)
    half = special.ndtri((1 + confidence) / 2) * np.sqrt(variance) / (area * (1 - area))
    bounds: Floats = special.expit(special.logit(area) + np.array([-half, half]))
    return area, bounds


def _variance(x: Floats) -> float:
    return float(np.var(x, ddof=1)) if len(x) > 1 else float("nan")


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
