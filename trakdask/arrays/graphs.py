"""Graphs of Dask: blocks that tasks get as arguments, or read themselves.

For most arrays, Dask makes one task per block, whose result stays in memory until all tasks that
need it have run: all features, if λ is to be chosen before they are scored. It is better to read a
block of a store again. :func:`reader` says whether that is possible.

This is the one module that knows how Dask keeps graphs; others call functions of ``dask.array``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import is_dask_collection, tokenize
from dask.blockwise import Blockwise
from dask.core import flatten
from dask.layers import ArrayBlockwiseDep
from scipy import sparse

from trakdask.arrays.blocks import Block, Chunks, Key, Read, Unread, block_of, block_starts


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
    if hasattr(array, "expr"):
        raise NotImplementedError(
            "expected Dask with array.query-planning off to store or fit arrays, since its arrays "
            "of expressions have no da.optimize, got it on; try DASK_ARRAY__QUERY_PLANNING=False "
            "in the process that stores, or the package dask-array, with whose "
            "dask_array.xarray.register() trakdask works"
        )
    return da.optimize(array.dask, keys)


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
        return self.values[self.slices(index)]


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
        return powers @ bits


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
    return da.blockwise(
        block_of, index, reads, index, name=name, align_arrays=False, dtype=dtype, meta=meta
    )


def reader(array: object) -> Read | None:
    """Return how the blocks of an array of a store are read; None of any other array.

    An array belongs to a store as long as :func:`stored` made its tasks: a persisted one has the
    same name, and other tasks.
    """
    if not isinstance(array, da.Array):
        return None
    if hasattr(array, "expr"):  # with array.query-planning of Dask
        arguments: Any = array.expr.operands
    else:
        layer = array.dask.layers.get(array.name)
        arguments = layer.io_deps.values() if isinstance(layer, Blockwise) else ()
    return next((a.read for a in arguments if isinstance(a, _ReadsOfArray)), None)


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
    return da.map_blocks(function, array, name=name, dtype=dtype, meta=meta)


def _read_and_apply(function: Callable[..., Block], read: Read, key: Key) -> Block:
    return function(read(key))


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


def grouped(array: da.Array, index: str, groups: Sequence[Sequence[int]]) -> tuple[Any, str]:
    """Return an argument of ``blockwise`` with the rows of some blocks in each task, and its index.

    Blocks in a store are read by that task. Others, wherever they were computed, are sent there.

    Parameters
    ----------
    array
        (sample, ...), with the index ``"s"``, or one that ends with ``"c"`` for checkpoints.
    groups
        The blocks along samples of each task, ascending. Blocks of no task are left out.
    """
    if read := read_in_task(array, groups=groups, by_checkpoint=index[-1] == "c"):
        return read
    used = list(itertools.chain(*groups))
    rows = tuple(sum(array.chunks[0][i] for i in group) for group in groups)
    if len(used) < array.numblocks[0]:
        array = array.blocks[used]
    return array.rechunk({0: rows}, method="tasks"), index


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
