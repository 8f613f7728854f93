"""Estimate errors over checkpoints, of sums by group and self-influence; find what exceeds noise.

Errors of scores are computed with the scores, in :func:`trakdask.arrays.score.score`.
"""

from __future__ import annotations

import functools

import dask.array as da
import numpy as np
import numpy.typing as npt

from trakdask.arrays.blocks import Block, Blocks, blockwise, flat, product_dtype, tree_sum
from trakdask.arrays.folds import jackknife_error, mean_of_others
from trakdask.arrays.score import estimate

#: Levels of p-values by which significance is decided. Each is 1.03 times the one before.
LEVELS = np.geomspace(1e-12, 1, 1024)


def member_score(sums: da.Array, solved: da.Array) -> da.Array:
    """Return the score of each group for each target, with its error over checkpoints.

    Parameters
    ----------
    sums
        Result of :func:`trakdask.arrays.groups.weighted_sums`, with a fold for each checkpoint, in
        their order, and the sums of all checkpoints as the last fold.
    solved
        w of the targets, (target, proj_dim, checkpoint), chunks (rows, p, 1).

    Returns
    -------
    (group, target) of dtype :func:`trakdask.arrays.score.estimate`, lazy.
    """
    return blockwise(
        _member_score, "gt", sums, "gfpc", solved, "tpc",
        concatenate=False, name="member-score", dtype=estimate(product_dtype(solved)),
    )  # fmt: skip


def _member_score(sums: Blocks, solved: Blocks) -> Block:
    # (group, fold, target), where the last fold leaves none out.
    total, n = np.zeros(()), 0
    for of_groups, w in zip(flat(sums), flat(solved), strict=True):
        product = of_groups[..., 0] @ w[:, :, 0].T.astype(np.float64)
        product[:, n] = 0  # the fold without this checkpoint
        total, n = total + product, n + 1
    total[:, :n] /= n - 1
    total[:, n] /= n
    return _estimates(total[:, n], np.moveaxis(total[:, :n], 1, 0), product_dtype(w))


def self_influence(forms: da.Array, loss_weights: da.Array) -> da.Array:
    """Return the mean of form_c(z) times mean_c[g_c(z)]², with its error over checkpoints.

    Parameters
    ----------
    forms, loss_weights
        As in :func:`trakdask.arrays.weights.self_influence`.

    Returns
    -------
    (sample,) of dtype :func:`trakdask.arrays.score.estimate`, lazy, in the chunks of ``forms``.
    """
    return blockwise(
        _self_influence, "s", forms, "sc", loss_weights.rechunk(forms.chunks), "sc",
        concatenate=True, name="self-influence-error", dtype=estimate(np.float64),
    )  # fmt: skip


def _self_influence(forms: Block, g: Block) -> Block:
    without = mean_of_others(forms) * mean_of_others(g) ** 2
    return _estimates(forms.mean(axis=1) * g.mean(axis=1) ** 2, without.T, np.dtype(np.float64))


def _estimates(score: Block, without: Block, dtype: np.dtype[np.floating]) -> Block:
    tile = np.empty(score.shape, estimate(dtype))
    tile["score"], tile["error"] = score, jackknife_error(without)
    return tile


def interval(tiles: da.Array, quantile: float) -> tuple[da.Array, ...]:
    """Return numbers, the bounds of their intervals, and their ratio to their errors.

    Parameters
    ----------
    tiles
        Numbers with their errors, of dtype :func:`trakdask.arrays.score.estimate`, of any shape.
    quantile
        The distance of the bounds in errors.

    Returns
    -------
    The numbers, the lower and the upper bounds, and ratios, NaN where the error is 0; lazy.

    Examples
    --------
    >>> one = da.from_array(np.array([(3.0, 1.5)], estimate("f4")))
    >>> [array.compute().tolist() for array in interval(one, 2)]
    [[3.0], [0.0], [6.0], [2.0]]
    """
    index = "wxyz"[: tiles.ndim]
    parts = (
        blockwise(part, index, tiles, index, name="interval", dtype=tiles.dtype["score"])
        for part in (
            _score,
            functools.partial(_bound, quantile=-quantile),
            functools.partial(_bound, quantile=quantile),
            _ratio,
        )
    )
    return tuple(parts)


def _score(tile: Block) -> Block:
    return tile["score"].copy()


def _bound(tile: Block, *, quantile: float) -> Block:
    return tile["score"] + tile["error"] * tile["error"].dtype.type(quantile)


def _ratio(tile: Block) -> Block:
    return tile["score"] / np.where(tile["error"] > 0, tile["error"], np.nan)


def least_significant(ratio: da.Array, edges: npt.NDArray[np.float64], q: float) -> da.Array:
    """Return the size from which ratios are significant, per target, by Benjamini and Hochberg.

    Parameters
    ----------
    ratio
        Signal-to-noise ratios, (sample, target), any chunks; NaN is no test.
    edges
        The ratio at each of :data:`LEVELS`, descending.
    q
        The false discovery rate.

    Returns
    -------
    (target,) float64, lazy: one of ``edges``, or infinity where nothing is significant.

    Notes
    -----
    P-values are rounded up to the next level, so that counting them is one pass: with 8,192 bytes
    per target, and whatever the number of samples.

    References
    ----------
    Benjamini & Hochberg 1995.

    Examples
    --------
    >>> ratio = da.from_array(np.array([[9.0], [0.1], [-8.0]]))
    >>> least_significant(ratio, np.linspace(10, 0, len(LEVELS)), 0.1).compute().round(1)
    array([1.])
    """
    counts = blockwise(
        _counts, "stl", ratio, "st", new_axes={"l": len(edges)},
        adjust_chunks={"s": (1,) * ratio.numblocks[0]},
        name="ratio-counts", dtype=np.int64, edges=edges,
    )  # fmt: skip
    total = tree_sum(counts, name="ratio-count", dtype=np.int64)
    return blockwise(
        functools.partial(_least, edges=edges, q=q), "t", total, "tl",
        concatenate=True, name="least-significant", dtype=np.float64,
    )  # fmt: skip


def _counts(ratio: Block, *, edges: Block) -> Block:
    """Return how many ratios reach each edge, but not the one before, (1, target, edge)."""
    size, n = np.abs(ratio), len(edges)
    # One bincount for all targets: the levels of each have numbers of their own.
    level = np.searchsorted(-edges, -size).clip(max=n - 1) + n * np.arange(size.shape[1])
    counts = np.bincount(level[~np.isnan(size)], minlength=n * size.shape[1])
    return counts.reshape(1, -1, n).astype(np.int64)


def _least(counts: Block, *, edges: Block, q: float) -> Block:
    rejected = np.cumsum(counts, axis=1)
    # At the p-value of a level, m p of m tests are significant by chance. The last level where that
    # is at most the share q of those that are counts; a level that none has reached is no finding.
    passes = (rejected * q >= LEVELS * rejected[:, -1:]) & (rejected > 0)
    last = passes.shape[1] - 1 - np.argmax(passes[:, ::-1], axis=1)
    return np.where(passes.any(axis=1), edges[last], np.inf)
