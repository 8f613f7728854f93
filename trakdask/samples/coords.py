"""Metadata of samples as coords: in-memory numpy arrays of few, portable dtypes."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Container, Mapping
from typing import Any

import dask.base
import numpy as np
import pandas as pd
import torch
import xarray as xr

from trakdask import variables

__all__ = ["CoordsLike", "check_name", "normalise_coord", "normalise_coords"]

CoordsLike = Mapping[str, Any] | pd.DataFrame | None

# Dimensions, and what results hold beside the samples' coords.
_RESERVED = frozenset(variables.VARIABLES) | {
    variables.SAMPLE,
    variables.TARGET,
    variables.CHECKPOINT,
    variables.PROJ_DIM,
    variables.PROJ_DIM_1,
    variables.RANK,
}


def normalise_coords(coords: CoordsLike, names: Container[Any], n: int) -> dict[str, Any]:
    """Bring all coords of ``n`` samples into the form of :func:`normalise_coord`.

    Parameters
    ----------
    coords
        Mapping from name to values (n,), or a pandas DataFrame whose columns are the coords (its
        index is not used), or None.
    names
        The samples' variables: a coord may not have the name of one.
    n
        Number of samples.

    Returns
    -------
    Mapping from name to array (n,).

    Raises
    ------
    TypeError
        If ``coords`` is no mapping, or a coord is of a kind that has no portable dtype.
    ValueError
        If a coord has another length, missing values, or a name that is reserved or taken.
    """
    if coords is None:
        return {}
    if isinstance(coords, pd.DataFrame):
        _check_columns(coords)
        coords = {name: coords[name] for name in coords.columns}
    if not isinstance(coords, Mapping):
        raise TypeError(
            f"coords is a {type(coords).__name__}; needed a mapping from name to values, or a "
            "pandas DataFrame. Use coords={'label': labels}."
        )
    for name in coords:
        check_name(name, "coord")
        if name in names:
            raise ValueError(
                f"{name!r} is the name of a variable and of a coord; needed one of the two. Models "
                f"can read coords too: give {name!r} among the coords only."
            )
    return {name: normalise_coord(name, values, n) for name, values in coords.items()}


def normalise_coord(name: str, values: Any, n: int) -> np.ndarray[Any, Any]:
    """Bring one coord into memory as a one-dimensional numpy array of a portable dtype.

    Parameters
    ----------
    name
        Name of the coord.
    values
        (n,) numbers, booleans, strings or times: a list, numpy array, torch tensor, DataArray, or
        pandas Series, Index or Categorical (which is decoded).
    n
        Number of samples.

    Returns
    -------
    Array (n,), bool, integer, floating, ``datetime64[ns]`` or ``numpy.dtypes.StringDType()``.
    Values that have such a dtype are not copied.

    Raises
    ------
    TypeError
        If the values have no such dtype, or are still lazy.
    ValueError
        If the values have another shape, or some are missing.

    Notes
    -----
    Strings are ``StringDType``: zarr v3 stores it, xarray opens it as what it was, and parquet
    takes it, all without a warning. Fixed-width ``<U`` has no zarr v3 specification, and object
    arrays come back as ``StringDType``. NaN is a value of a floating coord; strings, integers and
    booleans cannot be missing.

    Examples
    --------
    >>> normalise_coord("source", ["web", "books"], 2).dtype
    StringDType()
    """
    array = _to_numpy(name, values)
    if array.shape != (n,):
        raise ValueError(
            f"coord {name!r} has shape {array.shape}; needed ({n},), one value per sample. Give "
            f"one value for each of the {n} samples."
        )
    return _portable(name, array)


def check_name(name: object, what: str) -> None:
    """Refuse names of dimensions and of what results hold.

    Parameters
    ----------
    name
        Name that a variable or coord is to have.
    what
        How the error calls it.

    Raises
    ------
    TypeError
        If the name is no string.
    ValueError
        If the name is reserved.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"the {what} name {name!r} is a {type(name).__name__}; needed a str. Rename it to "
            f"{str(name)!r}."
        )
    if name in _RESERVED or name.startswith(variables.TARGET_PREFIX):
        other = "sample_id" if name == variables.SAMPLE else f"my_{name}"
        raise ValueError(
            f"the {what} name {name!r} is reserved for what trakdask makes; needed another name. "
            f"Rename it, to {other!r} for instance."
        )


