"""Find the top samples of every target, or of all together, without holding all scores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt

from trakdask.arrays.blocks import Block, Blocks, block_of, blocks_with, blockwise, flat, tree
from trakdask.arrays.graphs import bounds, packed, read_in_task, sliced, unpacked


@dataclass(frozen=True)
class TileMask:
    """A mask over samples and targets, as a function of a tile.

    Attributes
    ----------
    function
        (samples, targets, *blocks) -> bool (samples, targets). ``samples`` and ``targets`` are the
        ranges of positions of the tile, ``blocks`` the parts of ``arrays`` that belong to it.
    arrays
        Arrays in memory, each with its axes: ``"s"``, ``"t"`` or ``"st"``. Those along ``"s"`` may
        be lazy, in the blocks of the scores.
    """

    function: Callable[..., npt.NDArray[np.bool_]]
    arrays: tuple[tuple[Block | da.Array, str], ...] = ()


_LOW = np.int64(0xFFFFFFFF)
# The key of rows that are masked out or NaN, and of padding. No score maps to it.
_NOTHING = np.iinfo(np.int64).min


def top_k(
    score: da.Array,
    k: int,
    *,
    largest: bool = True,
    mask: npt.NDArray[np.bool_] | TileMask | None = None,
    others: Sequence[da.Array] = (),
) -> tuple[da.Array, ...]:
    """Return the k best samples of every target, and their scores.

    Parameters
    ----------
    score
        (sample, target), float, any chunks; ranked as float32. ±inf is ranked, NaN is not.
    k
        Number of samples per target, from 1 to all samples; may exceed the rows of a block.
    largest
        If False, return the k smallest scores in ascending order.
    mask
        Which samples may be ranked: None for all; a (sample,) bool array, in which case blocks
        without a selected sample are never computed; or a :class:`TileMask`, whose function is
        called inside the tasks.
    others
        More numbers of each sample and target, in the blocks of ``score``, to be returned for the
        best samples. They accompany the keys through the tree, so that the tiles are computed once.

    Returns
    -------
    values
        (target, k) float32, best first; NaN where fewer than k samples can be ranked.
    positions
        (target, k) int64, positions along the sample axis of ``score``; -1 where values are NaN.
        Equal scores are ranked by position. Both arrays are lazy, in the target chunks of
        ``score``; computing them together costs no more than computing one.
    *others
        (target, k) float32 for each of ``others``.

    Raises
    ------
    NotImplementedError
        If there are 2**32 samples or more.

    Notes
    -----
    Cost: one pass over the tiles, reading no more than ``score`` itself does. The local ranking
    runs in the task that computes the tile, so that only k numbers per block and target outlive
    the task, whose memory :func:`trakdask.arrays.memory.top_k` bounds.

    Exactness: exact, and the same for any chunks, masks and schedulers with equal scores.

    Examples
    --------
    >>> s = da.from_array(np.array([[1.0], [3.0], [np.nan], [3.0]]), chunks=(2, 1))
    >>> values, positions = top_k(s, 3)
    >>> values.compute().tolist(), positions.compute().tolist()
    ([[3.0, 3.0, 1.0]], [[1, 3, 0]])
    """
    if score.shape[0] >= int(_LOW):
        raise NotImplementedError(
            f"expected fewer than {int(_LOW)} samples, as positions are stored in 32 bits, got "
            f"{score.shape[0]}; try ranking subsets of the samples and merging the results"
        )
    sizes, target_sizes = score.chunks
    # 1. Other numbers, and the mask, of which each task gets the part of its tile.
    chunks = {"s": sizes, "t": target_sizes}
    arguments: list[object] = [item for other in others for item in (other, "st")]
    if isinstance(mask, TileMask):
        for values, index in mask.arrays:
            if isinstance(values, da.Array):
                arguments += read_in_task(values) or (values, index)
            else:
                arguments += sliced(values, tuple(chunks[axis] for axis in index)), index
    elif mask is not None:
        arguments += [packed(mask, 1, sizes), "s"]
    # 2. The best keys of each block, (rank within the block, target).
    keys = blockwise(
        _local, "st", score, "st", bounds(sizes), "s", bounds(target_sizes), "t", *arguments,
        adjust_chunks={"s": tuple(min(k, size) for size in sizes)},
        name="top-k-local", dtype=_with_others(len(others)) if others else np.int64,
        k=k, largest=largest, n_others=len(others),
        mask_of=mask.function if isinstance(mask, TileMask) else None,
    )  # fmt: skip
    used = blocks_with(mask, sizes) if isinstance(mask, np.ndarray) else list(range(len(sizes)))
    if not used:
        values = da.full((score.shape[1], k), np.nan, dtype=np.float32, chunks=(target_sizes, k))
        return values, da.full_like(values, -1, dtype=np.int64), *[values] * len(others)
    if len(used) < len(sizes):
        # Blocks are selected after the local ranking, so that dask can fuse it with the product.
        keys = keys.blocks[used]
    # 3. The best of all blocks, and what their keys say.
    merge, finish = functools.partial(_merge, k=k), functools.partial(_finish, k=k)
    best = tree(keys, merge, finish, name="top-k-merge", dtype=keys.dtype)
    decoders: list[tuple[Any, str]] = [
        (functools.partial(_value, largest=largest), "f4"),
        (_position, "i8"),
        *((functools.partial(_other, i=i), "f4") for i in range(len(others))),
    ]
    return tuple(
        blockwise(decode, "tk", best, "t", new_axes={"k": k}, name="top-k", dtype=dtype)
        for decode, dtype in decoders
    )


def _local(
    score: Blocks,
    rows: tuple[slice],
    columns: tuple[slice],
    *arguments: Any,
    k: int,
    largest: bool,
    n_others: int,
    mask_of: Callable[..., Block] | None,
) -> Block:
    """Return the best keys of one tile, (min(k, rows), target), unsorted.

    ``arguments`` are other tiles, and then the arguments of ``mask_of``, or the packed mask of the
    samples.
    """
    (tile,), (row,), (column,) = flat(score), rows, columns
    others, masks = arguments[:n_others], arguments[n_others:]
    keys = _keys_of(tile, np.arange(row.start, row.stop), largest)
    if mask_of is not None and tile.size:
        blocks = [block_of(mask) for mask in masks]
        at = range(row.start, row.stop), range(column.start, column.stop)
        keys[~mask_of(*at, *blocks).T] = _NOTHING
    elif masks:
        keys[:, unpacked(masks[0]) == 0] = _NOTHING
    if others:
        candidates = np.empty(tile.shape, _with_others(n_others))
        candidates["key"] = keys.T
        for i, other in enumerate(others):
            candidates["others"][..., i] = block_of(other)
        return _merge(candidates, k=k)
    if len(tile) > k:
        keys.partition(len(tile) - k, axis=1)
        # A copy, because a view would keep the keys of the whole tile in memory.
        keys = keys[:, len(tile) - k :].copy()
    return keys.T


def _keys_of(tile: Block, positions: Block, largest: bool) -> npt.NDArray[np.int64]:
    """Return (target, row) integers that sort like the pairs (score, -position).

    The upper 32 bits hold the float32 score, folded so that they sort as integers. A single integer
    sort then ranks the scores and breaks ties, equally fast for any values.
    """
    values = np.ascontiguousarray(tile.T, np.float32)
    # Adding 0 turns -0.0 into 0.0, since equal scores must have equal bits.
    values = values + np.float32(0) if largest else np.float32(0) - values
    bits = values.view(np.int32)
    keys = _folded(bits).astype(np.int64)
    keys <<= 32
    keys |= _LOW - positions
    keys[np.isnan(values)] = _NOTHING
    return keys


def _folded(bits: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Reverse the order of negative numbers; this function is its own inverse."""
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


