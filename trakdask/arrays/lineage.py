"""Trace the values of a lazy array to their sources in its graph, without computing anything.

An array that results from selection, concatenation or rechunking contains values of the array that
it was selected from. This decides whether a matrix that was reduced from an array, such as a stored
Gram matrix, is still valid for another array that was derived from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

__all__ = ["Selection", "columns", "is_in_memory", "selection", "sources"]

_SELECTING = ("getitem", "concatenate", "rechunk-merge", "rechunk-split", "blocks")
"""Names, before the token, of dask layers that move values without changing them."""


class Selection(NamedTuple):
    """The part of its source that an array selects.

    If two arrays have equal ``rows``, their first and last blocks select the same rows in the same
    order. ``columns`` is empty if the second axis is complete or a prefix of that of the source.
    ``checkpoints`` are positions along the last axis of the source.
    """

    rows: tuple[Any, ...]
    columns: tuple[Any, ...]
    checkpoints: tuple[int, ...]


def sources(data: da.Array, root: str | None = None) -> frozenset[str]:
    """Return the names of the arrays that the values come from, tracing no further than ``root``.

    Examples
    --------
    >>> x = da.ones((4, 2), chunks=2)
    >>> sources(x[1:3].rechunk(1)) == {x.name}, sources(2 * x[1:]) == {x.name}
    (True, False)
    """
    graph, origins, names = data.dask, set(), [data.name]
    while names:
        name = names.pop()
        below = graph.dependencies[name]
        if name == root or name.rpartition("-")[0] not in _SELECTING or not below:
            origins.add(name)
        else:
            names.extend(below)
    return frozenset(origins)


def is_in_memory(data: da.Array, names: Collection[str]) -> bool:
    """Return whether the graph contains the blocks of these arrays as NumPy arrays.

    Examples
    --------
    >>> x = da.from_array(np.ones((4, 2)), chunks=2)
    >>> is_in_memory(x, [x.name]), is_in_memory(2 * x, [(2 * x).name])
    (True, False)
    """
    return all(_holds_arrays(data.dask, name) for name in names)


def _holds_arrays(graph: HighLevelGraph, name: str) -> bool:
    layer = graph.layers[name]
    if graph.dependencies[name] or not isinstance(layer, MaterializedLayer):
        return False
    values = layer.mapping.values()
    return all(isinstance(getattr(value, "value", value), np.ndarray) for value in values)


def selection(data: da.Array, names: Collection[str]) -> Selection:
    """Return which part of its sources, named by :func:`sources`, an array selects.

    Examples
    --------
    >>> x = da.ones((4, 3, 2), chunks=(2, 3, 1))
    >>> part = x[:, ::-1, 1:]
    >>> selected = selection(part, sources(part))
    >>> selected.columns, selected.checkpoints
    ((slice(-1, -4, -1),), (1,))
    """
    first, last = ((block, *(0,) * (data.ndim - 1)) for block in (0, data.numblocks[0] - 1))
    if data.name in names:
        return Selection(((0,), (last[0],)), (), tuple(range(data.numblocks[-1])))
    rows, columns = [], []
    for block in (first, last):
        indices, blocks = _ancestry(data, block, names)
        rows.append(tuple(_along(indices, 0)) + tuple(sorted(key[0] for key in blocks)))
        if block == first and data.ndim == 3:
            columns = _columns(indices)
    checkpoints = []
    for i in range(data.numblocks[-1]):
        _, blocks = _ancestry(data, (*first[:-1], i), names)
        checkpoints.append(min(key[-1] for key in blocks))
    return Selection(tuple(rows), tuple(columns), tuple(checkpoints))


def columns(data: da.Array) -> tuple[Any, ...]:
    """Return the indices that select columns of the sources of a (row, column, ...) array.

    They are as in :class:`Selection`, so arrays with equal ones have the same columns.

    Examples
    --------
    >>> x = da.ones((4, 3, 2), chunks=(2, 3, 1))
    >>> columns(x[1:]), columns(x[:, :2]), columns(x[:, ::-1])
    ((), (), (slice(-1, -4, -1),))
    """
    names = sources(data)
    if data.name in names:
        return ()
    indices, _ = _ancestry(data, (0,) * data.ndim, names)
    return tuple(_columns(indices))


def _columns(indices: list[tuple[Any, ...]]) -> list[Any]:
    return [index for index in _along(indices, 1) if not _is_prefix(index)]


def _ancestry(
    data: da.Array, block: tuple[int, ...], names: Collection[str]
) -> tuple[list[tuple[Any, ...]], list[tuple[int, ...]]]:
    """Return the indices that select a block, and the blocks of the source it is selected from."""
    keys: list[Any] = [(data.name, *block)]
    seen: set[Any] = set()
    indices: list[tuple[Any, ...]] = []
    blocks: list[tuple[int, ...]] = []
    while keys:
        key = keys.pop()
        if key in seen:
            continue
        seen.add(key)
        if key[0] in names:
            blocks.append(key[1:])
            continue
        task = _task(data.dask, key)
        if not key[0].startswith("rechunk-"):  # these split blocks, and leave nothing out
            indices += _indices(data.dask, task, data.ndim)
        # Dask represents an alias either as a task or as the other key itself, a tuple.
        keys += [task] if isinstance(task, tuple) else getattr(task, "dependencies", ())
    return indices, blocks


def _task(graph: HighLevelGraph, key: Any) -> Any:
    own = graph.layers.get(key[0]) if isinstance(key, tuple) else None
    if own is not None and key in own:
        return own[key]
    # Looking a key up in any other kind of layer would materialize all of its tasks.
    layers = (each for each in graph.layers.values() if isinstance(each, MaterializedLayer))
    return next(layer[key] for layer in layers if key in layer)


def _indices(graph: HighLevelGraph, task: Any, ndim: int) -> Iterator[tuple[Any, ...]]:
    """Yield the tuples of indices, one per axis, by which a task selects."""
    value = getattr(task, "value", None)
    if isinstance(value, tuple) and len(value) == 2:
        index: Any = value[1]  # dask stores a fancy index together with its size
        if isinstance(index, tuple) and len(index) == ndim:
            yield index
    args: Any = getattr(task, "args", ())
    yield from (arg for arg in args if isinstance(arg, tuple) and len(arg) == ndim)
    for key in getattr(task, "dependencies", ()):
        if isinstance(key, str) and key.startswith("shuffle-sorter-") and len(args) > 2:
            order = _task(graph, key).value[1]
            yield tuple(order if i == args[2] else slice(None) for i in range(ndim))


def _along(indices: list[tuple[Any, ...]], axis: int) -> list[Any]:
    """Return the indices along one axis, sorted, so that the order of visits does not matter."""
    along = [_plain(index[axis]) for index in indices]
    return sorted((index for index in along if index != slice(None)), key=repr)


def _plain(index: Any) -> Any:
    return tuple(index.tolist()) if isinstance(index, np.ndarray) else index


def _is_prefix(index: Any) -> bool:
    if isinstance(index, slice):
        return index.start in (None, 0) and index.step in (None, 1)
    return isinstance(index, tuple) and index == tuple(range(len(index)))
