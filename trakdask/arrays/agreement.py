"""Correlate the rankings that several models give for the same target."""

from __future__ import annotations

import dask.array as da
import numpy as np
from dask.base import tokenize
from numpy.typing import NDArray

from trakdask.arrays.blocks import whole_columns

__all__ = ["mean_of_pairs", "rank_correlations"]

Floats = NDArray[np.float64]


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
    correlations: da.Array = da.blockwise(
        _correlations, "tmo", columns, "stm",
        new_axes={"o": score.shape[2]}, concatenate=True, align_arrays=False,
        dtype=np.float64, meta=np.empty((0, 0, 0), np.float64),
        name="rank-correlations-" + tokenize(columns.name),
    )  # fmt: skip
    return correlations


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
    return np.stack([_of_target(score[:, t]) for t in range(score.shape[1])])


def _of_target(score: Floats) -> Floats:
    """Return the correlations between the columns of (sample, model)."""
    from scipy.stats import rankdata  # takes a second to import, and only evaluation needs it

    known = score[~np.isnan(score).any(axis=1)]
    ranks = rankdata(known, axis=0) - (len(known) + 1) / 2
    covariance = ranks.T @ ranks
    scale = np.sqrt(np.diag(covariance))
    with np.errstate(invalid="ignore"):
        return np.asarray(np.clip(covariance / scale[:, None] / scale, -1, 1))
