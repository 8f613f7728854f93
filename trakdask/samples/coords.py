"""Convert metadata of samples to coords: in-memory numpy arrays of portable dtypes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import dask.base
import numpy as np
import pandas as pd
import xarray as xr

from trakdask import variables
from trakdask.checks import is_tensor, shown
from trakdask.variables import CHECKPOINT, PROJ_DIM, PROJ_DIM_1, RANK, SAMPLE, TARGET

# Names of dimensions, and of variables that results have in addition to the samples' coords.
_RESERVED = {*variables.VARIABLES, SAMPLE, TARGET, CHECKPOINT, PROJ_DIM, PROJ_DIM_1, RANK}


def normalise_coords(
    coords: Mapping[str, Any] | pd.DataFrame | Sequence[str] | None, n: int
) -> dict[str, Any]:
    """Convert all coords of ``n`` samples as :func:`normalise_coord` does.

    Parameters
    ----------
    coords
        Mapping from name to values (n,), or a pandas DataFrame whose columns are the coords, or
        None.
    n
        Number of samples.

    Returns
    -------
    Mapping from name to array (n,).

    Raises
    ------
    TypeError
        If ``coords`` is not a mapping, or the values of a coord have no portable dtype.
    ValueError
        If a coord has a different length, missing values, or a name that is reserved.
    """
    if coords is None:
        return {}
    check_names(named := by_name(coords))
    return {name: normalise_coord(name, values, n) for name, values in named.items()}


def by_name(coords: Any) -> dict[Any, Any]:
    """Return the values of coords by name, of a mapping or a DataFrame.

    Raises
    ------
    TypeError
        If they are neither.
    """
    if not isinstance(coords, Mapping | pd.DataFrame):
        raise TypeError(
            "expected values by name, or a pandas DataFrame, as coords, got "
            f"{type(coords).__name__}; try coords={{'label': labels}}"
        )
    return {name: coords[name] for name in coords}


def fields_as_coords(coords: Any, names: Collection[str]) -> list[str]:
    """Return the names if ``coords`` is a list of fields of the samples, and else none.

    Parameters
    ----------
    coords
        The option as the user gave it.
    names
        Names of all fields.

    Raises
    ------
    ValueError
        If a name belongs to no field.
    """
    if not isinstance(coords, list | tuple) or not all(isinstance(name, str) for name in coords):
        return []
    if unknown := [name for name in coords if name not in names]:
        raise ValueError(
            f"expected fields of the samples as coords, got {unknown[0]!r}; try one of "
            f"{list(names)}, or coords={{{unknown[0]!r}: values}}"
        )
    return list(coords)


def normalise_coord(name: str, values: Any, n: int) -> np.ndarray[Any, Any]:
    """Convert one coord to a one-dimensional numpy array of a portable dtype, in memory.

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
    Values that already have such a dtype are not copied.

    Raises
    ------
    TypeError
        If the values have no such dtype, or are still lazy.
    ValueError
        If the values have a different shape, some are missing, or an index says that they are in
        another order than the samples.

    Notes
    -----
    Strings become ``StringDType``, which zarr v3 can store, xarray reads back unchanged, and
    parquet accepts, all without a warning. Fixed-width ``<U`` has no zarr v3 specification, and
    object arrays are read back as ``StringDType``. NaN is allowed in floating-point coords;
    strings, integers and booleans cannot be missing.

    Examples
    --------
    >>> normalise_coord("source", ["web", "books"], 2).dtype
    StringDType()
    """
    array = _to_numpy(name, values)
    if array.shape != (n,):
        of_samples = f"expected one value for each of the {n} samples"
        raise ValueError(f"{of_samples} in coord {name!r}, got shape {array.shape}")
    # Strings of a dtype with ``na_object`` may be missing.
    if array.dtype.kind == "O" or hasattr(array.dtype, "na_object"):
        array = _from_objects(name, array.astype(object, copy=False))
    # No long double, whose size depends on the machine.
    if array.dtype.kind in "biu" or (array.dtype.kind == "f" and array.dtype.itemsize <= 8):
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.kind == "M":
        times = pd.Series(array)
        try:
            return times.astype("datetime64[ns]").to_numpy()
        except pd.errors.OutOfBoundsDatetime as err:
            low, high = pd.Timestamp.min, pd.Timestamp.max
            at = int(((times < low) | (times > high)).argmax())
            raise ValueError(
                f"expected dates from {low:%Y-%m-%d} to {high:%Y-%m-%d} for coord {name!r}, which "
                f"nanoseconds can say, got {array[at]} for sample {at}; try the dates as text, "
                f"pd.Series({name}).astype(str), or their years as numbers"
            ) from err
    if array.dtype.kind in "UT":
        return array.astype(np.dtypes.StringDType(), copy=False)
    remedy = f"pd.Series({name}).astype(str)"
    if any(getattr(value, "tzinfo", None) is not None for value in array):
        remedy = f"pd.DatetimeIndex(pd.to_datetime({name}, utc=True)).tz_localize(None)"
    if any(map(pd.api.types.is_list_like, array)):
        remedy = "leaving it out; td.group_score shows how samples belong to several groups"
    raise TypeError(
        "expected numbers, booleans, strings or times without a time zone for coord "
        f"{name!r}, got dtype {array.dtype} of "
        f"{sorted({type(value).__name__ for value in array})}; try {remedy}"
    )


def check_names(names: Iterable[object]) -> None:
    """Reject names of variables or coords that a dimension or a variable of results already has.

    Raises
    ------
    TypeError
        If a name is not a string.
    ValueError
        If a name is reserved.
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"expected a str as name, got {name!r} ({type(name).__name__})")
        of_target = name.startswith(variables.TARGET_PREFIX)
        variables.require_new([name], [name] if of_target else _RESERVED)


