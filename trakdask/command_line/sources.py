"""Samples from what a configuration file can name: files, stores, and functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import xarray as xr

import trakdask as td
from trakdask.checks import import_callable

__all__ = ["KINDS", "called", "expanded", "named"]


def called(function: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """Return what a function returns that is named as ``"package.module:callable"``."""
    return import_callable(function, "function")(**(arguments or {}))


def named(text: str) -> tuple[xr.Dataset, xr.Dataset | None]:
    """Return the samples that a text names, and those of the targets where it names both.

    Parameters
    ----------
    text
        The path of a zarr store, or ``"package.module:function"``: the function returns a Dataset
        or, as :func:`trakdask.examples.digits` does, a pair of them.
    """
    is_function = ":" in text and "://" not in text and not Path(text).exists()
    samples = called(text) if is_function else _from_zarr(text)
    training, targets = samples if isinstance(samples, tuple) else (samples, None)
    return training, targets


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


def _from_function(
    function: str, arguments: Mapping[str, Any] | None = None, item: int | None = None
) -> xr.Dataset:
    """Return the Dataset of samples that a function returns, or that is an item of it."""
    samples = called(function, arguments)
    if item is not None:
        items = samples if isinstance(samples, (tuple, list)) else ()
        if item not in range(len(items)):
            kind = type(samples).__name__
            raise ValueError(
                f"expected item as a position in the {kind} of {function}, got {item!r}"
            )
        samples = items[item]
    if not isinstance(samples, xr.Dataset):
        raise TypeError(
            f"expected a Dataset of samples from {function}, got {type(samples).__name__!r}; try "
            "item: 0 if it returns several, or td.from_arrays(...) in the function"
        )
    return samples


def _from_table(**options: Any) -> xr.Dataset:
    return td.from_dataframe(**options)


def _from_csv(
    source: str, *, variables: Mapping[str, str | list[str]], **options: Any
) -> xr.Dataset:
    """Return samples of the rows of one or several files, which are read into memory."""
    rows = pd.concat(map(pd.read_csv, expanded(source)), ignore_index=True)
    inputs = rows.filter(np.hstack([*variables.values()])).select_dtypes("float64")
    rows = rows.astype(dict.fromkeys(inputs, "float32"))  # text has no dtype; models have this one
    return td.from_dataframe(rows, variables=variables, **options)


def _from_npy(
    arrays: Mapping[str, str], *, coords: str | None = None, chunks: int = 512
) -> xr.Dataset:
    """Return samples of ``.npy`` files by name of the variable, and a table of metadata."""
    loaded = {name: np.load(path, mmap_mode="r") for name, path in arrays.items()}
    return td.from_arrays(loaded, coords=_table(coords), chunks=chunks)


def _from_torch(
    dataset: str, *, names: str | Sequence[str | None], coords: str | None = None, **options: Any
) -> xr.Dataset:
    """Return samples of the torch Dataset that a function returns, and a table of metadata."""
    return td.from_torch(dataset, names=names, coords=_table(coords), **options)


def _from_zarr(
    store: str, *, group: str | None = None, storage_options: dict[str, Any] | None = None
) -> xr.Dataset:
    """Return samples that lie in a zarr store, as xarray writes it."""
    samples: xr.Dataset = xr.open_zarr(
        store, group=group, storage_options=storage_options, consolidated=False
    )
    return samples


def _table(path: str | None) -> pd.DataFrame | None:
    if path is None:
        return None
    return pd.read_csv(path) if path.endswith(".csv") else pd.read_parquet(path)


KINDS: Mapping[str, Callable[..., xr.Dataset]] = {
    "table": _from_table,
    "csv": _from_csv,
    "arrays": _from_npy,
    "torch": _from_torch,
    "zarr": _from_zarr,
    "function": _from_function,
}
"""The functions that make samples, by the ``kind`` of a section."""
