"""Blocks of arrays: tasks get them as arguments, or read them themselves.

For most arrays, Dask makes one task per block, whose result stays in memory until all tasks that
need it have run: all features, if λ is to be chosen before they are scored. It is better to read a
block of a store again. :func:`reader` says whether that is possible.

This is the one module that knows how Dask keeps graphs; others call functions of ``dask.array``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import uuid4

import dask
import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import is_dask_collection, tokenize
from dask.blockwise import Blockwise
from dask.core import flatten
from dask.layers import ArrayBlockwiseDep
from scipy import sparse

if dask.config.get("array.query-planning", None):
    raise ImportError(
        "expected Dask with array.query-planning off, since its own arrays of expressions lack "
        "functions such as store and where; try DASK_ARRAY__QUERY_PLANNING=False, or the package "
        "dask-array, whose dask_array.xarray.register() trakdask works with"
    )

Block: TypeAlias = npt.NDArray[Any]
Chunks: TypeAlias = tuple[tuple[int, ...], ...]
Key: TypeAlias = tuple[Any, ...]
"""Slices of a block, or positions along the only axis."""
Read: TypeAlias = Callable[[Key], Block]


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
    keys: tuple[Key, ...]
    n_rows: int


#: A block, or the nested lists of blocks that dask passes along contracted axes, or unread blocks.
Blocks: TypeAlias = "Block | list[Any] | Unread"

SPLIT_EVERY = 8
"""Blocks that a node of a tree takes: a task holds one more of the partial results."""

_COLUMN_BYTES = 2**26
"""The size of a chunk that holds all scores of some targets."""

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
    array: da.Array = da.blockwise(
        function,
        out,
        *arguments,
        name=f"{name}-{tokenize(function, out, arguments, options)}",
        align_arrays=False,
        dtype=dtype,
        meta=np.empty((0,) * len(out), dtype),
        **options,
    )
    return array


def plain(array: Any) -> Any:
    """Return a lazy array as one of Dask, with the same tasks; others as they are.

    If the package dask-array has taken Dask's place in xarray, it makes the arrays of xarray.
    """
    if isinstance(array, da.Array) or not is_dask_collection(array):
        return array
    name = next(iter(flatten(array.__dask_keys__())))[0]
    return da.Array(dict(array.__dask_graph__()), name, array.chunks, meta=array._meta)


def graph_of(array: da.Array, keys: Sequence[Any]) -> Any:
    """Return the tasks of some blocks of an array, as few as fusing leaves.

    Dask would fuse less of a selection, such as ``array.blocks`` returns.
    """
    return da.optimize(array.dask, keys)


def align_weights(weights: da.Array, feature: da.Array) -> da.Array:
    """Return (sample, checkpoint) weights in the sample chunks of ``feature`` and chunks of 1."""
    aligned: da.Array = weights.rechunk((feature.chunks[0], 1), method="tasks")
    return aligned


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
    result: da.Array = da.reduction(
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
    return result


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


def whole_columns(score: da.Array) -> da.Array:
    """Return scores (sample, target, ...) in chunks of all samples and few targets, lazy.

    A chunk has no more targets than it had before, and at most 64 MB unless one target has more.

    Examples
    --------
    >>> whole_columns(da.zeros((6, 4), chunks=(2, 3))).chunks
    ((6,), (3, 1))
    """
    column = score.shape[0] * score.itemsize * math.prod(score.chunksize[2:])
    most = max(1, _COLUMN_BYTES // max(column, 1))
    columns: da.Array = score.rechunk({0: -1, 1: divided(score.chunks[1], most)})
    return columns


def divided(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the sizes of chunks after chunks of more than ``most`` entries were divided.

    >>> divided((3, 5, 0), 4)
    (3, 4, 1, 0)
    """
    return tuple(
        min(most, size - start) for size in sizes for start in range(0, max(size, 1), most)
    )


def take(results: Any, key: Any) -> Any:
    """Return one of the arrays that a task computed together, by position or by name.

    Not ``operator.getitem``, which the optimizer of Dask takes for a slice of an array.
    """
    return results[key]


# ------------------------------------------------------------------------- arguments of tasks


class _Arguments(ArrayBlockwiseDep):
    """An argument of ``blockwise``: each task gets its part, so that no task grows.

    Dask asks for the part of one block at a time, when it turns a layer into tasks. Until then a
    graph holds the object itself, once.
    """

    def __init__(self, chunks: Chunks, token: object) -> None:
        super().__init__(chunks)
        self.token = token
        self.starts = [block_starts(sizes).tolist() for sizes in chunks]

    def slices(self, index: tuple[int, ...]) -> tuple[slice, ...]:
        """Return where a block is."""
        pairs = zip(self.starts, index, strict=True)
        return tuple(slice(starts[i], starts[i + 1]) for starts, i in pairs)

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return type(self).__name__, self.token, self.chunks


