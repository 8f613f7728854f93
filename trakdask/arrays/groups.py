"""Sum the features of groups of samples, and combine rows linearly."""

from __future__ import annotations

import itertools
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
from scipy import sparse

from trakdask.arrays.blocks import (
    SPLIT_EVERY,
    Block,
    Blocks,
    align_weights,
    block_starts,
    blocks_with,
    blockwise,
    failed_rows,
    flat,
    matrix,
    product_dtype,
    tree_sum,
)
from trakdask.arrays.graphs import Bounds, PackedRows, read_in_task, reader
from trakdask.arrays.weights import pooled as pooled_weights

N_COUNTS = 2
"""Columns behind the sums of a group: how many of its samples were added up, and how many not."""


def group_sum(
    feature: da.Array,
    loss_weights: da.Array | None,
    codes: npt.ArrayLike,
    n_groups: int,
    *,
    pooled: bool = True,
    if_failed: float = np.nan,
) -> da.Array:
    """Return the sum of weighted features of every group of samples.

    Σ_{z in group} mean_c[ g_c(z) ] φ_c(z). Its product with the solved targets is the sum of the
    group's scores, at the cost of one pass over the features and without computing the scores.

    Parameters
    ----------
    feature
        (sample, proj_dim, checkpoint), float, chunks (rows, p, 1).
    loss_weights
        g, (sample, checkpoint); None for 1.
    codes
        Group of each sample, (sample,) integer in [0, n_groups), or -1 for none.
    n_groups
        Number of groups, at least 1. A group without samples sums to 0.
    pooled
        Use the mean of g over checkpoints; if False, each checkpoint uses its own g.
    if_failed
        The sum of a group whose samples all failed: of nothing that is known.

    Returns
    -------
    (group, proj_dim, checkpoint) float32 (float64 if the features are), lazy, chunks (n_groups, p,
    1). Can be passed as ``feature`` to :func:`trakdask.arrays.score.score`.

    Notes
    -----
    Cost: 2 n p C flops, memory-bound. Blocks in which no sample has a group are never read. Blocks
    that are stored are read by the task that sums them, 8 in a row.
    :func:`trakdask.arrays.memory.group_sums` bounds the memory of a task.

    Exactness: sums are float32 (as above) within a block and float64 between blocks, with the same
    bits on any scheduler for given chunks. Rows of failed samples, which are entirely NaN, and rows
    whose weight is NaN are left out, unless these are all rows of a group; any other NaN affects
    only the sum of its own group.

    Examples
    --------
    >>> x = da.ones((4, 2, 1), chunks=(2, 2, 1), dtype="float32")
    >>> group_sum(x, None, [0, 1, 1, -1], 2).compute()[:, :, 0].tolist()
    [[1.0, 1.0], [2.0, 2.0]]
    """
    # From 0, which is no group: few bits hold them, and each task gets no more than those.
    groups = np.add(codes, 1, dtype=np.min_scalar_type(n_groups), casting="unsafe")
    _, p, n_checkpoint = feature.shape
    dtype, sizes = product_dtype(feature), feature.chunks[0]
    used = blocks_with(groups > 0, sizes)
    if not used:
        chunks = (n_groups, p, (1,) * n_checkpoint)
        return da.zeros((n_groups, p, n_checkpoint), dtype=dtype, chunks=chunks)
    g = None if loss_weights is None else align_weights(loss_weights, feature)
    if g is not None and pooled:
        g = pooled_weights(g)
    inputs: list[tuple[Any, str]] = [(feature, "spc")]
    if g is not None:
        inputs.append((g, "sc"[: g.ndim]))
    if reads := all(reader(array) for array, _ in inputs):
        # As many blocks as a node of the tree adds, in its order: the bits are the same.
        merged = [used[i : i + SPLIT_EVERY] for i in range(0, len(used), SPLIT_EVERY)]
        starts = block_starts(sizes)
        groups = np.concatenate([groups[starts[i] : starts[i + 1]] for i in used])
        sizes = tuple(sum(sizes[i] for i in blocks) for blocks in merged)
        inputs = [
            read_in_task(array, groups=merged, by_checkpoint=array.ndim > 1) or (array, index)
            for array, index in inputs
        ]
    parts = blockwise(
        _partial, "sgpc", PackedRows(groups, n_groups, sizes), "s", *itertools.chain(*inputs),
        new_axes={"g": n_groups, "p": p + N_COUNTS}, adjust_chunks={"s": (1,) * len(sizes)},
        concatenate=False, name="group-sum-blocks", dtype=np.float64, n_groups=n_groups,
    )  # fmt: skip
    if not reads and len(used) < len(sizes):
        parts = parts.blocks[used]
    return known_sums(tree_sum(parts, name="group-sum", dtype=dtype), if_failed)


def known_sums(sums: da.Array, if_failed: float = np.nan) -> da.Array:
    """Return sums (..., column, checkpoint) without their counts, NaN where all samples failed."""
    index = "gfpc" if sums.ndim == 4 else "gpc"
    return blockwise(
        _known_sums, index, sums, index, adjust_chunks={"p": (sums.shape[-2] - N_COUNTS,)},
        name="known-sums", dtype=sums.dtype, if_failed=if_failed,
    )  # fmt: skip


