"""Blocks of arrays: their shapes, sums over trees of them, and layers that take them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import tokenize

Block: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float64]
Read: TypeAlias = Callable[[tuple[Any, ...]], Block]
"""Reads what slices select, of a block, or positions along the only axis."""


@dataclass(frozen=True)
class Unread:
    """Blocks that the task which gets them reads itself, one at a time, as :func:`flat` does.

    Attributes
    ----------
    read
        Returns the part of the stored array that slices select.
    keys
        The slices of each block.
    n_rows
        Rows of all blocks of one checkpoint.
    """

    read: Read
    keys: tuple[tuple[slice, ...], ...]
    n_rows: int


#: A block, or the nested lists of blocks that dask passes along contracted axes, or unread blocks.
Blocks: TypeAlias = "Block | list[Any] | Unread"

SPLIT_EVERY = 8
"""Blocks that a node of a tree takes: a task holds one more of the partial results."""

_MOST_GROUPS = 4096
"""Groups of blocks along samples. A scheduler takes about a millisecond for each of its tasks."""


def blockwise(
    function: Callable[..., Any],
    out: str,
    *arguments: Any,
    name: str,
    dtype: npt.DTypeLike,
    **options: Any,
) -> da.Array:
    """Return :func:`dask.array.blockwise` under a name that depends on all of its arguments.

    Chunks are taken as they are, and the function is not tried out on empty blocks. Functions of
    ``map_blocks`` would be, and lists of blocks along contracted axes would be concatenated there.
    """
    prepared = []
    for array, index in zip(arguments[::2], arguments[1::2], strict=True):
        # Features and matrices in chunks of one checkpoint: a task reads the first of its block.
        if isinstance(array, da.Array) and "p" in index[:-1] and index[-1] == "c":
            array = array.rechunk({array.ndim - 1: 1})
        if hasattr(array, "expr"):  # Dask would change the chunks of expressions later
            array = type(array)(array.expr.lower_completely())
        prepared += [array, index]
    return da.blockwise(
        function,
        out,
        *prepared,
        name=f"{name}-{tokenize(function, out, arguments, options)}",
        align_arrays=False,
        dtype=dtype,
        meta=np.empty((0,) * len(out), dtype),
        **options,
    )


def where(condition: Any, x: Any, y: Any) -> da.Array:
    """Return :func:`dask.array.where`, which Dask lacks with array.query-planning."""
    elemwise = getattr(da, "elemwise", da.core.elemwise)
    return elemwise(np.where, condition, x, y)


def field(array: da.Array, name: str) -> da.Array:
    """Return a field, a number or (g,), of the only entry of a structured array (1,)."""
    dtype = array.dtype[name]
    return blockwise(
        _field, "g" * len(dtype.shape), array, "k",
        # A field that is one number has no axis.
        new_axes=dict(zip("g", dtype.shape, strict=False)),
        concatenate=True, name="field", dtype=dtype.base, key=name,
    )  # fmt: skip


def _field(block: Block, *, key: str) -> Block:
    return np.asarray(block[key][0])


def align_weights(weights: da.Array, feature: da.Array) -> da.Array:
    """Return (sample, checkpoint) weights in the sample chunks of ``feature`` and chunks of 1."""
    return weights.rechunk((feature.chunks[0], 1), method="tasks")


def flat(blocks: Blocks) -> Iterator[Block]:
    """Yield the blocks of nested lists in order; unread ones are read when it is their turn.

    >>> [int(x) for x in flat([[1, 2], [3]])]
    [1, 2, 3]
    """
    if isinstance(blocks, list):
        for item in blocks:
            yield from flat(item)
    elif isinstance(blocks, Unread):
        for key in blocks.keys:
            yield blocks.read(key)
    else:
        yield blocks


def product_dtype(*arrays: da.Array | Block) -> np.dtype[Any]:
    """Return the dtype of products: float64 if a factor is float64, else float32.

    Examples
    --------
    >>> product_dtype(np.ones(1, np.float16)), product_dtype(np.ones(1), np.ones(1, "f4"))
    (dtype('float32'), dtype('float64'))
    """
    return np.result_type(np.float32, *(array.dtype for array in arrays))


def matrix(blocks: Blocks) -> Block:
    """Return the single (rows, p, 1) block as a (rows, p) matrix, without a copy if possible."""
    (block,) = flat(blocks)
    return block[:, :, 0].astype(product_dtype(block), copy=False)


def failed_rows(block: Block) -> npt.NDArray[np.bool_]:
    """Return which rows of (rows, p, 1) are entirely NaN, as the rows of failed samples are.

    A row that is only partly NaN does not count as failed: it indicates another problem.

    >>> failed_rows(np.array([[[np.nan], [np.nan]], [[np.nan], [1.0]]])).tolist()
    [True, False]
    """
    failed = np.isnan(block[:, 0, 0])  # rules out nearly all rows at 1/p of the cost
    if failed.any():
        failed[failed] = np.isnan(block[failed]).all(axis=(1, 2))
    return failed


def mean_weight(weights: Blocks) -> Block:
    """Return the mean over checkpoints of (rows, 1) blocks as float64 (rows,)."""
    columns = [block[:, 0] for block in flat(weights)]
    return np.asarray(np.mean(columns, axis=0, dtype=np.float64))


def tree(
    parts: da.Array,
    combine: Callable[..., Block],
    finish: Callable[..., Block],
    *,
    name: str,
    dtype: npt.DTypeLike,
) -> da.Array:
    """Reduce blocks along axis 0 by a tree whose nodes take 8 in list order; the last finishes."""
    return da.reduction(
        parts,
        chunk=_same,
        combine=combine,
        aggregate=finish,
        axis=0,
        concatenate=False,
        split_every=SPLIT_EVERY,
        name=name,
        dtype=dtype,
        meta=np.empty((0,) * (parts.ndim - 1), dtype),
    )


def _same(block: Block, axis: Any, keepdims: bool) -> Block:
    return block


def tree_sum(parts: da.Array, *, name: str, dtype: npt.DTypeLike) -> da.Array:
    """Return the sum over blocks of size 1 along axis 0, rounded to ``dtype`` at the end."""
    finish = functools.partial(add, rounded_to=np.dtype(dtype))
    return tree(parts, add, finish, name=name, dtype=dtype)


def add(
    blocks: Blocks,
    axis: Any = None,
    keepdims: bool = False,
    *,
    rounded_to: np.dtype[Any] | None = None,
) -> Block:
    """Return the sum of blocks in list order, without concatenating them."""
    remaining = flat(blocks)
    total = first = next(remaining)
    for block in remaining:
        # The scheduler owns the blocks and may pass them to another task, too.
        total = np.add(total, block, out=None if total is first else total)
    dtype = total.dtype if rounded_to is None else rounded_to
    if not len(total):  # Dask tries it out on nothing, with array.query-planning
        keepdims = True
    return (total if keepdims else total[0]).astype(dtype, copy=False)


def block_starts(sizes: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the start of each chunk, followed by the end of the last one.

    >>> block_starts((3, 2)).tolist()
    [0, 3, 5]
    """
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def blocks_with(selected: npt.NDArray[np.bool_], sizes: tuple[int, ...]) -> list[int]:
    """Return the indices of the blocks in which any sample is selected.

    >>> blocks_with(np.array([True, False, False]), (1, 2))
    [0]
    """
    bounds = itertools.pairwise(block_starts(sizes))
    return [i for i, (start, stop) in enumerate(bounds) if selected[start:stop].any()]


def divided(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the sizes of chunks after chunks of more than ``most`` entries were divided.

    >>> divided((3, 5, 0), 4)
    (3, 4, 1, 0)
    """
    # An empty chunk stays one: tasks go by the number of chunks.
    return tuple(
        min(most, size - start) for size in sizes for start in range(0, max(size, 1), most)
    )


def take(results: Any, key: Any) -> Any:
    """Return one of the arrays that a task computed together, by position or by name.

    Not ``operator.getitem``, which the optimizer of Dask takes for a slice of an array.
    """
    return results[key]


def block_of(argument: Block | Unread) -> Block:
    """Return the block that a task got as an argument, or is to read."""
    (block,) = flat(argument)
    return block


def coarse_groups(n_blocks: int) -> list[range]:
    """Return consecutive blocks for tasks of a layer: each one alone, unless there are many.

    Examples
    --------
    >>> coarse_groups(3)
    [range(0, 1), range(1, 2), range(2, 3)]
    >>> len(coarse_groups(24_415))
    4070
    """
    size = -(-n_blocks // _MOST_GROUPS) if n_blocks else 1
    return [range(i, min(i + size, n_blocks)) for i in range(0, n_blocks, size)]
