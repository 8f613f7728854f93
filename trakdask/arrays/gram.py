"""Compute the Gram matrix of the features, XᵀX, their weighted sum, and rules for λ from it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import pairwise

import dask.array as da
import numpy as np

from trakdask.arrays.blocks import (
    Block,
    Blocks,
    Unread,
    align_weights,
    block_starts,
    blockwise,
    failed_rows,
    flat,
    product_dtype,
    tree_sum,
)
from trakdask.arrays.graphs import grouped, texts
from trakdask.arrays.groups import weighted_sums
from trakdask.arrays.weights import pooled
from trakdask.arrays.xp import array_module, asnumpy

#: Above this proj_dim, two float64 matrices do not fit in memory beside the features of a task.
_FLOAT64_MAX_DIM = 8192
#: Rows per partial matrix, as a multiple of p. A partial has p² entries however few rows it was
#: computed from, so with fewer rows it would cost more to move than the features themselves.
ROWS_PER_DIM = 8


def gram(feature: da.Array, gram_weights: da.Array | None = None) -> da.Array:
    """Return the weighted Gram matrix of every checkpoint.

    K_c = Σ_z h_c(z) φ_c(z) φ_c(z)ᵀ: TRAK's XᵀX when the weights are 1.

    Parameters
    ----------
    feature
        (sample, proj_dim, checkpoint), float, chunks (rows, p, 1). Multiplied in float32, or in
        float64 if that is its dtype. Rows of failed samples, which are entirely NaN, are left out.
    gram_weights
        h, (sample, checkpoint), at least 0 (not checked); None for 1.

    Returns
    -------
    (proj_dim, proj_dim, checkpoint), exactly symmetric, lazy, chunks (p, p, 1). Float64, or in the
    dtype of the products if p is above 8192, as are the sums.

    Raises
    ------
    ValueError
        If there are no samples.

    Notes
    -----
    Cost: n p² C flops, as BLAS exploits the symmetry, and one pass over ``feature``. Blocks are
    merged into groups of R >= 8 p rows (at most 16 p and one block; all rows if n < 8 p), with one
    partial matrix each. Stored blocks are read inside the task of their group, so that only partial
    matrices move between workers, and scores read them again.
    :func:`trakdask.arrays.memory.gram` bounds the memory of a task.

    Exactness: products and sums in the dtypes above. The bits are the same on any
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
    return _reduced(feature, gram_weights, None)


def gram_and_sum(
    feature: da.Array, gram_weights: da.Array | None, loss_weights: da.Array
) -> tuple[da.Array, da.Array]:
    """Return the Gram matrix and the weighted sum of the features, in one pass over them.

    K_c of :func:`gram`, and r_c = Σ_z mean_c[ g_c(z) ] φ_c(z).

    Parameters
    ----------
    feature, gram_weights
        As in :func:`gram`.
    loss_weights
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
    Cost and exactness are as for :func:`gram`: r is one more column of each partial matrix.

    Examples
    --------
    >>> x = da.ones((6, 2, 1), chunks=(4, 2, 1), dtype="float32")
    >>> _, total = gram_and_sum(x, None, da.full((6, 1), 0.5))
    >>> total.compute().ravel().tolist()
    [3.0, 3.0]
    """
    both = _reduced(feature, gram_weights, loss_weights)
    p = feature.shape[1]
    return both[:, :p], both[:, p]


def loss_gradient(feature: da.Array, loss_weights: da.Array) -> da.Array:
    """Return r_c = Σ_z mean_c[ g_c(z) ] φ_c(z), where the gram matrix is known already.

    Parameters
    ----------
    feature, loss_weights
        As in :func:`gram_and_sum`, with the same samples left out.

    Returns
    -------
    (proj_dim, checkpoint) float64, lazy, chunks (p, 1).

    Notes
    -----
    Cost: 2 n p C flops and one pass over ``feature``.

    Examples
    --------
    >>> x = da.ones((6, 2, 1), chunks=(4, 2, 1), dtype="float32")
    >>> loss_gradient(x, da.full((6, 1), 0.5)).compute().ravel().tolist()
    [3.0, 3.0]
    """
    g = pooled(align_weights(loss_weights, feature))
    return weighted_sums(feature, g)