def _known_sums(sums: Block, *, if_failed: float) -> Block:
    added, failed = sums[..., -2:-1, :], sums[..., -1:, :]
    values = sums[..., :-N_COUNTS, :]
    return np.where((added == 0) & (failed > 0), values.dtype.type(if_failed), values)


def counts_of(groups: Block, is_whole: Block, n_groups: int) -> Block:
    """Return how many samples of each group are whole, and how many failed, (group, 2)."""
    parts = (groups[is_whole], groups[~is_whole])
    return np.stack([np.bincount(part, minlength=n_groups) for part in parts], axis=1)


def _partial(codes: Any, feature: Blocks, weight: Blocks | None = None, *, n_groups: int) -> Block:
    """Return the (1, group, p + 2, 1) sums and counts of the blocks of a task."""
    groups = PackedRows.unpack(codes) - 1
    weights = itertools.repeat(None) if weight is None else flat(weight)
    total, start = None, 0
    for block, g in zip(flat(feature), weights, strict=False):
        stop = start + len(block)
        sums = _block_sums(block, g, groups[start:stop], n_groups)
        total = sums if total is None else np.add(total, sums, out=total)
        start = stop
    assert total is not None
    return total.reshape(1, *total.shape, 1)


def _block_sums(block: Block, weight: Block | None, groups: Block, n_groups: int) -> Block:
    """Return the (group, p) sums of one block, and counts behind them.

    The product is sparse, because 0 · NaN in a dense one-hot product would make all groups NaN.
    """
    x = matrix(block)
    g = np.ones(len(x)) if weight is None else weight.reshape(len(x)).astype(np.float64)
    member = np.flatnonzero(groups >= 0)
    is_whole = ~(np.isnan(g) | failed_rows(block))[member]
    counts = counts_of(groups[member], is_whole, n_groups)
    member = member[is_whole]
    entries = (g[member].astype(x.dtype), (groups[member], member))
    sums = sparse.csr_array(entries, shape=(n_groups, len(x))) @ x
    return np.concatenate([sums, counts], axis=1, dtype=np.float64)


def combine_rows(data: da.Array, weights: sparse.csr_array) -> da.Array:
    """Return Σ_i w_ki x_i for each row k of some weights.

    Parameters
    ----------
    data
        (sample, ...), float, in any chunks.
    weights
        (combination, sample), sparse. Where a weight is 0, the sample is not read into the sum,
        whatever it holds.

    Returns
    -------
    (combination, ...) in the dtype of ``data``, lazy, in one chunk along combinations.

    Notes
    -----
    Exactness: products and sums in float64, blocks added in order, rounded once at the end.

    Examples
    --------
    >>> x = da.from_array(np.array([[1.0, 2.0], [3.0, 5.0], [np.nan, 0.0]]), chunks=(2, 2))
    >>> combine_rows(x, sparse.csr_array([[-1.0, 1.0, 0.0]])).compute().tolist()
    [[2.0, 3.0]]
    """
    index = "sxyz"[: data.ndim]
    parts = blockwise(
        _combined, "sk" + index[1:], data, index, Bounds(data.chunks[0]), "s",
        new_axes={"k": weights.shape[0]}, adjust_chunks={"s": (1,) * data.numblocks[0]},
        name="combine-blocks", dtype=np.float64, weights=weights.tocsc(),
    )  # fmt: skip
    return tree_sum(parts, name="combine", dtype=data.dtype)


def weighted_sum(data: da.Array, weights: da.Array) -> da.Array:
    """Return Σ_i w_i x_i for lazy weights, as :func:`combine_rows` does for weights in memory.

    Parameters
    ----------
    data
        (sample, ...), float, in any chunks.
    weights
        (sample,), lazy. Where a weight is 0, the sample is not read into the sum.

    Returns
    -------
    (1, ...) in the dtype of ``data``, lazy.

    Examples
    --------
    >>> x = da.from_array(np.array([[1.0, 2.0], [3.0, 5.0], [np.nan, 0.0]]), chunks=(2, 2))
    >>> weighted_sum(x, da.from_array(np.array([-1.0, 1.0, 0.0]))).compute().tolist()
    [[2.0, 3.0]]
    """
    index = "sxyz"[: data.ndim]
    parts = blockwise(
        _weighted, "sk" + index[1:], data, index, weights.rechunk((data.chunks[0],)), "s",
        new_axes={"k": 1}, adjust_chunks={"s": (1,) * data.numblocks[0]},
        name="weighted-blocks", dtype=np.float64,
    )  # fmt: skip
    return tree_sum(parts, name="weighted-sum", dtype=data.dtype)


def _weighted(block: Block, weights: Block) -> Block:
    return _combined(block, (0, len(block)), weights=sparse.csc_array(weights[None]))


def _combined(block: Block, bounds: tuple[int, int], *, weights: sparse.csc_array) -> Block:
    """Return (1, combination, ...): the sums over the rows of one block."""
    of_block = weights[:, slice(*bounds)]
    sums = of_block @ block.reshape(len(block), -1).astype(np.float64)
    return np.asarray(sums).reshape(1, weights.shape[0], *block.shape[1:])
