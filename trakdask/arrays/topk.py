"""The top samples of every target, without the scores ever being whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import tokenize

from trakdask.arrays.blocks import Block, Blocks, block_starts, blocks_with, flat

__all__ = ["TileMask", "top_k"]

#: (sample_start, sample_stop, target_start, target_stop) -> bool (samples, targets).
TileMask: TypeAlias = Callable[[int, int, int, int], npt.NDArray[np.bool_]]

_SPLIT_EVERY = 8
_LOW = np.int64(0xFFFFFFFF)
# What no score maps to: rows that are masked out or NaN, and padding.
_NOTHING = np.iinfo(np.int64).min


def top_k(
    score: da.Array,
    k: int,
    *,
    largest: bool = True,
    mask: npt.NDArray[np.bool_] | TileMask | None = None,
) -> tuple[da.Array, da.Array]:
    """Return the k best samples of every target, and their scores.

    Parameters
    ----------
    score
        (sample, target), float, any chunks; ranked as float32. ±inf is ranked, NaN never.
    k
        How many per target, from 1 to the number of samples; may exceed the rows of a block.
    largest
        If False, the k smallest, ascending.
    mask
        Which samples may be ranked: None for all; (sample,) bool, and blocks in which it selects
        nothing are never computed; or a function of a tile's bounds (sample_start, sample_stop,
        target_start, target_stop) that returns bool (samples, targets), called in the tasks.

    Returns
    -------
    values
        (target, k) float32, best first; NaN where fewer than k samples can be ranked.
    positions
        (target, k) int64 along the sample axis of ``score``; -1 there. Equal scores rank by
        position. Both lazy, in the target chunks of ``score``; computed together they cost once.

    Raises
    ------
    ValueError
        If k is out of range or the mask does not fit.
    TypeError
        If k is not an integer or the mask not boolean.

    Notes
    -----
    Cost: one pass over the tiles, and no more than ``score`` itself reads. The local step runs in
    the task that makes the tile, so only k numbers per block and target outlive it. Peak per task:
    the tile and 20 bytes per entry of it; in the tree 9 k targets 8 bytes.

    Exactness: exact, the same for any chunks, masks and schedulers that give the same scores.

    Examples
    --------
    >>> s = da.from_array(np.array([[1.0], [3.0], [np.nan], [3.0]]), chunks=(2, 1))
    >>> values, positions = top_k(s, 3)
    >>> values.compute().tolist(), positions.compute().tolist()
    ([[3.0, 3.0, 1.0]], [[1, 3, 0]])
    """
    _check_score(score)
    _check_k(k, score.shape[0])
    if mask is not None and not callable(mask):
        mask = _check_mask(mask, score.shape[0])
    keys = _local_keys(score, k, largest, mask)
    if keys is None:
        return _nothing_ranked(score, k)
    merge = functools.partial(_merge, k=k)
    best = da.reduction(
        keys,
        chunk=_same,
        combine=merge,
        aggregate=functools.partial(_finish, k=k),
        axis=0,
        concatenate=False,
        split_every=_SPLIT_EVERY,
        name="top-k-merge",
        dtype=np.int64,
        meta=np.empty((0,), np.int64),
    )
    return _decoded(best, k, _value, largest), _decoded(best, k, _position, largest)


def _check_score(score: da.Array) -> None:
    if not isinstance(score, da.Array) or score.ndim != 2 or score.dtype.kind != "f":
        raise TypeError(
            f"score is {score!r}; top_k needs a floating dask array (sample, target). "
            "Use score.mean(axis=2) for one with checkpoints."
        )
    if any(size != size for axis in score.chunks for size in axis):
        raise ValueError(
            f"score has unknown chunk sizes {score.chunks}; top_k needs known ones. "
            "Use score.compute_chunk_sizes()."
        )
    if score.shape[0] >= int(_LOW):
        raise NotImplementedError(
            f"score has {score.shape[0]} samples; positions are kept in 32 bits, fewer than "
            f"{int(_LOW)} are needed. Rank parts of the samples and merge them."
        )


def _check_k(k: int, n_sample: int) -> None:
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)):
        raise TypeError(f"k is {k!r}; an integer is needed. Use k=10.")
    if not 1 <= k <= n_sample:
        raise ValueError(
            f"k is {k}; 1 to {n_sample} is needed, the number of samples. "
            f"Use k={min(max(k, 1), n_sample)}."
        )


def _check_mask(mask: npt.ArrayLike, n_sample: int) -> npt.NDArray[np.bool_]:
    mask = np.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(
            f"mask has dtype {mask.dtype}; bool is needed. Use a comparison, or mask.astype(bool)."
        )
    if mask.shape != (n_sample,):
        raise ValueError(
            f"mask has shape {mask.shape}; one entry per sample is needed, ({n_sample},). "
            "Make it from the coordinates of the same scores."
        )
    return mask


def _nothing_ranked(score: da.Array, k: int) -> tuple[da.Array, da.Array]:
    shape, chunks = (score.shape[1], k), (score.chunks[1], k)
    values = da.full(shape, np.nan, dtype=np.float32, chunks=chunks)
    return values, da.full(shape, -1, dtype=np.int64, chunks=chunks)


def _local_keys(
    score: da.Array, k: int, largest: bool, mask: npt.NDArray[np.bool_] | TileMask | None
) -> da.Array | None:
    """Return each block's best keys, (rank within its block, target), or None if none is kept."""
    sizes, target_sizes = score.chunks
    arrays: list[object] = [score, "st"]
    arrays += [_positions(sizes, None if callable(mask) else mask), "s"]
    tile_mask = mask if callable(mask) else None
    if tile_mask is not None:
        arrays += [_positions(target_sizes, None), "t"]
    keys: da.Array = da.blockwise(
        _local,
        "st",
        *arrays,
        adjust_chunks={"s": tuple(min(k, size) for size in sizes)},
        align_arrays=False,
        name="top-k-local-" + tokenize(score.name, k, largest, mask),
        dtype=np.int64,
        meta=np.empty((0, 0), np.int64),
        k=k,
        largest=largest,
        mask=tile_mask,
    )
    kept = blocks_with(mask, sizes) if isinstance(mask, np.ndarray) else list(range(len(sizes)))
    if not kept:
        return None
    # Below the product's layer, so that it stays in one task with the local step.
    return keys if len(kept) == len(sizes) else keys.blocks[kept]