def _reduced(
    feature: da.Array, gram_weights: da.Array | None, loss_weights: da.Array | None
) -> da.Array:
    """Return (p, p, checkpoint), or with ``loss_weights`` (p, p + 1, checkpoint): K, then r."""
    n, p, _ = feature.shape
    if n == 0:
        raise ValueError(
            "expected feature of gram with at least one sample, got 0 samples; try selecting more"
        )
    feature = feature.rechunk({2: 1})  # a task reads the first checkpoint of its block
    # 1. Consecutive chunks, merged into groups of at least 8 p rows.
    sizes, least = [0], ROWS_PER_DIM * p
    for size in feature.chunks[0]:
        if sizes[-1] >= least:
            sizes.append(0)
        sizes[-1] += size
    if len(sizes) > 1 and sizes[-1] < least:
        tail = sizes.pop()
        sizes[-1] += tail
    groups = tuple(sizes)
    # 2. Partial sums of each group, added up in a tree.
    ends = np.searchsorted(block_starts(feature.chunks[0]), block_starts(groups))
    blocks = [range(start, end) for start, end in pairwise(ends.tolist())]
    h = None if gram_weights is None else align_weights(gram_weights, feature)
    g = None if loss_weights is None else pooled(align_weights(loss_weights, feature))
    inputs = [
        (None, None) if x is None else grouped(x, index, blocks)
        for x, index in ((feature, "spc"), (h, "sc"), (g, "s"))
    ]
    parts = blockwise(
        _partial, "spqc", *itertools.chain(*inputs),
        new_axes={"p": p, "q": p if loss_weights is None else p + 1},
        adjust_chunks={"s": (1,) * len(groups)},
        name="gram-products", dtype=_sum_dtype(feature),
    )  # fmt: skip
    return tree_sum(parts, name="gram", dtype=parts.dtype)


def accumulation_dtype(proj_dim: int) -> np.dtype[np.floating]:
    """Return the dtype in which partial Gram matrices are added: float64 up to p = 8192.

    Examples
    --------
    >>> accumulation_dtype(2048)
    dtype('float64')
    """
    return np.dtype(np.float64 if proj_dim <= _FLOAT64_MAX_DIM else np.float32)


def _sum_dtype(feature: da.Array | Block) -> np.dtype[np.floating]:
    return np.result_type(accumulation_dtype(feature.shape[1]), product_dtype(feature))


def _concatenated(blocks: Blocks) -> Block:
    """Return the rows of all blocks, holding no more than one block beside them."""
    if not isinstance(blocks, Unread):
        (block,) = flat(blocks)
        return block
    parts = flat(blocks)
    first = next(parts)
    if len(blocks.keys) == 1:
        return first
    whole = np.empty((blocks.n_rows, *first.shape[1:]), first.dtype)
    end = 0
    for part in itertools.chain([first], parts):
        start, end = end, end + len(part)
        whole[start:end] = part
    return whole


def _partial(features: Blocks, gram_weights: Blocks | None, loss_weights: Blocks | None) -> Block:
    """Return the partial sums of the rows of one group, (1, p, p or p + 1, 1).

    Rows are processed in slabs, so that casting and weighting them takes little memory.
    """
    x = _concatenated(features)
    h = None if gram_weights is None else _concatenated(gram_weights)
    g = None if loss_weights is None else _concatenated(loss_weights)
    rows, p, _ = x.shape
    dtype, xp = product_dtype(x), array_module()
    total = xp.zeros((p, p if g is None else p + 1), _sum_dtype(x))
    product = xp.empty((p, p), dtype)
    # From p of 256 on, the cast and the weighted copy of a slab have 8 p² numbers: memory of the
    # order of the total and the product, however many rows there are.
    slab = max(4 * p, 1024)
    for start in range(0, rows, slab):
        chosen = slice(start, start + slab)
        failed = failed_rows(x[chosen])[:, None]
        a = xp.asarray(x[chosen, :, 0]).astype(dtype, copy=False)
        if failed.any():
            a = xp.where(xp.asarray(failed), dtype.type(0), a)
        # A matrix times its own transpose takes BLAS half of the operations, and is symmetric.
        b = a
        if h is not None:
            roots = np.sqrt(np.where(failed, 0, h[chosen]).astype(dtype, copy=False))
            b = a * xp.asarray(roots)
        # On some processors products warn of infinity. The solve reports it, with the checkpoint.
        with np.errstate(invalid="ignore", over="ignore"):
            xp.matmul(b.T, b, out=product)
            total[:, :p] += product
            if g is not None:
                weights_of_rows = np.where(np.isnan(g[chosen]), 0, g[chosen]).astype(dtype)
                total[:, p] += xp.asarray(weights_of_rows) @ a
    return asnumpy(total).reshape(1, *total.shape, 1)