def _merge(blocks: Blocks, axis: object = None, keepdims: bool = True, *, k: int) -> Block:
    """Return the best k keys of several blocks, (k or fewer, target), unsorted."""
    keys = np.concatenate(list(flat(blocks)))
    if len(keys) <= k:
        return keys
    if keys.dtype.names:
        order = np.argpartition(keys["key"], len(keys) - k, axis=0)[len(keys) - k :]
        return np.take_along_axis(keys, order, axis=0)
    by_target = np.ascontiguousarray(keys.T)
    by_target.partition(len(keys) - k, axis=1)
    return by_target[:, len(keys) - k :].copy().T


def _finish(blocks: Blocks, axis: object = None, keepdims: bool = False, *, k: int) -> Block:
    """Return (target, k) keys, best first, padded if there are fewer than k."""
    keys = _merge(blocks, k=k).T
    order = np.argsort(_keys_alone(keys), axis=1)[:, ::-1]
    padding = np.zeros((len(keys), k - keys.shape[1]), keys.dtype)
    _keys_alone(padding)[...] = _NOTHING  # a view of the field
    return np.concatenate([np.take_along_axis(keys, order, axis=1), padding], axis=1)


def _with_others(n: int) -> np.dtype[Any]:
    """Return the dtype of a key with n more numbers."""
    return np.dtype([("key", np.int64), ("others", np.float32, (n,))])


