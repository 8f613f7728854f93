"""Find the top samples of every target without holding all scores in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import tokenize

from trakdask.arrays.block_arguments import Bounds, PackedRows, Slices, block_of, read_in_task
from trakdask.arrays.blocks import Block, Blocks, blocks_with, flat

__all__ = ["NOTHING", "TileMask", "keys_of", "top_k"]


@dataclass(frozen=True)
class TileMask:
    """A mask over samples and targets, as a function of what is known of a tile.

    Attributes
    ----------
    function
        (samples, targets, *blocks) -> bool (samples, targets). ``samples`` and ``targets`` are the
        ranges of positions of the tile, ``blocks`` the parts of ``arrays`` that belong to it.
    arrays
        Arrays in memory, each with its axes: ``"s"``, ``"t"`` or ``"st"``. Those along ``"s"`` may
        be lazy, where tasks can read them in a store, in the blocks of the scores.
    """

    function: Callable[..., npt.NDArray[np.bool_]]
    arrays: tuple[tuple[Block | da.Array, str], ...] = ()


_SPLIT_EVERY = 8
_LOW = np.int64(0xFFFFFFFF)
# The key of rows that are masked out or NaN, and of padding. No score maps to it.
NOTHING = np.iinfo(np.int64).min


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
        (sample, target), float, any chunks; ranked as float32. ±inf is ranked, NaN is not.
    k
        Number of samples per target, from 1 to all samples; may exceed the rows of a block.
    largest
        If False, return the k smallest scores in ascending order.
    mask
        Which samples may be ranked: None for all; a (sample,) bool array, in which case blocks
        without a selected sample are never computed; or a :class:`TileMask`, whose function is
        called inside the tasks.

    Returns
    -------
    values
        (target, k) float32, best first; NaN where fewer than k samples can be ranked.
    positions
        (target, k) int64, positions along the sample axis of ``score``; -1 where values are NaN.
        Equal scores are ranked by position. Both arrays are lazy, in the target chunks of
        ``score``; computing them together costs no more than computing one.

    Raises
    ------
    NotImplementedError
        If there are 2**32 samples or more.

    Notes
    -----
    Cost: one pass over the tiles, reading no more than ``score`` itself does. The local ranking
    runs in the task that computes the tile, so that only k numbers per block and target outlive
    the task. Peak memory per task: the tile and 20 bytes per entry of it; in the tree 9 k targets
    8 bytes.

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


def _nothing_ranked(score: da.Array, k: int) -> tuple[da.Array, da.Array]:
    shape, chunks = (score.shape[1], k), (score.chunks[1], k)
    values = da.full(shape, np.nan, dtype=np.float32, chunks=chunks)
    return values, da.full(shape, -1, dtype=np.int64, chunks=chunks)


def _local_keys(
    score: da.Array, k: int, largest: bool, mask: npt.NDArray[np.bool_] | TileMask | None
) -> da.Array | None:
    """Return the best keys of each block, (rank within the block, target); None without blocks."""
    sizes, target_sizes = score.chunks
    arguments: list[object] = [score, "st", Bounds(sizes), "s", Bounds(target_sizes), "t"]
    function = None
    if isinstance(mask, TileMask):
        function, chunks = mask.function, {"s": sizes, "t": target_sizes}
        for values, index in mask.arrays:
            arguments += _argument(values, index, chunks)
    elif mask is not None:
        arguments += [PackedRows(mask, 1, sizes), "s"]
    keys: da.Array = da.blockwise(
        _local,
        "st",
        *arguments,
        adjust_chunks={"s": tuple(min(k, size) for size in sizes)},
        align_arrays=False,
        name="top-k-local-" + tokenize(score.name, k, largest, function, *arguments[6::2]),
        dtype=np.int64,
        meta=np.empty((0, 0), np.int64),
        k=k,
        largest=largest,
        function=function,
    )
    used = blocks_with(mask, sizes) if isinstance(mask, np.ndarray) else list(range(len(sizes)))
    if not used:
        return None
    # Blocks are selected after the local ranking, so that dask can fuse it with the product.
    return keys if len(used) == len(sizes) else keys.blocks[used]


def _argument(
    values: Block | da.Array, index: str, chunks: Mapping[str, tuple[int, ...]]
) -> tuple[object, str]:
    if not isinstance(values, da.Array):
        return Slices(values, tuple(chunks[axis] for axis in index)), index
    stored = read_in_task(values)
    assert stored is not None, "expected lazy arrays of a tile mask in a store"
    return stored


def _local(
    score: Blocks,
    rows: tuple[int, int],
    columns: tuple[int, int],
    *masks: Any,
    k: int,
    largest: bool,
    function: Callable[..., Block] | None,
) -> Block:
    """Return the best keys of one tile, (min(k, rows), target), unsorted.

    ``masks`` are the arguments of ``function``, or the packed mask of the samples.
    """
    (tile,) = flat(score)
    keys = keys_of(tile, np.arange(*rows), largest)
    if function is not None and tile.size:
        blocks = [block_of(each) for each in masks]
        keys[~function(range(*rows), range(*columns), *blocks).T] = NOTHING
    elif masks:
        (packed,) = masks
        keys[:, PackedRows.unpack(packed) == 0] = NOTHING
    if len(tile) > k:
        keys.partition(len(tile) - k, axis=1)
        # A copy, because a view would keep the keys of the whole tile in memory.
        keys = keys[:, len(tile) - k :].copy()
    return keys.T


def keys_of(tile: Block, positions: Block, largest: bool) -> npt.NDArray[np.int64]:
    """Return (target, row) integers that sort like the pairs (score, -position).

    The upper 32 bits are those of the float32 score, folded so that they sort as integers. A single
    integer sort then ranks the scores and breaks ties, equally fast for any values.
    """
    values = np.ascontiguousarray(tile.T, np.float32)
    # Adding 0 turns -0.0 into 0.0, since equal scores must have equal bits.
    values = values + np.float32(0) if largest else np.float32(0) - values
    bits = values.view(np.int32)
    keys = _folded(bits).astype(np.int64)
    keys <<= 32
    keys |= _LOW - positions
    keys[np.isnan(values)] = NOTHING
    return keys


def _folded(bits: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Reverse the order of negative numbers; this function is its own inverse."""
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


def _same(block: Block, axis: object, keepdims: bool) -> Block:
    return block


def _merge(blocks: Blocks, axis: object = None, keepdims: bool = True, *, k: int) -> Block:
    """Return the best k keys of several blocks, (k or fewer, target), unsorted."""
    keys = np.concatenate(list(flat(blocks)))
    if len(keys) <= k:
        return keys
    by_target = np.ascontiguousarray(keys.T)
    by_target.partition(len(keys) - k, axis=1)
    return by_target[:, len(keys) - k :].copy().T


def _finish(blocks: Blocks, axis: object = None, keepdims: bool = False, *, k: int) -> Block:
    """Return (target, k) keys, best first, padded if there are fewer than k."""
    keys = np.sort(_merge(blocks, k=k).T, axis=1)[:, ::-1]
    missing = k - keys.shape[1]
    return np.pad(keys, ((0, 0), (0, missing)), constant_values=NOTHING)


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
    # 0 - x instead of -x, so that a score of 0 is not returned as -0.0.
    values = values if largest else np.float32(0) - values
    return np.where(keys == NOTHING, np.float32(np.nan), values)


def _position(keys: Block, largest: bool) -> Block:
    return np.where(keys == NOTHING, -1, _LOW - (keys & _LOW))
