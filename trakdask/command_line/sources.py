"""Samples from what a configuration file can name: files, stores, and functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import xarray as xr

import trakdask as td
from trakdask.checks import import_callable, shown

__all__ = ["called", "expanded", "from_function", "from_npy", "from_torch", "from_zarr"]


def called(
    function: str, arguments: Mapping[str, Any] | None = None, item: int | None = None
) -> Any:
    """Return what a function returns that is named as ``"package.module:callable"``.

    Parameters
    ----------
    function
        Its name.
    arguments
        Its arguments by name.
    item
        Which of the values that it returns, from 0; all by default.

    Raises
    ------
    ValueError
        If it returns no such item.
    """
    result = import_callable(function, "function")(**(arguments or {}))
    if item is None:
        return result
    try:
        return result[item]
    except (LookupError, TypeError) as err:
        raise ValueError(
            f"expected item as the position of a value that {function} returns, got {item!r} of "
            f"{shown(result)}; try item: 0"
        ) from err


def from_function(
    function: str, arguments: Mapping[str, Any] | None = None, item: int | None = None
) -> xr.Dataset:
    """Return the Dataset of samples that a function returns; see :func:`called`.

    Raises
    ------
    TypeError
        If it returns something else.
    """
    samples = called(function, arguments, item)
    if not isinstance(samples, xr.Dataset):
        raise TypeError(
            f"expected a Dataset of samples from {function}, got {shown(type(samples).__name__)}; "
            "try item: 0 if it returns several, or td.from_arrays(...) in the function"
        )
    return samples


def from_npy(
    arrays: Mapping[str, str], *, coords: str | None = None, chunks: int = 512
) -> xr.Dataset:
    """Return samples of ``.npy`` files by name of the variable, and a table of metadata."""
    loaded = {name: np.load(path, mmap_mode="r") for name, path in arrays.items()}
    return td.from_arrays(loaded, coords=_table(coords), chunks=chunks)


def from_torch(
    dataset: str,
    *,
    names: str | Sequence[str | None],
    coords: str | None = None,
    chunks: int = 512,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> xr.Dataset:
    """Return samples of the torch Dataset that a function returns, and a table of metadata."""
    by_name = None if shapes is None else {name: tuple(shape) for name, shape in shapes.items()}
    return td.from_torch(dataset, names=names, coords=_table(coords), chunks=chunks, shapes=by_name)


def from_zarr(
    store: str, *, group: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> xr.Dataset:
    """Return samples that lie in a zarr store, as xarray writes it."""
    options = None if storage_options is None else dict(storage_options)
    samples: xr.Dataset = xr.open_zarr(
        store, group=group, storage_options=options, consolidated=False
    )
    return samples


def expanded(pattern: str) -> list[str]:
    """Return the files of a pattern such as ``checkpoints/*.pt``, sorted; one path is itself.

    Raises
    ------
    FileNotFoundError
        If there are none.

    Examples
    --------
    >>> expanded("model.pt")
    ['model.pt']
    """
    if not any(sign in pattern for sign in "*?["):
        return [pattern]
    system, _, paths = fsspec.get_fs_token_paths(pattern)
    if not paths:
        raise FileNotFoundError(f"expected files {pattern!r}, got none; try another pattern")
    is_url = "://" in pattern
    return sorted(system.unstrip_protocol(path) if is_url else path for path in paths)


def _table(path: str | None) -> pd.DataFrame | None:
    if path is None:
        return None
    return pd.read_csv(path) if path.endswith(".csv") else pd.read_parquet(path)
