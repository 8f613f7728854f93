"""Give each task its own part of large inputs, so that no task grows with the number of blocks.

Dask asks these objects for the argument of one block at a time, when it turns a layer into tasks.
Until then a graph holds the object itself, once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import dask
import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.blockwise import Blockwise, optimize_blockwise
from dask.highlevelgraph import HighLevelGraph, Layer
from dask.layers import ArrayBlockwiseDep

from trakdask.arrays.blocks import Block, Unread, block_starts, flat

__all__ = [
    "Bounds",
    "PackedRows",
    "Slices",
    "StoredColumn",
    "block_of",
    "coarse_groups",
    "is_stored",
    "read_in_task",
]

_MOST_GROUPS = 4096
"""Of blocks along samples. A scheduler takes about a millisecond for each of its tasks."""

Chunks = tuple[tuple[int, ...], ...]


class Bounds(ArrayBlockwiseDep):
    """The first position of each block along an axis, and the position after its last.

    Examples
    --------
    >>> Bounds((3, 2))[(1,)]
    (3, 5)
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__((sizes,))
        self.starts = block_starts(sizes)

    def __getitem__(self, index: tuple[int, ...]) -> tuple[int, int]:
        (i,) = index
        return int(self.starts[i]), int(self.starts[i + 1])

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return type(self).__name__, self.chunks


class Slices(ArrayBlockwiseDep):
    """The blocks of an array in memory: a graph has the array once, and each task its block.

    Examples
    --------
    >>> block_of(Slices(np.arange(5), ((3, 2),))[(1,)]).tolist()
    [3, 4]
    """

    def __init__(self, values: Block, chunks: Chunks) -> None:
        super().__init__(chunks)
        self.values = values
        # Hashing the values could take longer than everything else that builds a graph.
        self.token = uuid4().hex
        self.starts = tuple(block_starts(sizes) for sizes in chunks)

    def __getitem__(self, index: tuple[int, ...]) -> Block:
        pairs = zip(self.starts, index, strict=True)
        rows = tuple(slice(int(starts[i]), int(starts[i + 1])) for starts, i in pairs)
        block: Block = self.values[rows]
        return block

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return type(self).__name__, self.token, self.chunks


def block_of(argument: Block | Unread) -> Block:
    """Return the block that a task got as an argument, or is to read."""
    if isinstance(argument, Unread):
        (block,) = flat(argument)
        return block
    return argument


class PackedRows(ArrayBlockwiseDep):
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
        super().__init__((sizes,))
        values = values.astype(np.min_scalar_type(most), copy=False)
        planes = range(max(int(most).bit_length(), 1))
        self.planes = np.stack([np.packbits((values >> i) & 1) for i in planes])
        self.starts = block_starts(sizes)
        self.token = tokenize(self.planes)

    def __getitem__(self, index: tuple[int, ...]) -> tuple[Block, int, int]:
        (i,) = index
        start, stop = int(self.starts[i]), int(self.starts[i + 1])
        return self.planes[:, start // 8 : -(-stop // 8)], start % 8, stop - start

    @staticmethod
    def unpack(argument: tuple[Block, int, int]) -> Block:
        """Return the integers of a block, int64."""
        planes, first, n = argument
        bits = np.unpackbits(planes, axis=1)[:, first : first + n]
        powers = np.left_shift(1, np.arange(len(planes), dtype=np.int64))
        values: Block = powers @ bits
        return values

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return type(self).__name__, self.token, self.chunks


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
        Whether a task takes the blocks of one checkpoint, instead of those of all.

    Returns
    -------
    The argument, with its index: ``"s"``, or ``"sc"``. The function of the task receives an
    :class:`trakdask.arrays.blocks.Unread`. None if the blocks are not simply read from a store: if
    they take time to compute, or are in memory, then all tasks that need them should share them.

    Notes
    -----
    Nothing but what the task returns moves between workers, and a block is in memory only while its
    task works on it. In return, each layer that needs the blocks reads them again.
    """
    graph = _stored_graph(array)
    if graph is None:
        return None
    if groups is None:
        groups = [(i,) for i in range(array.numblocks[0])]
    return _ReadInTask(array, graph, groups, by_checkpoint), "sc" if by_checkpoint else "s"


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


def is_stored(array: da.Array) -> bool:
    """Return whether tasks can read the blocks of an array themselves: :func:`read_in_task`."""
    return _stored_graph(array) is not None


class StoredColumn:
    """An array (sample) in a store, of which tasks read the blocks that have the rows they need."""

    def __init__(self, array: da.Array) -> None:
        reader = read_in_task(array)
        assert reader is not None, "expected an array for which is_stored is true"
        self._blocks = reader[0]
        self.dtype = array.dtype

    def __getitem__(self, index: Any) -> Block:
        blocks, positions = self._blocks, np.asarray(index).ravel()
        starts = block_starts(blocks.chunks[0])
        numbers = np.searchsorted(starts, positions, side="right") - 1
        found = np.empty(positions.shape, self.dtype)
        for number in np.unique(numbers):
            here = numbers == number
            found[here] = block_of(blocks[(int(number),)])[positions[here] - starts[number]]
        return found.reshape(np.shape(index))


def _stored_graph(array: da.Array) -> HighLevelGraph | None:
    """Return the graph of an array whose blocks are read from a store and converted, or None."""
    graph: HighLevelGraph = optimize_blockwise(array.dask, keys=[(array.name,)])
    steps = {name: each for name, each in graph.layers.items() if isinstance(each, Blockwise)}
    stored = {name: layer for name, layer in graph.layers.items() if name not in steps}
    are_stored = all(_is_stored_array(name, layer) for name, layer in stored.items())
    if not stored or not are_stored or not all(map(_keeps_rows, steps.values())):
        return None
    return graph


def _is_stored_array(name: str, layer: Layer) -> bool:
    """Return whether a layer is what ``from_array`` makes of an array that is not in memory."""
    if not name.startswith("original-") or len(layer) != 1:
        return False
    (value,) = layer.values()
    return not isinstance(getattr(value, "value", value), np.ndarray)


def _keeps_rows(layer: Blockwise) -> bool:
    """Return whether each block of the result needs blocks of the same rows only."""
    rows = layer.output_indices[0]
    return all(index is None or rows in index for _, index in layer.indices)


class _ReadInTask(ArrayBlockwiseDep):
    def __init__(
        self,
        array: da.Array,
        graph: HighLevelGraph,
        groups: Sequence[Sequence[int]],
        by_checkpoint: bool,
    ) -> None:
        rows = tuple(sum(array.chunks[0][i] for i in group) for group in groups)
        super().__init__((rows, array.chunks[-1]) if by_checkpoint else (rows,))
        self.name, self.graph, self.groups = array.name, graph, groups
        self.other_axes = array.numblocks[1:]

    def __getitem__(self, index: tuple[int, ...]) -> Unread:
        axes = [range(n) for n in self.other_axes]
        if len(index) == 2:
            axes[-1] = range(index[1], index[1] + 1)
        blocks = itertools.product(self.groups[index[0]], *axes)
        tasks = tuple(functools.partial(_read, *self._graph_of(block)) for block in blocks)
        return Unread(tasks, self.chunks[0][index[0]])

    def _graph_of(self, block: tuple[int, ...]) -> tuple[dict[Any, Any], Any]:
        """Return the graph of one block alone, which its task computes itself."""
        key = (self.name, *block)
        return dict(self.graph.cull({key})), key

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return type(self).__name__, self.name, self.chunks, self.groups


def _read(graph: dict[Any, Any], key: Any) -> Block:
    block: Block = dask.get(graph, key)
    return block