class Bounds(_Arguments):
    """The first position of each block along an axis, and the position after its last.

    Examples
    --------
    >>> Bounds((3, 2))[(1,)]
    (3, 5)
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__((sizes,), None)

    def __getitem__(self, index: tuple[int, ...]) -> tuple[int, int]:
        (here,) = self.slices(index)
        return here.start, here.stop


class Labels(_Arguments):
    """A text for each checkpoint, of chunks of one checkpoint.

    Examples
    --------
    >>> Labels(["c0", "c1"])[(1,)]
    'c1'
    """

    def __init__(self, labels: Sequence[object]) -> None:
        self.labels = tuple(map(str, labels))
        super().__init__(((1,) * len(labels),), self.labels)

    def __getitem__(self, index: tuple[int, ...]) -> str:
        return self.labels[index[0]]


class Slices(_Arguments):
    """The blocks of an array in memory: a graph has the array once, and each task its block.

    Examples
    --------
    >>> Slices(np.arange(5), ((3, 2),))[(1,)].tolist()
    [3, 4]
    """

    def __init__(self, values: Block, chunks: Chunks) -> None:
        # Hashing the values could take longer than everything else that builds a graph.
        super().__init__(chunks, uuid4().hex)
        self.values = values

    def __getitem__(self, index: tuple[int, ...]) -> Block:
        block: Block = self.values[self.slices(index)]
        return block


class PackedRows(_Arguments):
    """The blocks of integers from 0 to ``most``, in as few bits as they need.

    At 10⁸ samples a mask takes 12.5 MB and the numbers of 7 groups 37.5 MB, in place of 100 and
    800. :meth:`unpack` turns the argument of a task into integers again.

    Examples
    --------
    >>> rows = PackedRows(np.array([3, 0, 1]), 3, (2, 1))
    >>> PackedRows.unpack(rows[(0,)]).tolist(), PackedRows.unpack(rows[(1,)]).tolist()
    ([3, 0], [1])
    """

    def __init__(self, values: Block, most: int, sizes: tuple[int, ...]) -> None:
        values = values.astype(np.min_scalar_type(most), copy=False)
        planes = range(max(int(most).bit_length(), 1))
        self.planes = np.stack([np.packbits((values >> i) & 1) for i in planes])
        super().__init__((sizes,), tokenize(self.planes))

    def __getitem__(self, index: tuple[int, ...]) -> tuple[Block, int, int]:
        (here,) = self.slices(index)
        packed = self.planes[:, here.start // 8 : -(-here.stop // 8)]
        return packed, here.start % 8, here.stop - here.start

    @staticmethod
    def unpack(argument: tuple[Block, int, int]) -> Block:
        """Return the integers of a block, int64."""
        planes, first, n = argument
        bits = np.unpackbits(planes, axis=1)[:, first : first + n]
        powers = np.left_shift(1, np.arange(len(planes), dtype=np.int64))
        values: Block = powers @ bits
        return values


class SparseRows(_Arguments):
    """The rows of each block of a sparse matrix in memory.

    Examples
    --------
    >>> SparseRows(sparse.csr_array([[1, 0], [0, 2], [3, 0]]), (2, 1))[(1,)].toarray().tolist()
    [[3, 0]]
    """

    def __init__(self, matrix: sparse.csr_array, sizes: tuple[int, ...]) -> None:
        super().__init__((sizes,), tokenize(matrix.data, matrix.indices, matrix.indptr))
        self.matrix = matrix

    def __getitem__(self, index: tuple[int, ...]) -> sparse.csr_array:
        return self.matrix[self.slices(index)[0]]


# ------------------------------------------------------------------------- arrays of a store


def stored(read: Read, chunks: Chunks, dtype: npt.DTypeLike, name: str) -> da.Array:
    """Return a lazy array of a store, whose blocks are read by the tasks that need them.

    A selection, a result or a persisted copy of it is an ordinary array, whose blocks tasks share,
    unless :func:`map_stored` made it.

    Parameters
    ----------
    read
        Returns the part that slices select: one slice for each axis, of a block; or, for an array
        of one axis, one array of positions. Can be pickled.
    chunks
        Sizes of the blocks along each axis.
    dtype
        The dtype of the blocks.
    name
        For Dask: equal names mean equal content.

    Examples
    --------
    >>> x = np.arange(5.0)
    >>> stored(x.__getitem__, ((3, 2),), x.dtype, "five").compute().tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    index, meta = "sxyz"[: len(chunks)], np.empty((0,) * len(chunks), dtype)
    reads = _ReadsOfArray(name, read, chunks, None, range(len(chunks)))
    lazy: da.Array = da.blockwise(
        block_of, index, reads, index, name=name, align_arrays=False, dtype=dtype, meta=meta
    )
    return lazy