def _to_numpy(name: str, values: Any) -> np.ndarray[Any, Any]:
    if dask.base.is_dask_collection(values):
        raise TypeError(f"expected coord {name!r} in memory, got a lazy one; try .compute()")
    if is_tensor(values) or isinstance(values, np.ndarray):
        return to_numpy(f"coord {name!r}", values)
    is_list = hasattr(values, "__len__")
    if not is_list or isinstance(values, str | bytes | Mapping | set | frozenset):
        raise TypeError(
            f"expected values of coord {name!r} in the order of the samples, got {shown(values)}; "
            "try a list with one value for each sample"
        )
    if isinstance(values, xr.DataArray):
        require_order(f"coord {name!r}", *values.indexes.values())
    if isinstance(values, xr.DataArray | xr.Variable | pd.DataFrame):  # of columns with one name
        return np.asarray(values)
    if isinstance(values, pd.Series | pd.Index | pd.Categorical):
        require_order(f"coord {name!r}", *([values.index] if isinstance(values, pd.Series) else []))
        return _from_pandas(pd.Series(values))
    # As objects first: numpy would write [1, "a"] as two strings.
    return np.fromiter(values, dtype=object, count=len(values))


def require_order(what: str, *indexes: pd.Index[Any]) -> None:
    """Reject values whose index does not number them in their order, as after a shuffle."""
    for index in indexes:
        if not index.equals(pd.RangeIndex(len(index))):
            raise ValueError(
                f"expected {what} with the index 0 to {len(index) - 1}, as the samples are "
                f"numbered, got one that begins {shown(index[:4].tolist())}; try "
                ".reset_index(drop=True) if the rows are in the order of the samples, or "
                f".loc[range({len(index)})] if the index numbers the samples"
            )


def to_numpy(what: str, values: Any, dtype: Any = None) -> np.ndarray[Any, Any]:
    """Convert a tensor, a number or (nested) lists; bfloat16, which numpy lacks, to float32."""
    try:
        if is_tensor(values):
            # Tensors may be conjugated or negated by a flag alone, which numpy does not know.
            values = values.detach().cpu().resolve_conj().resolve_neg()
            values = (values.float() if str(values.dtype) == "torch.bfloat16" else values).numpy()
        # numpy drops the masks of arrays in a list, and asarray the mask of an array.
        elif isinstance(values, list | tuple) and any(map(np.ma.isMaskedArray, values)):
            values = np.ma.stack(values)
        array = np.asanyarray(values, dtype)
    except (TypeError, RuntimeError, OverflowError, ValueError) as err:
        raise ValueError(f"numpy cannot read the values of {what}: {err}; try one shape") from err
    if np.ma.is_masked(array):
        masked = np.ma.getmaskarray(array).reshape(len(array), -1).any(axis=1)
        raise ValueError(
            f"expected {what} without a mask, got {int(masked.sum())} masked samples, first sample "
            f"{int(masked.argmax())}; try array.filled(value), or leaving them out"
        )
    return np.asarray(array)


def _from_pandas(series: pd.Series[Any]) -> np.ndarray[Any, Any]:
    if isinstance(series.dtype, pd.CategoricalDtype):
        series = series.astype(series.cat.categories.dtype)
    if series.dtype.kind in "biu" and series.hasnans:  # else these would become floats
        series = series.astype(object)
    return series.to_numpy()


def _from_objects(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return objects of one kind as an array of it, and others as they are."""
    kind = pd.api.types.infer_dtype(array, skipna=False)
    if kind == "string":
        return array.astype(np.dtypes.StringDType())
    if kind in ("date", "datetime", "datetime64"):
        with suppress(ValueError):  # of several time zones
            return _from_pandas(pd.Series(pd.to_datetime(list(array))))
    if kind in ("boolean", "integer", "floating", "mixed-integer-float"):
        # numpy finds the dtype of Python's numbers, but not that of an array of objects.
        return np.array(array.tolist())
    if (missing := np.asarray(pd.isna(array))).any():
        raise ValueError(
            f"expected all values of coord {name!r}, which lacks {int(missing.sum())} of them, the "
            f"first for sample {int(missing.argmax())}; try {name}.fillna('') or .fillna(-1)"
        )
    return array
