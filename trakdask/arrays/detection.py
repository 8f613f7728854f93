"""Statistics of the ranking of each target: how high a class ranks, and whether models agree."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import dask.array as da
import numpy as np
from numpy.typing import NDArray

from trakdask.arrays.blocks import blockwise, whole_columns

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Codes = NDArray[np.signedinteger[Any]]
Statistics = Callable[[Floats, Bools], Floats]


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
    (target, ..., 2 + 2 × counts) float64, lazy: the area under the ROC curve, the reciprocal rank,
    then the precision at each k, then the recall at each k. NaN where no sample, or every sample,
    is of the target's class.

    Notes
    -----
    Equal scores count half in the area. Elsewhere samples of other classes rank first among equal
    scores, so that nothing depends on the order of the samples.

    Examples
    --------
    >>> score = da.from_array(np.array([[3.0], [2.0], [1.0]]))
    >>> of_samples, of_targets = np.array([[0, 0], [1, 0], [1, 0]]), np.array([[1, 0]])
    >>> class_ranks(score, of_samples, of_targets, [2]).compute().tolist()
    [[0.0, 0.5, 0.5, 0.5]]
    """
    function = functools.partial(_class_ranks, counts=tuple(counts))
    return _per_column(score, codes, target_codes, function, 2 + 2 * len(counts))


def average_precision(score: da.Array, positive: Bools) -> da.Array:
    """Return the average precision of the positive samples for every target, (target, ...), lazy.

    Parameters
    ----------
    score
        (sample, target, ...), float, any chunks. Samples with a NaN are left out.
    positive
        (sample,) bool.

    Returns
    -------
    float64; Σ (recall - previous recall) · precision over the distinct scores in descending order.
    NaN where no sample is positive, or every one.

    Examples
    --------
    >>> score = da.from_array(np.array([[3.0], [2.0], [1.0]]))
    >>> average_precision(score, np.array([True, False, True])).compute().round(3).tolist()
    [0.833]
    """
    n_targets = score.shape[1]
    codes = np.stack([positive, np.zeros_like(positive)], axis=1).astype(np.int8)
    of_targets = np.tile(np.array([1, 0], np.int8), (n_targets, 1))
    values = _per_column(score, codes, of_targets, _average_precision, 1)
    first: da.Array = values[..., 0]
    return first


def _per_column(
    score: da.Array, codes: Codes, target_codes: Codes, function: Statistics, n_results: int
) -> da.Array:
    """Return the results of each column's candidates, (target, ..., result)."""
    columns, more = whole_columns(score), "xyz"[: score.ndim - 2]
    of_targets = da.from_array(target_codes, chunks=(columns.chunks[1], 2))
    return blockwise(
        _of_block, f"t{more}r",
        columns, f"st{more}", da.from_array(codes, chunks=-1), "sp", of_targets, "tp",
        new_axes={"r": n_results}, concatenate=True, name="ranks-of-class", dtype=np.float64,
        statistics=function, n_results=n_results,
    )  # fmt: skip


def _of_block(
    score: Floats, codes: Codes, target_codes: Codes, *, statistics: Statistics, n_results: int
) -> Floats:
    results = np.full((*score.shape[1:], n_results), np.nan)
    for t, (own_class, own_group) in enumerate(target_codes):
        candidates, relevant = codes[:, 1] == own_group, codes[:, 0] == own_class
        for entry in np.ndindex(score.shape[2:]):
            column = score[(slice(None), t, *entry)]
            ranked = candidates & ~np.isnan(column)
            if relevant[ranked].any() and not relevant[ranked].all():
                results[(t, *entry)] = statistics(column[ranked], relevant[ranked])
    return results


def _class_ranks(values: Floats, relevant: Bools, *, counts: tuple[int, ...]) -> Floats:
    from scipy.stats import rankdata  # takes a second to import, and only evaluation needs it

    n, n_relevant, k = len(values), int(relevant.sum()), np.array(counts)
    above = rankdata(values)[relevant].sum() - n_relevant * (n_relevant + 1) / 2
    hits = np.cumsum(relevant[np.lexsort((relevant, -values))])
    found = hits[np.minimum(k, n) - 1]
    area, first = above / (n_relevant * (n - n_relevant)), 1 / (np.argmax(hits > 0) + 1)
    return np.array([area, first, *(found / k), *(found / n_relevant)])


def _average_precision(values: Floats, positive: Bools) -> Floats:
    order = np.argsort(-values, kind="stable")
    ordered = values[order]
    last_of_equal = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    hits = np.cumsum(positive[order])[last_of_equal]
    gained = np.diff(hits, prepend=0) / hits[-1]
    return np.array([(gained * hits / (last_of_equal + 1)).sum()])


def rank_correlations(score: da.Array) -> da.Array:
    """Return the Spearman correlations between the models of each target, (target, model, model).

    Parameters
    ----------
    score
        (sample, target, model), float, any chunks. A sample with a NaN from one of the models is
        left out for that target.

    Returns
    -------
    float64, lazy, in chunks of few targets. NaN where all scores of a model are equal, or fewer
    than two samples are left. Equal scores share their mean rank.

    Examples
    --------
    >>> score = da.from_array(np.array([[[1.0, 3.0]], [[2.0, 2.0]], [[3.0, 1.0]]]))
    >>> rank_correlations(score).compute().tolist()
    [[[1.0, -1.0], [-1.0, 1.0]]]
    """
    columns = whole_columns(score.rechunk({2: -1}))
    return blockwise(
        _correlations, "tmo", columns, "stm",
        new_axes={"o": score.shape[2]}, concatenate=True,
        name="rank-correlations", dtype=np.float64,
    )  # fmt: skip


def mean_of_pairs(correlations: Floats) -> Floats:
    """Return the mean over the pairs of models of correlations (..., model, model).

    Examples
    --------
    >>> float(mean_of_pairs(np.array([[1.0, 0.5], [0.5, 1.0]])))
    0.5
    """
    rows, columns = np.triu_indices(correlations.shape[-1], 1)
    return np.asarray(correlations[..., rows, columns].mean(axis=-1))


def _correlations(score: Floats) -> Floats:
    return np.stack([_correlations_of_target(score[:, t]) for t in range(score.shape[1])])


def _correlations_of_target(score: Floats) -> Floats:
    """Return the correlations between the columns of (sample, model)."""
    from scipy.stats import rankdata  # takes a second to import, and only evaluation needs it

    known = score[~np.isnan(score).any(axis=1)]
    ranks = rankdata(known, axis=0) - (len(known) + 1) / 2
    covariance = ranks.T @ ranks
    scale = np.sqrt(np.diag(covariance))
    with np.errstate(invalid="ignore"):
        return np.asarray(np.clip(covariance / scale[:, None] / scale, -1, 1))