def reader(array: object) -> Read | None:
    """Return how the blocks of an array of a store are read; None of any other array.

    An array belongs to a store as long as :func:`stored` made its tasks: a persisted one has the
    same name, and other tasks.
    """
    layer = array.dask.layers.get(array.name) if isinstance(array, da.Array) else None
    for argument in layer.io_deps.values() if isinstance(layer, Blockwise) else ():
        if isinstance(argument, _ReadsOfArray):
            return argument.read
    return None


def map_stored(
    function: Callable[..., Block],
    array: da.Array,
    *,
    dtype: npt.DTypeLike,
    name: str,
    **options: Any,
) -> da.Array:
    """Return a function of each block, of the same shape: in a store, if the array is.

    Examples
    --------
    >>> map_stored(np.sqrt, da.ones(3), dtype=float, name="roots").compute().tolist()
    [1.0, 1.0, 1.0]
    """
    function, name = functools.partial(function, **options), f"{name}-{tokenize(array, options)}"
    if read := reader(array):
        read = functools.partial(_read_and_apply, function, read)
        return stored(read, array.chunks, dtype, name)
    meta = np.empty((0,) * array.ndim, dtype)
    result: da.Array = da.map_blocks(function, array, name=name, dtype=dtype, meta=meta)
    return result


def _read_and_apply(function: Callable[..., Block], read: Read, key: Key) -> Block:
    return function(read(key))


def block_of(argument: Block | Unread) -> Block:
    """Return the block that a task got as an argument, or is to read."""
    (block,) = flat(argument)
    return block


def read_in_task(
    array: da.Array,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    by_checkpoint: bool = False,
) -> tuple[ArrayBlockwiseDep, str] | None:
    """Return an argument of ``blockwise`` by which tasks read the blocks of an array themselves.

    Parameters
    ----------
    array
        (sample, ...), such as features or weights; the last of several axes is the checkpoint.
    groups
        The blocks along samples that each task takes, in this order; by default one.
    by_checkpoint
        Whether a task takes the blocks of one checkpoint, or of all checkpoints.

    Returns
    -------
    The argument, with its index: ``"s"``, or ``"sc"``. The function of the task receives an
    :class:`Unread`. None if the array is not one of a store.

    Notes
    -----
    Nothing but what the task returns moves between workers, and a block is in memory only while its
    task works on it. In return, each layer that needs the blocks reads them again.
    """
    if not (read := reader(array)):
        return None
    axes = (0, array.ndim - 1) if by_checkpoint else (0,)
    return _Reads(array.name, read, array.chunks, groups, axes), "sc"[: len(axes)]


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


class _Reads(_Arguments):
    """The blocks that each task reads: some along samples, and one or all along other axes."""

    def __init__(
        self,
        name: str,
        read: Read,
        chunks: Chunks,
        groups: Sequence[Sequence[int]] | None,
        axes: Sequence[int],
    ) -> None:
        # The chunks of this argument are the tasks, and not the blocks of the array.
        self.groups = [(i,) for i in range(len(chunks[0]))] if groups is None else groups
        rows = tuple(sum(chunks[0][i] for i in group) for group in self.groups)
        super().__init__((rows, *(chunks[axis] for axis in axes[1:])), (name, groups, tuple(axes)))
        self.read, self.axes = read, axes
        self.starts = [block_starts(sizes).tolist() for sizes in chunks]

    def __getitem__(self, index: tuple[int, ...]) -> Unread:
        blocks: list[Sequence[int]] = [range(len(starts) - 1) for starts in self.starts]
        for axis, i in zip(self.axes, index, strict=True):
            blocks[axis] = (i,)
        blocks[0] = self.groups[index[0]]
        keys = tuple(map(self.slices, itertools.product(*blocks)))
        return Unread(self.read, keys, self.chunks[0][index[0]])


class _ReadsOfArray(_Reads):
    """The blocks that the tasks of an array of a store read, each its own."""