def _keys_alone(keys: Block) -> Block:
    return keys["key"] if keys.dtype.names else keys


def _other(keys: Block, *, i: int) -> Block:
    return np.where(keys["key"] == _NOTHING, np.float32(np.nan), keys["others"][..., i])


def _value(keys: Block, *, largest: bool) -> Block:
    keys = _keys_alone(keys)
    values = _folded((keys >> 32).astype(np.int32)).view(np.float32)
    # 0 - x instead of -x, so that a score of 0 is not returned as -0.0.
    values = values if largest else np.float32(0) - values
    return np.where(keys == _NOTHING, np.float32(np.nan), values)


def _position(keys: Block) -> Block:
    keys = _keys_alone(keys)
    return np.where(keys == _NOTHING, -1, _LOW - (keys & _LOW))


def among_best(
    score: da.Array, codes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> da.Array:
    """Return which samples are among the best of their group.

    Parameters
    ----------
    score
        (sample,) float, ranked as float32; NaN is never among the best.
    codes
        Group of each sample, -1 for none.
    counts
        How many samples to take of each group.

    Returns
    -------
    (sample,) bool, lazy, in the chunks of ``score``. The first of equal scores are taken.

    Notes
    -----
    Exact, and the same for any chunks.

    Examples
    --------
    >>> score = da.from_array(np.array([1.0, 3.0, 2.0, 3.0]), chunks=2)
    >>> among_best(score, np.array([0, 0, 1, 0]), np.array([1, 1])).compute().tolist()
    [False, True, True, False]
    """
    dtype = np.min_scalar_type(len(counts))  # codes may come in a dtype that has no room for more
    from_1 = np.add(codes, 1, dtype=dtype, casting="unsafe")
    numbers, rows = packed(from_1, len(counts), score.chunks[0]), bounds(score.chunks[0])
    samples = (score, "s", numbers, "s", rows, "s")
    candidates = blockwise(
        _candidates, "s", *samples, adjust_chunks={"s": (1,) * score.numblocks[0]},
        name="among-best-local", dtype=object, counts=counts,
    )  # fmt: skip
    merge = functools.partial(_merged_candidates, counts=counts)
    finish = functools.partial(_thresholds, counts=counts)
    thresholds = tree(candidates, merge, finish, name="among-best-merge", dtype=object)
    return blockwise(_reaches, "s", *samples, thresholds, "", name="among-best", dtype=bool)


def _candidates(
    score: Block, codes: Any, rows: tuple[slice], *, counts: npt.NDArray[np.int64]
) -> Block:
    """Return (1,): the groups and keys of the samples of a block that may be taken."""
    groups, keys = _groups_and_keys(score, codes, rows)
    ranked = (groups >= 0) & (keys != _NOTHING)
    return _in_a_box(_best_of_groups(groups[ranked], keys[ranked], counts))


def _groups_and_keys(score: Block, codes: Any, rows: tuple[slice]) -> tuple[Block, Block]:
    positions = np.arange(rows[0].start, rows[0].stop)
    return unpacked(codes) - 1, _keys_of(score[:, None], positions, True)[0]


def _best_of_groups(groups: Block, keys: Block, counts: Block) -> tuple[Block, Block]:
    """Keep the best keys of each group, best first, group by group."""
    order = np.lexsort((~keys, groups))
    groups, keys = groups[order], keys[order]
    starts = np.searchsorted(groups, np.arange(len(counts)))
    kept = np.arange(len(groups)) - starts[groups] < counts[groups]
    return groups[kept], keys[kept]


def _in_a_box(value: object) -> Block:
    box = np.empty(1, object)
    box[0] = value
    return box


def _merged_candidates(
    blocks: Blocks, axis: object = None, keepdims: bool = True, *, counts: Block
) -> Block:
    pairs = [block[0] for block in flat(blocks)]
    groups, keys = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return _in_a_box(_best_of_groups(groups, keys, counts))


def _thresholds(
    blocks: Blocks, axis: object = None, keepdims: bool = False, *, counts: Block
) -> Block:
    """Return the key of the last sample to take of each group, as one object without axes."""
    groups, keys = _merged_candidates(blocks, counts=counts)[0]
    last = np.full(len(counts), np.iinfo(np.int64).max)
    last[groups] = keys  # the last one of a group is assigned last
    return _in_a_box(last).reshape(())


def _reaches(score: Block, codes: Any, rows: tuple[slice], thresholds: Block) -> Block:
    groups, keys = _groups_and_keys(score, codes, rows)
    return (groups >= 0) & (keys != _NOTHING) & (keys >= thresholds[()][groups])