def _positions(sizes: tuple[int, ...], mask: npt.NDArray[np.bool_] | None) -> da.Array:
    """Return the lazy positions 0..n-1 in the given chunks, -1 where the mask is False."""
    starts = block_starts(sizes)
    selected = [] if mask is None else [da.from_array(mask, chunks=(sizes,))]
    positions: da.Array = da.map_blocks(
        _position_block,
        *selected,
        starts=starts,
        chunks=(sizes,),
        name="positions-" + tokenize(sizes, mask),
        dtype=np.int64,
        meta=np.empty((0,), np.int64),
    )
    return positions


def _position_block(
    selected: npt.NDArray[np.bool_] | None = None,
    *,
    starts: npt.NDArray[np.int64],
    block_id: tuple[int],
) -> Block:
    positions = np.arange(starts[block_id[0]], starts[block_id[0] + 1])
    return positions if selected is None else np.where(selected, positions, -1)


def _local(
    score: Blocks,
    positions: Blocks,
    targets: Blocks | None = None,
    *,
    k: int,
    largest: bool,
    mask: TileMask | None,
) -> Block:
    """Return the (min(k, rows), target) best keys of one tile, in no order."""
    (tile,), (rows,) = flat(score), flat(positions)
    keys = _keys(tile, rows, largest)
    if mask is not None and targets is not None and tile.size:
        (columns,) = flat(targets)
        keys[~_tile_mask(mask, rows, columns).T] = _NOTHING
    if len(tile) > k:
        keys.partition(len(tile) - k, axis=1)
        # A copy, or the keys of the whole tile would live as long as the best of them.
        keys = keys[:, len(tile) - k :].copy()
    return keys.T


def _keys(tile: Block, positions: Block, largest: bool) -> npt.NDArray[np.int64]:
    """Return (target, row) integers that sort as (score, -position) do.

    The high half is the float32's bits, folded so that they order as integers; one integer sort
    then ranks and breaks ties at once, and is as fast for constant scores as for any.
    """
    values = np.ascontiguousarray(tile.T, np.float32)
    # + 0 turns -0.0 into 0.0: equal scores must have equal bits.
    values = values + np.float32(0) if largest else np.float32(0) - values
    bits = values.view(np.int32)
    keys = _folded(bits).astype(np.int64)
    keys <<= 32
    keys |= _LOW - positions
    keys[np.isnan(values)] = _NOTHING
    keys[:, positions < 0] = _NOTHING
    return keys


def _folded(bits: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Swap the order of negative numbers; its own inverse."""
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


def _tile_mask(mask: TileMask, rows: Block, columns: Block) -> npt.NDArray[np.bool_]:
    bounds = (int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1)
    result = np.asarray(mask(*bounds))
    shape = (len(rows), len(columns))
    if result.shape != shape or result.dtype != bool:
        raise ValueError(
            f"mask{bounds} returned {result.dtype} of shape {result.shape}; bool of shape {shape} "
            "is needed. Broadcast it to (samples, targets) of the tile."
        )
    return result


def _same(block: Block, axis: object, keepdims: bool) -> Block:
    return block


def _merge(blocks: Blocks, axis: object = None, keepdims: bool = True, *, k: int) -> Block:
    """Return the best k of several blocks' keys, (k or fewer, target), in no order."""
    keys = np.concatenate(list(flat(blocks)))
    if len(keys) <= k:
        return keys
    by_target = np.ascontiguousarray(keys.T)
    by_target.partition(len(keys) - k, axis=1)
    return by_target[:, len(keys) - k :].copy().T


def _finish(blocks: Blocks, axis: object = None, keepdims: bool = False, *, k: int) -> Block:
    """Return (target, k) keys, best first, padded."""
    keys = np.sort(_merge(blocks, k=k).T, axis=1)[:, ::-1]
    missing = k - keys.shape[1]
    return np.pad(keys, ((0, 0), (0, missing)), constant_values=_NOTHING)


def _decoded(
    keys: da.Array, k: int, decode: Callable[[Block, bool], Block], largest: bool
) -> da.Array:
    dtype = np.dtype(np.float32 if decode is _value else np.int64)
    decoded: da.Array = da.map_blocks(
        decode,
        keys,
        largest,
        new_axis=1,
        chunks=(keys.chunks[0], (k,)),
        name=f"top-k{decode.__name__.replace('_', '-')}-" + tokenize(keys.name, largest),
        dtype=dtype,
        meta=np.empty((0, 0), dtype),
    )
    return decoded


def _value(keys: Block, largest: bool) -> Block:
    values = _folded((keys >> 32).astype(np.int32)).view(np.float32)
    # 0 - x, not -x: no score of 0 comes back as -0.0.
    values = values if largest else np.float32(0) - values
    return np.where(keys == _NOTHING, np.float32(np.nan), values)


def _position(keys: Block, largest: bool) -> Block:
    return np.where(keys == _NOTHING, -1, _LOW - (keys & _LOW))
