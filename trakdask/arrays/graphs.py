"""Graphs of Dask: blocks that tasks get as arguments, or read themselves.

For most arrays, Dask makes one task per block, whose result stays in memory until all tasks that
need it have run: all features, if λ is to be chosen before they are scored. It is better to read a
block of a store again. :func:`reader` says whether that is possible.

This is the one module that knows how Dask keeps graphs; others call functions of ``dask.array``.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import is_dask_collection, tokenize
from dask.blockwise import Blockwise
from dask.core import flatten
from dask.layers import ArrayBlockwiseDep, ArraySliceDep, ArrayValuesDep
from scipy import sparse

from trakdask.arrays.blocks import Block, Read, Unread, block_of


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


class _Parts(ArrayBlockwiseDep):
    """An argument of ``blockwise``: each task gets its part, so that no task grows.

    Dask asks for the part of one block at a time, when it turns a layer into tasks. Until then a
    graph holds the object itself, once.

    Parameters
    ----------
    chunks
        Sizes of the blocks along each axis.
    part
        Returns the part of a block, from its slices, one for each axis. Can be pickled.
    token
        Equal tokens mean equal parts.
    """

    def __init__(
        self, chunks: tuple[tuple[int, ...], ...], part: Callable[..., Any], token: object
    ) -> None:
        super().__init__(chunks)
        self.slices, self.part, self.token = ArraySliceDep(chunks), part, token

    def __getitem__(self, index: tuple[int, ...]) -> Any:
        return self.part(self.slices[index])

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return type(self).__name__, self.token, self.chunks


def bounds(sizes: tuple[int, ...]) -> ArrayBlockwiseDep:
    """Return an argument of ``blockwise`` by which tasks know the slice of their block, in a tuple.

    Examples
    --------
    >>> bounds((3, 2))[(1,)]
    (slice(3, 5, None),)
    """
    return ArraySliceDep((sizes,))


def texts(labels: Sequence[object]) -> ArrayBlockwiseDep:
    """Return an argument of ``blockwise``: a text for each checkpoint, of chunks of one.

    Examples
    --------
    >>> texts(["c0", "c1"])[(1,)]
    'c1'
    """
    return ArrayValuesDep(((1,) * len(labels),), np.array([*map(str, labels)], object))


def sliced(
    values: Block | sparse.csr_array, chunks: tuple[tuple[int, ...], ...]
) -> ArrayBlockwiseDep:
    """Return an argument of ``blockwise``: blocks of an array in memory, which a graph has once.

    Examples
    --------
    >>> sliced(np.arange(5), ((3, 2),))[(1,)].tolist()
    [3, 4]
    """
    # Hashing an array could take longer than everything else that builds a graph.
    token = uuid4().hex
    if not isinstance(values, np.ndarray):
        token = tokenize(values.data, values.indices, values.indptr)
    return _Parts(chunks, functools.partial(operator.getitem, values), token)


def packed(values: Block, most: int, sizes: tuple[int, ...]) -> ArrayBlockwiseDep:
    """Return an argument of ``blockwise``: blocks of integers from 0 to ``most``, in few bits.

    At 10⁸ samples a mask takes 12.5 MB and the numbers of 7 groups 37.5 MB, in place of 100 and
    800. :func:`unpacked` turns the argument of a task into integers again.

    Examples
    --------
    >>> rows = packed(np.array([3, 0, 1]), 3, (2, 1))
    >>> unpacked(rows[(0,)]).tolist(), unpacked(rows[(1,)]).tolist()
    ([3, 0], [1])
    """
    values = values.astype(np.min_scalar_type(most), copy=False)
    # One row of bits for each power of two.
    planes = np.stack(
        [np.packbits((values >> i) & 1) for i in range(max(int(most).bit_length(), 1))]
    )
    return _Parts((sizes,), functools.partial(_bits, planes), tokenize(planes))


def _bits(planes: Block, rows: tuple[slice]) -> tuple[Block, int, int]:
    (here,) = rows
    # Whole bytes, and the place of the first bit in them.
    bits = planes[:, here.start // 8 : -(-here.stop // 8)]
    return bits, here.start % 8, here.stop - here.start


def unpacked(argument: tuple[Block, int, int]) -> Block:
    """Return the integers of a block, int64; see :func:`packed`."""
    planes, first, n = argument
    bits = np.unpackbits(planes, axis=1)[:, first : first + n]
    return np.left_shift(1, np.arange(len(planes), dtype=np.int64)) @ bits


def stored(
    read: Read, chunks: tuple[tuple[int, ...], ...], dtype: npt.DTypeLike, name: str
) -> da.Array:
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
    reads = _Reads(name, read, chunks, None, range(len(chunks)))
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
    # Arrays that were made of it read its blocks, too, under its name and not theirs.
    reads = (each for each in arguments if isinstance(each, _Reads) and each.name == array.name)
    return next((each.read for each in reads), None)


def map_stored(
    function: Callable[..., Block], array: da.Array, *, name: str, **options: Any
) -> da.Array:
    """Return a function of each block, of the same shape, float64: in a store, if the array is.

    Examples
    --------
    >>> map_stored(np.sqrt, da.ones(3), name="roots").compute().tolist()
    [1.0, 1.0, 1.0]
    """
    function, name = functools.partial(function, **options), f"{name}-{tokenize(array, options)}"
    if read := reader(array):
        read = functools.partial(_read_and_apply, function, read)
        return stored(read, array.chunks, np.float64, name)
    meta = np.empty((0,) * array.ndim)
    return da.map_blocks(function, array, name=name, dtype=np.float64, meta=meta)


def _read_and_apply(function: Callable[..., Block], read: Read, key: tuple[Any, ...]) -> Block:
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


class _Reads(ArrayBlockwiseDep):
    """The blocks that each task reads: some along samples, and one or all along other axes."""

    def __init__(
        self,
        name: str,
        read: Read,
        chunks: tuple[tuple[int, ...], ...],
        groups: Sequence[Sequence[int]] | None,
        axes: Sequence[int],
    ) -> None:
        # The chunks of this argument are the tasks, and not the blocks of the array.
        self.groups = [(i,) for i in range(len(chunks[0]))] if groups is None else groups
        rows = tuple(sum(chunks[0][i] for i in group) for group in self.groups)
        super().__init__((rows, *(chunks[axis] for axis in axes[1:])))
        self.name, self.read, self.axes = name, read, tuple(axes)
        self.slices = ArraySliceDep(chunks)

    def __getitem__(self, index: tuple[int, ...]) -> Unread:
        # All blocks along the axes of the array, but one along those that tasks are divided by.
        blocks: list[Sequence[int]] = [range(n) for n in self.slices.numblocks]
        for axis, i in zip(self.axes, index, strict=True):
            blocks[axis] = (i,)
        blocks[0] = self.groups[index[0]]
        keys = tuple(map(self.slices.__getitem__, itertools.product(*blocks)))
        return Unread(self.read, keys, self.chunks[0][index[0]])

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return self.name, self.groups, self.axes, self.chunks
