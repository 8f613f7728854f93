"""Compute the Gram matrix of the features, XᵀX, and their weighted sum by a tree reduction."""

from __future__ import annotations

import itertools
from itertools import pairwise

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import tokenize

from trakdask.arrays.block_arguments import read_in_task
from trakdask.arrays.blocks import (
    Block,
    Blocks,
    Unread,
    align_weights,
    block_starts,
    failed_rows,
    flat,
    mean_weight,
    product_dtype,
    tree_sum,
)
from trakdask.arrays.xp import array_module, asnumpy

__all__ = ["accumulation_dtype", "gram", "gram_and_sum", "pooled"]

#: Above this proj_dim, two float64 matrices do not fit in memory beside the features of a task.
_FLOAT64_MAX_DIM = 8192
#: Rows per partial matrix, as a multiple of p. A partial has p² entries however few rows it was
#: computed from, so with fewer rows it would cost more to move than the features themselves.
_ROWS_PER_DIM = 8


def gram(
    feature: da.Array,
    weights: da.Array | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
    split_every: int = 8,
) -> da.Array:
    """Return the weighted Gram matrix of every checkpoint.

    K_c = Σ_z h_c(z) φ_c(z) φ_c(z)ᵀ: TRAK's XᵀX when the weights are 1.

    Parameters
    ----------
    feature
        (sample, proj_dim, checkpoint), float, chunks (rows, p, 1). Multiplied in float32, or in
        float64 if that is its dtype. Rows of failed samples, which are entirely NaN, are left out.
    weights
        h, (sample, checkpoint), at least 0 (not checked); None for 1.
    dtype
        Dtype of the sums and of the result: by default float64, or that of the products if p is
        above 8192.
    split_every
        Fan-in of the tree that adds the partial matrices. Use 2 to 4 for p of 16384 and more.

    Returns
    -------
    (proj_dim, proj_dim, checkpoint), exactly symmetric, lazy, chunks (p, p, 1).

    Raises
    ------
    ValueError
        If there are no samples.

    Notes
    -----
    Cost: 2 n p² C flops (half of that without weights, as BLAS exploits the symmetry) and one pass
    over ``feature``. Blocks are merged into groups of R >= 8 p rows (at most 16 p and one block;
    all rows if n < 8 p), with one partial matrix each. Stored blocks are read inside the task of
    their group, so that only partial matrices move between workers, and scores read them again.
    Peak memory per task: about 2 R p itemsize of ``feature`` while a group is merged (R p and one
    block if they are stored), then R p itemsize + 12 p² bytes (16 p² with weights); in the tree
    (split_every + 1) p² itemsize.

    Exactness: products in the dtype above, sums in ``dtype``. The bits are the same on any
    scheduler for given chunks and BLAS (a worker with ``TRAKDASK_XP=cupy`` multiplies on its GPU).
    A row that is infinite or partly NaN makes the matrix of its checkpoint non-finite.

    References
    ----------
    Park et al. 2023, "TRAK: Attributing Model Behavior at Scale", section 3.

    Examples
    --------
    >>> x = da.ones((6, 2, 1), chunks=(4, 2, 1), dtype="float32")
    >>> gram(x).compute()[:, :, 0].tolist()
    [[6.0, 6.0], [6.0, 6.0]]
    """
    return _reduced(feature, weights, None, dtype, split_every)


def gram_and_sum(
    feature: da.Array,
    weights: da.Array | None,
    sum_weights: da.Array,
    *,
    dtype: npt.DTypeLike | None = None,
    split_every: int = 8,
) -> tuple[da.Array, da.Array]:
    """Return the Gram matrix and the weighted sum of the features, in one pass over them.

    K_c of :func:`gram`, and r_c = Σ_z mean_c[ g_c(z) ] φ_c(z).

    Parameters
    ----------
    feature, weights, dtype, split_every
        As in :func:`gram`.
    sum_weights
        g, (sample, checkpoint), of any sign. A sample whose g is NaN at any checkpoint, because it
        failed there, is left out of the sums of all checkpoints.

    Returns
    -------
    gram
        (proj_dim, proj_dim, checkpoint), with the same bits as the result of :func:`gram`.
    total
        r, (proj_dim, checkpoint), in the dtype of the matrix. Both are lazy, with one chunk per
        checkpoint; computing them together takes one pass over the features.

    Notes
    -----
    Cost and exactness are those of :func:`gram`: r is one more column of each partial matrix.

    Examples
    --------
    >>> x = da.ones((6, 2, 1), chunks=(4, 2, 1), dtype="float32")
    >>> _, total = gram_and_sum(x, None, da.full((6, 1), 0.5))
    >>> total.compute().ravel().tolist()
    [3.0, 3.0]
    """
    both = _reduced(feature, weights, sum_weights, dtype, split_every)
    p = feature.shape[1]
    return both[:, :p], both[:, p]


def pooled(weights: da.Array) -> da.Array:
    """Return the mean over checkpoints of (sample, checkpoint) weights, (sample,) float64, lazy.

    Examples
    --------
    >>> pooled(da.from_array(np.array([[0.5, 1.0]]), chunks=(1, 1))).compute().tolist()
    [0.75]
    """
    mean: da.Array = da.blockwise(
        mean_weight,
        "s",
        weights,
        "sc",
        concatenate=False,
        align_arrays=False,
        name="pooled-" + tokenize(weights.name),
        dtype=np.float64,
        meta=np.empty((0,), np.float64),
    )
    return mean


