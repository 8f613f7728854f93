"""Features that are read from somewhere, like features of a store, with a count of the reads."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

import trakdask.arrays.graphs


class StoredArray:
    """An array in a store: its parts can be read, and that is counted."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.reads: Counter[Any] = Counter()

    def __getitem__(self, index: Any) -> np.ndarray:
        self.reads[repr(index)] += 1
        return self.values[index]


class ShapeOfArray:
    """The same, of an array that is not there: it must not be read."""

    def __init__(self, *shape: int, dtype: str = "f4") -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        raise AssertionError("expected lazy results only, but an array was read")


_numbers = itertools.count()


def stored(values: Any, chunks: Any) -> da.Array:
    """Return a lazy array of a store that reads arrays in memory, or what can be read like them."""
    array = StoredArray(values) if isinstance(values, np.ndarray) else values
    sizes = da.core.normalize_chunks(chunks, array.shape)
    name = f"open-{next(_numbers)}"
    return trakdask.arrays.graphs.stored(array.__getitem__, sizes, array.dtype, name)


def as_stored(features: xr.Dataset, chunks: int | tuple[int, ...]) -> xr.Dataset:
    """Return features with the same values, all of them read from stored arrays."""

    def store(array: xr.DataArray) -> xr.DataArray:
        rest = {1: (), 2: (1,), 3: (-1, 1)}[array.ndim]
        return array.copy(data=stored(array.values, (chunks, *rest)))

    return features.map(store, keep_attrs=True)
