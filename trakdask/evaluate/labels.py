"""Dimensions of evaluations, how results get their labels, and the checks at the door."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

__all__ = [
    "BOUND",
    "BOUNDS",
    "DRAW",
    "SEED",
    "SUBSET",
    "coords_along",
    "lazy_data",
    "lazy_results",
    "require_dims",
    "require_fraction",
    "require_positive",
    "require_size",
]

SUBSET = "subset"
SEED = "seed"
DRAW = "draw"
BOUND = "bound"
BOUNDS = np.array(["low", "high"])


def lazy_results(
    function: Callable[..., Mapping[str, np.ndarray]],
    *inputs: Any,
    variables: Mapping[str, tuple[tuple[Hashable, ...], tuple[int, ...], str]],
    dtypes: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Make a Dataset of what one task returns that has all of its inputs.

    ``variables`` has dimensions, shape and description of each array, which is float64 unless
    ``dtypes`` says otherwise.
    """
    results = dask.delayed(function, pure=True)(*inputs)
    found = {}
    for name, (dims, shape, description) in variables.items():
        dtype = np.dtype((dtypes or {}).get(name, np.float64))
        data = da.from_delayed(results[name], shape, dtype=dtype)
        found[name] = (dims, data, {"description": description})
    return xr.Dataset(found)


def lazy_data(array: xr.DataArray) -> da.Array:
    """Return the array of a DataArray, made lazy if it is in memory."""
    data: da.Array = array.variable.chunk().data if array.chunks is None else array.data
    return data


def coords_along(array: xr.DataArray | xr.Dataset, *dims: Hashable) -> dict[Hashable, Any]:
    """Return the coords that run along one of the dimensions and no other."""
    return {
        name: coord.variable
        for name, coord in array.coords.items()
        if len(coord.dims) == 1 and coord.dims[0] in dims
    }


def require_dims(
    array: object, *choices: tuple[str, ...], name: str, more: bool = False, remedy: str
) -> xr.DataArray:
    """Return the DataArray in the first order of dimensions that it has; ``more`` may follow."""
    if isinstance(array, xr.DataArray):
        for dims in choices:
            if set(dims) == set(array.dims) or (more and set(dims) <= set(array.dims)):
                return array.transpose(*dims, ...)
    found = array.dims if isinstance(array, xr.DataArray) else type(array).__name__
    needed = " or ".join(str(dims) for dims in choices).replace("'", "")
    raise ValueError(f"{name} is {found}; needed a DataArray {needed}. {remedy}")


def require_size(dim: str, found: tuple[str, int], needed: tuple[str, int], remedy: str) -> None:
    """Refuse two arrays that differ along a dimension."""
    if found[1] != needed[1]:
        raise ValueError(
            f"{found[0]} has {found[1]} along {dim!r}, {needed[0]} has {needed[1]}; needed the "
            f"same {dim}s, in the same order. {remedy}"
        )


def require_fraction(value: Any, *, name: str, example: str) -> float:
    """Return a number strictly between 0 and 1."""
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not is_number or not 0 < value < 1:
        raise ValueError(f"{name} is {value!r}; needed a number between 0 and 1. Type {example}.")
    return float(value)


def require_positive(value: Any, *, name: str, example: str) -> int:
    """Return an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} is {value!r}; needed an integer >= 1. Type {example}.")
    return int(value)