def _reduced(
    feature: da.Array,
    weights: da.Array | None,
    sum_weights: da.Array | None,
    dtype: npt.DTypeLike | None,
    split_every: int,
) -> da.Array:
    """Return (p, p, checkpoint), or with ``sum_weights`` (p, p + 1, checkpoint): K, then r."""
    n, p, _ = feature.shape
    if n == 0:
        raise ValueError(
            "expected feature of gram with at least one sample, got 0 samples; try selecting more"
        )
    least = np.result_type(accumulation_dtype(p), product_dtype(feature))
    sum_dtype = np.dtype(least if dtype is None else dtype)
    groups = _groups(feature.chunks[0], _ROWS_PER_DIM * p)
    h = None if weights is None else align_weights(weights, feature)
    g = None if sum_weights is None else align_weights(sum_weights, feature)
    parts = da.blockwise(
        _partial,
        "spqc",
        *_merged(feature, groups),
        *((None, None) if h is None else _merged(h, groups)),
        *((None, None) if g is None else _merged(pooled(g), groups)),
        new_axes={"p": p, "q": p if sum_weights is None else p + 1},
        adjust_chunks={"s": (1,) * len(groups)},
        align_arrays=False,
        name="gram-products-" + tokenize(feature.name, weights, sum_weights, sum_dtype.str),
        dtype=sum_dtype,
        meta=np.empty((0,) * 4, sum_dtype),
        sum_dtype=sum_dtype,
    )
    return tree_sum(parts, split_every=split_every, name="gram")


def accumulation_dtype(proj_dim: int) -> np.dtype[np.floating]:
    """Return the dtype in which partial Gram matrices are added: float64 up to p = 8192.

    Examples
    --------
    >>> accumulation_dtype(2048)
    dtype('float64')
    """
    return np.dtype(np.float64 if proj_dim <= _FLOAT64_MAX_DIM else np.float32)


def _groups(sizes: tuple[int, ...], min_rows: int) -> tuple[int, ...]:
    """Merge consecutive chunks into groups of at least ``min_rows`` rows; return their sizes."""
    groups = [0]
    for size in sizes:
        if groups[-1] >= min_rows:
            groups.append(0)
        groups[-1] += size
    if len(groups) > 1 and groups[-1] < min_rows:
        tail = groups.pop()
        groups[-1] += tail
    return tuple(groups)


def _merged(array: da.Array, groups: tuple[int, ...]) -> tuple[object, str]:
    """Return an argument of ``blockwise`` with all rows of a group in one task, and its index.

    Blocks in a store are read by that task. Others, wherever they were computed, are sent there.
    """
    index = {1: "s", 2: "sc", 3: "spc"}[array.ndim]
    ends = np.searchsorted(block_starts(array.chunks[0]), block_starts(groups))
    blocks = [range(start, end) for start, end in pairwise(ends.tolist())]
    read = read_in_task(array, groups=blocks, by_checkpoint=array.ndim > 1)
    return read or (array.rechunk({0: groups}, method="tasks"), index)


def _partial(
    x: Blocks, h: Blocks | None, g: Blocks | None, *, sum_dtype: np.dtype[np.floating]
) -> Block:
    """Return the partial sums of one group, (1, p, p or p + 1, 1)."""
    rest = (None if blocks is None else _concatenated(blocks) for blocks in (h, g))
    return _products(_concatenated(x), *rest, sum_dtype=sum_dtype)


def _concatenated(blocks: Blocks) -> Block:
    """Return the rows of all blocks, holding no more than one block beside them."""
    if not isinstance(blocks, Unread):
        (block,) = flat(blocks)
        return block
    parts = flat(blocks)
    first = next(parts)
    if len(blocks.tasks) == 1:
        return first
    whole = np.empty((blocks.n_rows, *first.shape[1:]), first.dtype)
    end = 0
    for part in itertools.chain([first], parts):
        start, end = end, end + len(part)
        whole[start:end] = part
    return whole


def _products(
    x: Block, h: Block | None, g: Block | None, *, sum_dtype: np.dtype[np.floating]
) -> Block:
    """Return the partial sums of some rows, (1, p, p or p + 1, 1).

    Rows are processed in slabs, so that casting and weighting them takes little memory.
    """
    rows, p, _ = x.shape
    dtype, xp = product_dtype(x), array_module()
    total = xp.zeros((p, p if g is None else p + 1), sum_dtype)
    product = xp.empty((p, p), dtype)
    slab = max(4 * p, 1024)
    for start in range(0, rows, slab):
        chosen = slice(start, start + slab)
        failed = failed_rows(x[chosen])[:, None]
        a = xp.asarray(x[chosen, :, 0]).astype(dtype, copy=False)
        if failed.any():
            a = xp.where(xp.asarray(failed), dtype.type(0), a)
        b = a
        if h is not None:
            b = a * xp.asarray(np.where(failed, 0, h[chosen]).astype(dtype, copy=False))
        # On some processors products warn of infinity. The solve reports it, with the checkpoint.
        with np.errstate(invalid="ignore", over="ignore"):
            xp.matmul(a.T, b, out=product)
            if h is not None:  # rounding makes φᵀ(h∘φ) asymmetric
                product += product.T
                product *= 0.5
            total[:, :p] += product
            if g is not None:
                weights = np.where(np.isnan(g[chosen]), 0, g[chosen]).astype(dtype)
                total[:, p] += xp.asarray(weights) @ a
    return asnumpy(total).reshape(1, *total.shape, 1)
