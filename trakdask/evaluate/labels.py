"""Dimensions and labels of the results of evaluations, and checks of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask.checks import require_integer, require_number, shown

__all__ = [
    "BOUND",
    "BOUNDS",
    "DRAW",
    "SEED",
    "SUBSET",
    "as_array",
    "lazy_data",
    "lazy_results",
    "require_aligned",
    "require_bool",
    "require_bootstrap",
    "require_dataset",
    "require_dims",
    "require_fraction",
    "require_list",
    "require_positive",
    "require_seed",
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
    """Return a lazy Dataset of the arrays that one task computes from all inputs at once.

    ``variables`` maps the name of each array to its dimensions, shape and description; arrays are
    float64 unless ``dtypes`` says otherwise.
    """
    results = dask.delayed(function, pure=True)(*inputs)
    arrays = {}
    for name, (dims, shape, description) in variables.items():
        dtype = np.dtype((dtypes or {}).get(name, np.float64))
        data = da.from_delayed(results[name], shape, dtype=dtype)
        arrays[name] = (dims, data, {"description": description})
    return xr.Dataset(arrays)


def lazy_data(array: xr.DataArray) -> da.Array:
    """Return the array of a DataArray, made lazy if it is in memory."""
    data: da.Array = array.variable.chunk().data if array.chunks is None else array.data
    return data


def require_dims(
    array: object, *choices: tuple[str, ...], name: str, more: bool = False, remedy: str
) -> xr.DataArray:
    """Return a DataArray of numbers in the first order of dimensions that fits.

    With ``more``, further dimensions may follow.

    Raises
    ------
    TypeError
        If ``array`` is not a DataArray.
    ValueError
        If its dimensions are others, one of them is empty, or it does not hold real numbers.
    """
    needed = " or ".join(str(dims) for dims in choices).replace("'", "")
    if not isinstance(array, xr.DataArray):
        raise TypeError(
            f"expected {name} to be a DataArray {needed}, got a {type(array).__name__}; {remedy}"
        )
    fitting = (
        dims
        for dims in choices
        if set(dims) == set(array.dims) or (more and set(dims) < set(array.dims))
    )
    if (dims := next(fitting, None)) is None:
        raise ValueError(
            f"expected {name} with the dimensions {needed}, got "
            f"{tuple(map(str, array.dims))}; {remedy}"
        )
    if array.dtype.kind not in "fiub":
        raise ValueError(f"expected numbers in {name}, got dtype {array.dtype}; {remedy}")
    if empty := [str(dim) for dim, size in array.sizes.items() if size == 0]:
        raise ValueError(
            f"expected at least one {empty[0]} in {name}, got 0 along {empty[0]!r}; {remedy}"
        )
    return array.transpose(*dims, ...)


def require_dataset(
    result: object, variables: Mapping[str, tuple[str, ...]], name: str, remedy: str
) -> None:
    """Reject anything but a Dataset that has these variables with these dimensions, not empty.

    Raises
    ------
    TypeError
        If ``result`` is not a Dataset.
    ValueError
        If a variable is missing, has other dimensions, or is empty.
    """
    if not isinstance(result, xr.Dataset):
        raise TypeError(f"expected {name} to be a Dataset, got a {type(result).__name__}; {remedy}")
    if missing := [variable for variable in variables if variable not in result]:
        raise ValueError(
            f"expected {name} with the variable {missing[0]!r}, got a Dataset with "
            f"{shown(list(map(str, result.data_vars)))}; {remedy}"
        )
    for variable, dims in variables.items():
        array = result[variable]
        if set(array.dims) != set(dims) or 0 in array.shape:
            raise ValueError(
                f"expected {variable!r} of {name} with the dimensions {dims}, none of them empty, "
                f"got {tuple(map(str, array.dims))} of shape {array.shape}; {remedy}"
            )


def require_bool(masks: xr.DataArray, name: str) -> None:
    """Reject masks that are not bool.

    Raises
    ------
    ValueError
        If they have another dtype.
    """
    if masks.dtype != bool:
        raise ValueError(
            f"expected {name} of dtype bool, got {masks.dtype}; try {name}.astype(bool)"
        )


def require_aligned(
    dim: str, one: tuple[str, xr.DataArray], other: tuple[str, xr.DataArray], remedy: str
) -> None:
    """Reject two arrays that differ in size, or in their index, along a dimension.

    Raises
    ------
    ValueError
        If they differ.
    """
    require_size(dim, (one[0], one[1].sizes[dim]), (other[0], other[1].sizes[dim]), remedy)
    indexes = [array.indexes[dim] for _, array in (one, other) if dim in array.indexes]
    if len(indexes) == 2 and not indexes[0].equals(indexes[1]):
        position = int(np.argmax(np.asarray(indexes[0] != indexes[1])))
        label, other_label = (shown(index[position]) for index in indexes)
        raise ValueError(
            f"expected the same labels along {dim!r} in {one[0]} and {other[0]}, got {label} and "
            f"{other_label} at position {position}; {remedy}"
        )


def require_size(dim: str, one: tuple[str, int], other: tuple[str, int], remedy: str) -> None:
    """Reject two arrays that differ in size along a dimension.

    Raises
    ------
    ValueError
        If they differ.
    """
    if one[1] != other[1]:
        raise ValueError(
            f"expected the same {dim}s in {one[0]} and {other[0]}, got {one[1]} and {other[1]}; "
            f"{remedy}"
        )


def require_fraction(value: object, *, name: str, example: str) -> float:
    """Return a number strictly between 0 and 1."""
    return require_number(name, value, low=0, high=1, remedy=f"try {example}")


def require_positive(value: object, *, name: str, example: str) -> int:
    """Return an integer of at least 1."""
    return require_integer(name, value, 1, remedy=f"try {example}")


def require_seed(value: object, *, name: str) -> int:
    """Return an integer that NumPy's generators take as a seed."""
    return require_integer(name, value, 0, remedy=f"try {name}=0")


def require_bootstrap(resamples: object, seed: object, confidence: object) -> dict[str, Any]:
    """Return the checked options of a bootstrap over targets, by name."""
    return {
        "resamples": require_positive(resamples, name="resamples", example="resamples=1000"),
        "seed": require_seed(seed, name="seed"),
        "confidence": require_fraction(confidence, name="confidence", example="confidence=0.95"),
    }


def require_list(values: object, name: str) -> list[Any]:
    """Return several numbers as a list, whose entries are not checked.

    Raises
    ------
    TypeError
        If it is a single value, or a text.
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(
            f"expected a list of numbers for {name}, got {shown(values)}; try {name}=[{values}]"
        )
    return list(values)


def as_array(value: object, *, name: str, remedy: str) -> np.ndarray:
    """Return ``value`` as an array.

    Raises
    ------
    ValueError
        If NumPy cannot convert it to an array, for example because its rows differ in length.
    """
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as err:
        raise ValueError(
            f"expected an array for {name}, got {shown(value)} ({err}); {remedy}"
        ) from err