def mirrored(matrix: Block, rows: np.ndarray | None = None) -> Block:
    """Return rows of a symmetric matrix of which the lower triangle was not known.

    Parameters
    ----------
    matrix
        (row, p, ...) floats, or (row, row, ...) if the same columns were selected.
    rows
        The number of each row in the whole matrix; by default all of them, in their order. What
        only rows that are not there would know is NaN.

    Examples
    --------
    >>> upper = np.array([[1.0, 2.0, 3.0], [0.0, 4.0, 5.0], [0.0, 0.0, 6.0]])
    >>> mirrored(upper).tolist()
    [[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]]
    >>> mirrored(upper[[2, 0]], np.array([2, 0])).tolist()
    [[3.0, nan, 6.0], [1.0, 2.0, 3.0]]
    """
    numbers = np.arange(matrix.shape[1])
    rows = numbers if rows is None else rows
    places = rows
    # The same columns were selected, if some are too few for the rows, or known below the diagonal.
    if rows.max(initial=0) >= len(numbers) or matrix[numbers < rows[:, None]].any():
        numbers, places = rows, numbers
    whole = matrix.copy()
    whole[numbers < rows[:, None]] = np.nan
    for row, number, place in zip(matrix, rows, places, strict=True):
        below = rows > number
        whole[below, place] = row[places[below]]
    return whole


def of_rows(matrix: Block, rows: np.ndarray) -> Block:
    """Return the columns that belong to the rows of a symmetric matrix, (row, row, ...).

    If the same columns were selected, it is symmetric already.

    Examples
    --------
    >>> whole = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]])
    >>> of_rows(whole[[2, 0]], np.array([2, 0])).tolist()
    [[6.0, 3.0], [3.0, 1.0]]
    """
    is_done = len(matrix) == matrix.shape[1] and (matrix == matrix.swapaxes(0, 1)).all()
    return matrix if is_done else matrix[:, rows]


def traces(gram: da.Array, labels: Sequence[object]) -> da.Array:
    """Return tr(K_c) and tr(K_c²)/tr(K_c), the units of the damping λ.

    tr(K²)/tr(K) is the mean of the eigenvalues of K, weighted by the eigenvalues themselves, so λ
    scales with the gradients and the same factor is suitable for all checkpoints.

    Parameters
    ----------
    gram
        (proj_dim, proj_dim, checkpoint), float, chunks (p, p, 1), symmetric.
    labels
        The checkpoints' names, for errors.

    Returns
    -------
    (2, checkpoint) float64, lazy, chunks of one checkpoint, in the units of ``gram``; not finite
    for a checkpoint whose ``gram`` is not finite.

    Raises
    ------
    ValueError
        When computed, if ``gram`` is all 0, so that K + λI would be singular; the message names the
        checkpoint.

    Notes
    -----
    Cost: one pass over ``gram`` in float64, with 8 p bytes of additional memory.

    Examples
    --------
    >>> traces(da.ones((2, 2, 1), chunks=(2, 2, 1)), ["c0"]).compute().tolist()
    [[2.0], [2.0]]
    """
    return blockwise(
        _traces, "tc", gram, "pqc", texts(labels), "c",
        new_axes={"t": 2}, concatenate=False, name="traces", dtype=np.float64,
    )  # fmt: skip


def _traces(gram: Blocks, label: str) -> Block:
    (block,) = flat(gram)
    trace = float(np.trace(block[:, :, 0], dtype=np.float64))
    if not trace:  # K is a sum of squares, so all of K is 0, too
        raise ValueError(
            f"expected a gram matrix with a positive trace, got 0 at checkpoint {label!r}, where "
            "all features are 0 or failed, or all weights are 0 (estimator='soft' gives weight 0 "
            "where out_to_loss is 0 or 1); try estimator='trak', and inspect features.feature and "
            "features.out_to_loss"
        )
    # Row by row, because a float64 copy of the whole matrix would double the task's memory.
    square = sum(float(np.vdot(row, row)) for row in (r.astype(np.float64) for r in block))
    return np.array([[trace], [square / trace]])
