"""Find the best share of the samples of each group without holding a score of all of them."""

from __future__ import annotations

import functools

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import tokenize

from trakdask.arrays.block_arguments import Bounds, PackedRows
from trakdask.arrays.blocks import Block, Blocks, flat
from trakdask.arrays.topk import NOTHING, keys_of

__all__ = ["among_best"]

_SPLIT_EVERY = 8


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
    (sample,) bool, lazy, in the chunks of ``score``. Of equal scores the first are taken.

    Notes
    -----
    Exact, and the same for any chunks. Memory of a task: its block, and in the tree 8 bytes for
    each sample that may still be taken.

    Examples
    --------
    >>> score = da.from_array(np.array([1.0, 3.0, 2.0, 3.0]), chunks=2)
    >>> among_best(score, np.array([0, 0, 1, 0]), np.array([1, 1])).compute().tolist()
    [False, True, True, False]
    """
    dtype = np.min_scalar_type(len(counts))  # codes may come in a dtype that has no room for more
    from_1 = np.add(codes, 1, dtype=dtype, casting="unsafe")
    packed = PackedRows(from_1, len(counts), score.chunks[0])
    place = (score, "s", packed, "s", Bounds(score.chunks[0]), "s")
    token = tokenize(score.name, packed, counts)
    local = da.blockwise(
        functools.partial(_local, counts=counts), "s", *place,
        adjust_chunks={"s": (1,) * score.numblocks[0]}, align_arrays=False,
        dtype=object, meta=np.empty(0, object), name=f"top-fraction-local-{token}",
    )  # fmt: skip
    best = da.reduction(
        local,
        chunk=_same,
        combine=functools.partial(_merged, counts=counts),
        aggregate=functools.partial(_thresholds, counts=counts),
        axis=0,
        concatenate=False,
        split_every=_SPLIT_EVERY,
        name=f"top-fraction-merge-{token}",
        dtype=object,
        meta=np.empty((), object),
    )
    is_best: da.Array = da.blockwise(
        _reaches, "s", *place, best, "",
        align_arrays=False, dtype=bool, meta=np.empty(0, bool), name=f"top-fraction-{token}",
    )  # fmt: skip
    return is_best


def _local(
    score: Block, codes: object, bounds: tuple[int, int], *, counts: npt.NDArray[np.int64]
) -> Block:
    """Return the candidates of a block, as one object."""
    groups, keys = _groups_and_keys(score, codes, bounds)
    ranked = (groups >= 0) & (keys != NOTHING)
    return _as_object(_cut(groups[ranked], keys[ranked], counts))


def _groups_and_keys(score: Block, codes: object, bounds: tuple[int, int]) -> tuple[Block, Block]:
    groups = PackedRows.unpack(codes) - 1  # type: ignore[arg-type]
    return groups, keys_of(score[:, None], np.arange(*bounds), True)[0]


def _cut(groups: Block, keys: Block, counts: Block) -> tuple[Block, Block]:
    """Keep the best keys of each group, best first, group by group."""
    order = np.lexsort((~keys, groups))
    groups, keys = groups[order], keys[order]
    starts = np.searchsorted(groups, np.arange(len(counts)))
    kept = np.arange(len(groups)) - starts[groups] < counts[groups]
    return groups[kept], keys[kept]


def _as_object(value: object) -> Block:
    box = np.empty(1, object)
    box[0] = value
    return box


def _same(block: Block, axis: object, keepdims: bool) -> Block:
    return block


def _merged(blocks: Blocks, axis: object = None, keepdims: bool = True, *, counts: Block) -> Block:
    pairs = [block[0] for block in flat(blocks)]
    groups, keys = (np.concatenate(each) for each in zip(*pairs, strict=True))
    return _as_object(_cut(groups, keys, counts))


def _thresholds(
    blocks: Blocks, axis: object = None, keepdims: bool = False, *, counts: Block
) -> Block:
    """Return the key of the last sample to take of each group, as one object without axes."""
    groups, keys = _merged(blocks, counts=counts)[0]
    last = np.full(len(counts), np.iinfo(np.int64).max)
    last[groups] = keys  # the last one of a group is assigned last
    box = np.empty((), object)
    box[()] = last
    return box


def _reaches(score: Block, codes: object, bounds: tuple[int, int], best: Block) -> Block:
    groups, keys = _groups_and_keys(score, codes, bounds)
    is_best: Block = (groups >= 0) & (keys != NOTHING) & (keys >= best[()][groups])
    return is_best
