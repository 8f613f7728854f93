"""Give each task its own part of large inputs, so that no task grows with the number of blocks.

Dask asks these objects for the argument of one block at a time, when it turns a layer into tasks.
Until then a graph holds the object itself, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import numpy as np
from dask.base import tokenize
from dask.layers import ArrayBlockwiseDep

from trakdask.arrays.blocks import Block, block_starts

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


class Labels(ArrayBlockwiseDep):
    """A text for each checkpoint, of chunks of one checkpoint.

    Examples
    --------
    >>> Labels(["c0", "c1"])[(1,)]
    'c1'
    """

    def __init__(self, labels: Sequence[object]) -> None:
        super().__init__(((1,) * len(labels),))
        self.labels = tuple(map(str, labels))

    def __getitem__(self, index: tuple[int, ...]) -> str:
        return self.labels[index[0]]

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return type(self).__name__, self.labels


class Slices(ArrayBlockwiseDep):
    """The blocks of an array in memory: a graph has the array once, and each task its block.

    Examples
    --------
    >>> Slices(np.arange(5), ((3, 2),))[(1,)].tolist()
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
