"""Arrays of a store, whose blocks are read by the tasks that need them.

Of any other array Dask makes one task for each block, whose result stays in memory until all tasks
that need it have run: all features, if λ is to be chosen before they are scored. A block of a store
is rather read again. Whether it may be cannot be seen from a graph, so the array says it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.layers import ArrayBlockwiseDep

from trakdask.arrays.blocks import Block, Unread, block_starts, flat

_MOST_GROUPS = 4096
"""Of blocks along samples. A scheduler takes about a millisecond for each of its tasks."""

Key: TypeAlias = tuple[Any, ...]
"""Slices of a block, or positions along the only axis."""
Read: TypeAlias = Callable[[Key], Block]


#: The attribute of a Dask array that says how it is read. xarray refuses subclasses beside arrays.
_READ = "trakdask_read"


def stored(
    read: Read, chunks: tuple[tuple[int, ...], ...], dtype: npt.DTypeLike, name: str
) -> da.Array:
    """Return a lazy array of a store, of which tasks read what they need.

    What is selected or computed from it, or persisted, is an ordinary array, whose blocks tasks
    share; but for what :func:`map_stored` returns.

    Parameters
    ----------
    read
        Returns the part that slices select, one for each axis. They are those of a block, or, for
        an array of one axis, one array of positions. Can be pickled.
    chunks
        Sizes of the blocks along each axis.
    dtype
        Of the blocks.
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
    lazy: da.Array = da.blockwise(
        block_of, index, reads, index, name=name, align_arrays=False, dtype=dtype, meta=meta
    )
    setattr(lazy, _READ, read)
    return lazy


def reader(array: object) -> Read | None:
    """Return how the blocks of an array of a store are read; None of any other array."""
    return getattr(array, _READ, None)


def map_stored(
    function: Callable[..., Block], array: da.Array, *, dtype: npt.DTypeLike, name: str
) -> da.Array:
    """Return a function of each block, of the same shape: in a store, if the array is.

    Examples
    --------
    >>> map_stored(np.sqrt, da.ones(3), dtype=float, name="roots").compute().tolist()
    [1.0, 1.0, 1.0]
    """
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
        Whether a task takes the blocks of one checkpoint, instead of those of all.

    Returns
    -------
    The argument, with its index: ``"s"``, or ``"sc"``. The function of the task receives an
    :class:`trakdask.arrays.blocks.Unread`. None if the array is not one of a store.

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
        rows = chunks[0]
        if groups is not None:
            rows = tuple(sum(chunks[0][i] for i in group) for group in groups)
        super().__init__((rows, *(chunks[axis] for axis in axes[1:])))
        self.name, self.read, self.groups, self.axes = name, read, groups, axes
        self.starts = [block_starts(sizes).tolist() for sizes in chunks]

    def __getitem__(self, index: tuple[int, ...]) -> Unread:
        blocks: list[Sequence[int]] = [range(len(starts) - 1) for starts in self.starts]
        for axis, i in zip(self.axes, index, strict=True):
            blocks[axis] = (i,)
        if self.groups is not None:
            blocks[0] = self.groups[index[0]]
        keys = itertools.product(*map(self._slices, range(len(blocks)), blocks))
        return Unread(self.read, tuple(keys), self.chunks[0][index[0]])

    def _slices(self, axis: int, blocks: Sequence[int]) -> list[slice]:
        starts = self.starts[axis]
        return [slice(starts[i], starts[i + 1]) for i in blocks]

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return type(self).__name__, self.name, self.groups, tuple(self.axes)
