"""Features that are read from somewhere, as those of a store are, with a count of the reads."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr


class StoredArray:
    """What dask sees of an array in a store: it can be sliced, and is not in memory."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.shape, self.ndim, self.dtype = values.shape, values.ndim, values.dtype
        self.reads: Counter[Any] = Counter()

    def __getitem__(self, index: Any) -> np.ndarray:
        self.reads[repr(index)] += 1
        return self.values[index]


class ShapeOfArray:
    """The same, of an array that is not there: it must not be read."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.ndim, self.dtype = shape, len(shape), np.dtype(np.float32)

    def __getitem__(self, index: Any) -> np.ndarray:
        raise AssertionError("expected lazy results only, but an array was read")


_numbers = itertools.count()


def stored(values: np.ndarray | ShapeOfArray, chunks: Any) -> da.Array:
    """Return a lazy array whose blocks are read from a :class:`StoredArray`."""
    array = StoredArray(values) if isinstance(values, np.ndarray) else values
    meta = np.empty((0,) * array.ndim, array.dtype)
    return da.from_array(array, chunks=chunks, name=f"open-{next(_numbers)}", meta=meta)


def as_stored(features: xr.Dataset, chunks: int | tuple[int, ...]) -> xr.Dataset:
    """Return features with the same values, all of them read from stored arrays."""

    def store(array: xr.DataArray) -> xr.DataArray:
        rest = {1: (), 2: (1,), 3: (-1, 1)}[array.ndim]
        return array.copy(data=stored(array.values, (chunks, *rest)))

    return features.map(store, keep_attrs=True)