def _check_columns(frame: pd.DataFrame) -> None:
    if not frame.columns.is_unique:
        twice = list(frame.columns[frame.columns.duplicated()].unique())
        raise ValueError(
            f"the DataFrame has several columns named {twice}; needed one of each. Rename them."
        )


def _to_numpy(name: str, values: Any) -> np.ndarray[Any, Any]:
    if dask.base.is_dask_collection(values):
        raise TypeError(
            f"coord {name!r} is lazy ({type(values).__name__}); needed values in memory. Use "
            f"{name}.compute()."
        )
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    if isinstance(values, xr.DataArray | xr.Variable):
        return np.asarray(values.values)
    if isinstance(values, pd.Series | pd.Index | pd.Categorical):
        return _from_pandas(name, pd.Series(values))
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise TypeError(
            f"coord {name!r} is a {type(values).__name__}; needed one value per sample. Give a "
            "list or an array."
        )
    # As objects first: numpy would write [1, "a"] as two strings.
    return np.fromiter(values, dtype=object, count=len(values))


def _from_pandas(name: str, series: pd.Series[Any]) -> np.ndarray[Any, Any]:
    if isinstance(series.dtype, pd.CategoricalDtype):
        categories = np.asarray(series.cat.categories)
        codes = series.cat.codes.to_numpy()
        _check_present(name, codes < 0)
        return _portable(name, categories)[codes] if len(categories) else categories
    if isinstance(series.dtype, pd.DatetimeTZDtype):
        raise TypeError(
            f"coord {name!r} has the time zone {series.dtype.tz}; needed times without one. Use "
            f"{name}.dt.tz_convert('UTC').dt.tz_localize(None)."
        )
    if series.dtype.kind in "biu":  # of pandas' own dtypes, that can lack values
        _check_present(name, series.isna())
    return series.to_numpy()


def _portable(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.dtype.kind == "O":
        array = _from_objects(name, array)
    if array.dtype.kind in "biu" or (array.dtype.kind == "f" and array.dtype.itemsize <= 8):
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.kind == "M":
        return _nanoseconds(name, array)
    if array.dtype.kind in "UT":
        return _strings(name, array)
    raise TypeError(
        f"coord {name!r} has dtype {array.dtype}; needed numbers, booleans, strings or times. Use "
        f"{name}.astype(str), or leave it out."
    )


def _from_objects(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    _check_present(name, np.asarray(pd.isna(array)) & ~_is_nan(array))
    kinds = {type(value) for value in array}
    if all(issubclass(kind, str) for kind in kinds):
        return array.astype(np.dtypes.StringDType())
    if all(issubclass(kind, datetime.date | np.datetime64) for kind in kinds):
        return _from_pandas(name, pd.Series(pd.to_datetime(list(array))))
    if all(issubclass(kind, int | float | np.number | np.bool_) for kind in kinds):
        return np.array(array.tolist())
    raise TypeError(
        f"coord {name!r} holds {sorted(kind.__name__ for kind in kinds)}; needed one of numbers, "
        f"booleans, strings or times. Use {name}.astype(str), or leave it out."
    )


def _is_nan(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Tell which objects are NaN beside numbers: the one missing value that has a place there."""
    if any(isinstance(value, str) for value in array):
        return np.zeros(array.shape, bool)
    return np.array([isinstance(value, float | np.floating) for value in array], dtype=bool)


def _strings(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if hasattr(array.dtype, "na_object"):
        _check_present(name, pd.isna(array.astype(object)))
    return array.astype(np.dtypes.StringDType(), copy=False)


def _nanoseconds(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = array.astype("datetime64[ns]", copy=False)
    same = (times.astype(array.dtype) == array) | np.isnat(array)
    if not same.all():
        raise ValueError(
            f"coord {name!r} holds {array[~same][0]}; needed times that datetime64[ns] can hold, "
            f"1677 to 2262. Use {name}.astype(str)."
        )
    return times


def _check_present(name: str, missing: Any) -> None:
    missing = np.asarray(missing)
    if missing.any():
        raise ValueError(
            f"coord {name!r} has {int(missing.sum())} missing values, the first for sample "
            f"{int(missing.argmax())}; needed a value for every sample. Fill them first: "
            f"{name}.fillna('') for strings, .fillna(-1) for integers."
        )
