"""Sum the features of each group of samples."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import tokenize
from scipy import sparse

from trakdask.arrays import gram
from trakdask.arrays.block_arguments import PackedRows, read_in_task
from trakdask.arrays.blocks import (
    Block,
    Blocks,
    add,
    align_weights,
    block_starts,
    blocks_with,
    failed_rows,
    flat,
    matrix,
    product_dtype,
    tree_sum,
)

__all__ = ["group_sum"]


def group_sum(
    feature: da.Array,
    weight: da.Array | None,
    codes: npt.ArrayLike,
    n_groups: int,
    *,
    pooled: bool = True,
    split_every: int = 8,
) -> da.Array:
    """Return the sum of weighted features of every group of samples.

    Σ_{z in group} mean_c[ g_c(z) ] φ_c(z). Its product with the solved targets is the sum of the
    group's scores, at the cost of one pass over the features and without computing the scores.

    Parameters
    ----------
    feature
        (sample, proj_dim, checkpoint), float, chunks (rows, p, 1).
    weight
        g, (sample, checkpoint); None for 1.
    codes
        Group of each sample, (sample,) integer in [0, n_groups), or -1 for none.
    n_groups
        Number of groups, at least 1. A group without samples sums to 0.
    pooled
        Use the mean of ``weight`` over checkpoints; if False, each checkpoint uses its own weights.
    split_every
        Fan-in of the reduction tree.

    Returns
    -------
    (group, proj_dim, checkpoint) float32 (float64 if the features are), lazy, chunks (n_groups, p,
    1). Can be passed as ``feature`` to :func:`trakdask.arrays.score.score`.

    Notes
    -----
    Cost: 2 n p C flops, memory-bound. Blocks in which no sample has a group are never read. Blocks
    that are stored are read by the task that sums them, ``split_every`` in a row. Peak memory per
    task: one block in float32 and (split_every + 1) n_groups p 8 bytes.

    Exactness: sums are float32 (as above) within a block and float64 between blocks, with the same
    bits on any scheduler for given chunks. Rows of failed samples, which are entirely NaN, and rows
    whose weight is NaN are left out; any other NaN affects only the sum of its own group.

    Examples
    --------
    >>> x = da.ones((4, 2, 1), chunks=(2, 2, 1), dtype="float32")
    >>> group_sum(x, None, [0, 1, 1, -1], 2).compute()[:, :, 0].tolist()
    [[1.0, 1.0], [2.0, 2.0]]
    """
    # From 0, which is no group: few bits hold them, and each task gets no more than those.
    groups = np.add(codes, 1, dtype=np.min_scalar_type(n_groups), casting="unsafe")
    _, p, n_checkpoint = feature.shape
    dtype = product_dtype(feature)
    used_blocks = blocks_with(groups > 0, feature.chunks[0])
    if not used_blocks:
        chunks = (n_groups, p, (1,) * n_checkpoint)
        empty: da.Array = da.zeros((n_groups, p, n_checkpoint), dtype=dtype, chunks=chunks)
        return empty
    g = None if weight is None else align_weights(weight, feature)
    if g is not None and pooled:
        g = gram.pooled(g)
    parts = _partial_sums(feature, g, groups, n_groups, used_blocks, split_every)
    finish = functools.partial(_add_as, dtype=dtype)
    return tree_sum(parts, split_every=split_every, name="group-sum", finish=finish, dtype=dtype)


def _partial_sums(
    feature: da.Array,
    weight: da.Array | None,
    groups: np.ndarray,
    n_groups: int,
    used_blocks: list[int],
    split_every: int,
) -> da.Array:
    """Return the sums of each used block, (block, group, proj_dim, checkpoint)."""
    # As many blocks as a node of the tree adds, in its order: the bits are the same.
    firsts = range(0, len(used_blocks), split_every)
    merged = [used_blocks[first : first + split_every] for first in firsts]
    read = _read_in_task(feature, weight, merged)
    sizes = feature.chunks[0]
    if read:
        sizes = tuple(sum(sizes[i] for i in blocks) for blocks in merged)
        groups = _rows_of(groups, feature.chunks[0], used_blocks)
    packed = PackedRows(groups, n_groups, sizes)
    token = tokenize(feature.name, weight, packed, n_groups)
    parts: da.Array = da.blockwise(
        _partial,
        "sgpc",
        packed,
        "s",
        *(read or _arguments(feature, weight)),
        new_axes={"g": n_groups, "p": feature.shape[1]},
        adjust_chunks={"s": (1,) * len(sizes)},
        concatenate=False,
        align_arrays=False,
        name=f"group-sum-blocks-{token}",
        dtype=np.float64,
        meta=np.empty((0,) * 4, np.float64),
        n_groups=n_groups,
    )
    if not read and len(used_blocks) < parts.numblocks[0]:
        parts = parts.blocks[used_blocks]
    return parts


def _read_in_task(
    feature: da.Array, g: da.Array | None, groups: Sequence[Sequence[int]]
) -> list[object] | None:
    """Return the arguments of tasks that read several blocks; None if they are not all stored."""
    x = read_in_task(feature, groups=groups, by_checkpoint=True)
    if g is None or x is None:
        return None if x is None else list(x)
    weight = read_in_task(g, groups=groups, by_checkpoint=g.ndim > 1)
    return None if weight is None else [*x, *weight]


def _arguments(feature: da.Array, g: da.Array | None) -> list[object]:
    return [feature, "spc", *(() if g is None else (g, "sc"[: g.ndim]))]


def _rows_of(values: Block, sizes: tuple[int, ...], blocks: Sequence[int]) -> Block:
    """Return the values of some blocks."""
    if len(blocks) == len(sizes):
        return values
    starts = block_starts(sizes)
    return np.concatenate([values[starts[i] : starts[i + 1]] for i in blocks])


def _partial(codes: Any, feature: Blocks, weight: Blocks | None = None, *, n_groups: int) -> Block:
    """Return the (1, group, p, 1) sums of the blocks of a task."""
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
    """Return the (group, p) sums of one block.

    The product is sparse, because 0 · NaN in a dense one-hot product would make all groups NaN.
    """
    x = matrix(block)
    g = np.ones(len(x)) if weight is None else weight.reshape(len(x)).astype(np.float64)
    member = np.flatnonzero((groups >= 0) & ~np.isnan(g) & ~failed_rows(block))
    entries = (g[member].astype(x.dtype), (groups[member], member))
    sums = sparse.csr_array(entries, shape=(n_groups, len(x))) @ x
    return np.asarray(sums, np.float64)


def _add_as(
    blocks: Blocks, axis: object = None, keepdims: bool = False, *, dtype: np.dtype[Any]
) -> Block:
    return add(blocks, keepdims=keepdims).astype(dtype)
