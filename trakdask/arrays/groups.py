"""Sum the features of samples by group and fold, and combine rows linearly."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
from scipy import sparse

from trakdask.arrays.blocks import (
    SPLIT_EVERY,
    Block,
    Blocks,
    blocks_with,
    blockwise,
    failed_rows,
    flat,
    matrix,
    tree_sum,
)
from trakdask.arrays.graphs import grouped, packed, reader, sliced, unpacked

N_COUNTS = 2
"""Columns behind the sums of a group: how many of its entries were added up, and how many not."""


def weighted_sums(
    feature: da.Array,
    weights: da.Array,
    members: npt.NDArray[np.integer] | sparse.csr_array | None = None,
    n_groups: int = 1,
    *,
    axes: str | None = None,
    dtype: npt.DTypeLike = np.float64,
) -> da.Array:
    """Return Σ_z m_g(z) w_jc(z) φ_c(z) for every group g and fold j, in one pass over the features.

    Its product with solved targets is a sum of scores, at a cost that the targets do not change.

    Parameters
    ----------
    feature
        φ, (sample, proj_dim, checkpoint), float, chunks (rows, p, 1).
    weights
        w, with the axes ``"s"`` (samples), ``"sc"`` (of each checkpoint), ``"sf"`` (of each fold),
        or ``"sfc"``. NaN leaves a sample out of its fold.
    members
        m: the group of each sample, (sample,) integer in [0, n_groups), or -1 for none; or parts of
        samples in groups, (sample, group), sparse. None for one sum of all samples.
    n_groups
        Number of groups, at least 1. A group without samples sums to 0.
    axes
        The axes of ``weights``; by default the first ones of ``"sfc"``.
    dtype
        Of the sums.

    Returns
    -------
    (group, fold, proj_dim, checkpoint), lazy, one chunk per checkpoint, without groups if there are
    no ``members``, and without folds if ``weights`` have none. Sums of groups can be passed
    as ``feature`` to :func:`trakdask.arrays.score.score`.

    Notes
    -----
    Cost: 2 p C flops per fold and member. Blocks without members are never read. Blocks that are
    stored are read by the task that sums them, 8 in a row.
    :func:`trakdask.arrays.memory.group_sums` bounds the memory of a task.

    Exactness: products in the dtype of the features, at least float32, sums of blocks in float64,
    with the same bits on any scheduler for given chunks. Rows of failed samples, which are entirely
    NaN, and entries whose weight is NaN are left out. If these are all entries of a group, its sum
    is NaN: nothing is known of it. Any other NaN affects only the sums of its own groups.

    Examples
    --------
    >>> x = da.ones((4, 2, 1), chunks=(2, 2, 1), dtype="float32")
    >>> w = da.from_array(np.array([[1, 0], [1, 1], [0, 1], [0, 3]]))
    >>> weighted_sums(x, w).compute()[:, 0, 0]
    array([2., 5.])
    >>> weighted_sums(x, w[:, 1], np.array([0, 1, 1, -1]), 2).compute()[:, 0, 0]
    array([0., 2.])
    >>> halves = sparse.csr_array([[1], [0], [0.5], [0.5]])
    >>> weighted_sums(x, w, halves).compute()[0, :, 0, 0]
    array([1., 2.])
    """
    axes = axes or "sfc"[: weights.ndim]
    sizes, p = feature.chunks[0], feature.shape[1]
    new_axes = {"g": n_groups} if members is not None else {}
    out = "g" * (members is not None) + "f" * ("f" in axes)
    # 1. Blocks without members are not read.
    used = list(range(len(sizes)))
    if members is not None:
        if isinstance(members, sparse.csr_array):
            used = blocks_with(np.diff(members.indptr) > 0, sizes)
        else:
            used = blocks_with(members >= 0, sizes)
        if not used:
            outer = [n_groups, *weights.shape[1:2]][: len(out)]
            chunks = (*outer, p, (1,) * feature.shape[2])
            return da.zeros((*outer, p, feature.shape[2]), dtype=dtype, chunks=chunks)
        if len(used) < len(sizes):
            members = members[np.repeat(np.isin(np.arange(len(sizes)), used), sizes)]
    # 2. A task reads as many blocks as a node of the tree adds, in its order, so that the bits are
    #    those of blocks that are in memory, one for each task.
    step = SPLIT_EVERY if reader(feature) else 1
    groups = [used[i : i + step] for i in range(0, len(used), step)]
    rows = tuple(sum(sizes[i] for i in blocks) for blocks in groups)
    weights = weights.rechunk(tuple({"s": sizes, "f": -1, "c": 1}[axis] for axis in axes))
    # 3. Each task gets the members of its own rows; numbers of groups in as few bits as they need.
    of_members: Any = None
    if isinstance(members, sparse.csr_array):
        of_members = sliced(members, (rows,))
    elif members is not None:  # from 0, which is no group
        kind = np.min_scalar_type(n_groups)
        numbers = np.add(members, 1, dtype=kind, casting="unsafe")
        of_members = packed(numbers, n_groups, rows)
    parts = blockwise(
        _partial, f"s{out}pc", *grouped(feature, "spc", groups), *grouped(weights, axes, groups),
        of_members, None if members is None else "s",
        new_axes={**new_axes, "p": p + N_COUNTS * len(new_axes)},
        adjust_chunks={"s": (1,) * len(rows)},
        concatenate=False, name="weighted-sum-blocks", dtype=np.float64,
        n_groups=n_groups, axes=out,
    )  # fmt: skip
    sums = tree_sum(parts, name="weighted-sums", dtype=dtype)
    if members is None:
        return sums
    return blockwise(
        _known_sums, f"{out}pc", sums, f"{out}pc", adjust_chunks={"p": (p,)},
        name="known-sums", dtype=dtype,
    )  # fmt: skip


def _known_sums(sums: Block) -> Block:
    """Return sums (..., column, checkpoint) without their counts, NaN where all samples failed."""
    added, failed = sums[..., -2:-1, :], sums[..., -1:, :]
    unknown, nan = (added == 0) & (failed > 0), sums.dtype.type(np.nan)
    return np.where(unknown, nan, sums[..., :-N_COUNTS, :])


def _partial(feature: Blocks, weights: Blocks, members: Any, *, n_groups: int, axes: str) -> Block:
    """Return the sums, and counts behind them if there are members, of the blocks of a task."""
    w = np.concatenate([block.reshape(len(block), -1) for block in flat(weights)])
    if isinstance(members, tuple):  # numbers of groups, in bits
        codes = unpacked(members) - 1
        is_member = codes >= 0
        # A row of the matrix has one entry, or none: so this is its indptr.
        starts = np.concatenate([[0], np.cumsum(is_member)])
        entries = np.ones(starts[-1]), codes[is_member], starts
        members = sparse.csr_array(entries, shape=(len(codes), n_groups))
    total, start = None, 0
    for block in flat(feature):
        rows = slice(start, start := start + len(block))
        if members is not None:
            sums = _sums_of_members(block, w[rows], members[rows].tocoo())
        else:  # (fold, p), by a dense product
            x, failed = matrix(block), failed_rows(block)[:, None]
            known = np.where(np.isnan(w[rows]), 0, w[rows]).astype(x.dtype)
            sums = (known.T @ (np.where(failed, 0, x) if failed.any() else x)).astype(np.float64)
        total = sums if total is None else np.add(total, sums, out=total)
    assert total is not None
    outer = [{"g": n_groups, "f": w.shape[1]}[axis] for axis in axes]
    return np.asarray(total.reshape(1, *outer, -1, 1))


def _sums_of_members(block: Block, weights: Block, members: sparse.coo_array) -> Block:
    """Return the (group · fold, p) sums of one block, and how many entries are whole, and failed.

    The product is sparse, because 0 · NaN in a dense product would make all groups NaN.
    """
    x, n_folds = matrix(block), weights.shape[1]
    n_rows = members.shape[1] * n_folds
    row = members.col.astype(np.intp)[:, None] * n_folds + np.arange(n_folds)
    # (entry, fold), and so is `row`, the place of each in the sums.
    values = members.data[:, None] * weights[members.row]
    whole = ~(np.isnan(values) | failed_rows(block)[members.row][:, None])
    counts = np.stack([np.bincount(row[some], minlength=n_rows) for some in (whole, ~whole)], 1)
    sample = np.broadcast_to(members.row[:, None], row.shape)[whole]
    entries = values[whole].astype(x.dtype), (row[whole], sample)
    sums = sparse.csr_array(entries, shape=(n_rows, len(x))) @ x
    return np.concatenate([sums, counts], axis=1, dtype=np.float64)


def combine_rows(data: da.Array, weights: sparse.csr_array | da.Array) -> da.Array:
    """Return Σ_i w_ki x_i for each row k of some weights.

    Parameters
    ----------
    data
        (sample, ...), float, in any chunks.
    weights
        (combination, sample), sparse; or lazy (sample,) for one combination. Where a weight is 0,
        the sample is not read into the sum, whatever it holds.

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
    index, sizes = "sxyz"[: data.ndim], data.chunks[0]
    if isinstance(weights, da.Array):
        n, of_rows = 1, weights.rechunk((sizes,))
    else:
        n, of_rows = weights.shape[0], sliced(weights.T.tocsr(), (sizes,))
    parts = blockwise(
        _combined, "sk" + index[1:], data, index, of_rows, "s",
        new_axes={"k": n}, adjust_chunks={"s": (1,) * len(sizes)},
        name="combine-blocks", dtype=np.float64,
    )  # fmt: skip
    return tree_sum(parts, name="combine", dtype=data.dtype)


def _combined(block: Block, weights: Block | sparse.csr_array) -> Block:
    """Return (1, combination, ...): the sums over the rows of one block."""
    if isinstance(weights, np.ndarray):  # zeros among them would be multiplied with NaN
        weights = sparse.csr_array(weights[:, None])
    sums = weights.T @ block.reshape(len(block), -1).astype(np.float64)
    return np.asarray(sums).reshape(1, -1, *block.shape[1:])
