"""Coords that stay in the store, as lazy arrays in the blocks of the features."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize

from trakdask.arrays.blocks import block_starts
from trakdask.execution.handles import Spooled

__all__ = ["StoredCoord", "lazy_coord"]


def lazy_coord(
    variables: Sequence[xr.Variable], sizes: tuple[int, ...], name: str, token: str
) -> xr.Variable:
    """Return a coord of all samples whose values are read block by block, when they are asked for.

    Parameters
    ----------
    variables
        What xarray opened, one part of the samples after the other; not read yet.
    sizes
        Numbers of samples in the blocks of the features.
    name, token
        The name of the coord, and a hash that identifies its values.
    """
    stored = StoredCoord(variables, f"coord-{name}-{token}")
    label = "".join(each if each.isalnum() else "-" for each in name)
    full_name = f"open-coord-{label}-{tokenize(name, token)}"
    data = da.from_array(stored, chunks=(sizes,), name=full_name, meta=np.empty(0, stored.dtype))
    return xr.Variable(variables[0].dims, data, variables[0].attrs)


class StoredCoord:
    """Looks like an array in memory, but reads the rows that an index selects, decoded by xarray.

    Tasks get a small handle instead of the list of the coord's files, which grows with the number
    of samples.
    """

    ndim = 1

    def __init__(self, variables: Sequence[xr.Variable], token: str) -> None:
        self._variables = Spooled(tuple(variables), token)
        self.shape = (sum(len(each) for each in variables),)
        self.dtype = np.result_type(*(each.dtype for each in variables))

    def __getitem__(self, key: Any) -> np.ndarray:
        (index,) = key if isinstance(key, tuple) else (key,)
        if isinstance(index, slice):
            rows = range(self.shape[0])[index]
            if not rows:
                return np.empty(0, self.dtype)
            return self._read(min(rows[0], rows[-1]), max(rows[0], rows[-1]) + 1)[:: rows.step]
        positions = np.asarray(index)
        first = positions.min(initial=self.shape[0])
        found: np.ndarray = self._read(first, positions.max(initial=-1) + 1)[positions - first]
        return found

    def _read(self, start: int, stop: int) -> np.ndarray:
        variables = self._variables.get()
        starts = block_starts(tuple(map(len, variables))).tolist()
        found = []
        for variable, (first, last) in zip(variables, itertools.pairwise(starts), strict=True):
            rows = slice(max(start, first) - first, max(min(stop, last) - first, 0))
            if rows.start < rows.stop:
                found.append(np.asarray(variable[rows].values, self.dtype))
        return np.concatenate(found) if found else np.empty(0, self.dtype)
