"""Samples that a configuration describes, by the ``kind`` of their section."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import xarray as xr
from zarr.storage import LocalStore

import trakdask as td
from trakdask.checks import import_callable, require_choice
from trakdask.files import is_url, matching
from trakdask.variables import CHECKPOINT, SAMPLE, TRAINED_ON


def described(options: dict[str, Any]) -> xr.Dataset:
    """Return the samples that a section describes."""
    masks = options.pop("trained_on", None)
    samples: xr.Dataset = of_kind(options, _KINDS)
    if masks is None:
        return samples
    return samples.assign_coords({TRAINED_ON: ((CHECKPOINT, SAMPLE), np.load(masks))})


def of_kind(options: dict[str, Any], kinds: Mapping[str, Callable[..., Any]]) -> Any:
    """Call the function that ``kind`` names, with the other options, and return its result."""
    kind = options.pop("kind", None)
    require_choice("kind", kind, list(kinds), remedy=f"try kind: {next(iter(kinds))}")
    if isinstance(inner := options.get("then"), dict):  # of a mask
        options["then"] = of_kind(dict(inner), kinds)
    return kinds[str(kind)](**options)


def called(
    function: str, arguments: Mapping[str, Any] | None = None, item: int | None = None
) -> Any:
    """Return the result of the function ``"package.module:callable"``, or an item of it."""
    returned = import_callable(function, "function")(**(arguments or {}))
    return returned if item is None else returned[item]


def named(text: str) -> tuple[xr.Dataset, xr.Dataset | None]:
    """Return the training samples that a text names, and the targets where it names both.

    Parameters
    ----------
    text
        The path of a zarr store, or ``"package.module:function"``: the function returns a Dataset
        or, as :func:`trakdask.examples.digits` does, a pair of them.
    """
    is_function = ":" in text and not is_url(text) and not Path(text).exists()
    samples = called(text) if is_function else opened_zarr(text, consolidated=False)
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
    system, paths = matching(pattern)
    if not paths:
        raise FileNotFoundError(f"expected files {pattern!r}, got none; try another pattern")
    return [system.unstrip_protocol(path) if is_url(pattern) else path for path in paths]


def opened_zarr(path: str, **options: Any) -> xr.Dataset:
    """Open a zarr group; zarr itself takes a folder ``a::b`` for a chain of protocols."""
    is_folder = "::" in path and not is_url(path)
    opened: xr.Dataset = xr.open_zarr(LocalStore(path) if is_folder else path, **options)
    return opened


def _from_csv(
    source: str, *, variables: Mapping[str, str | list[str]], **options: Any
) -> xr.Dataset:
    """Return samples of the rows of one or several files, which are read into memory."""
    inputs = [[names] if isinstance(names, str) else names for names in variables.values()]
    read = functools.partial(_read_csv, numbers=[*itertools.chain(*inputs)])
    rows = pd.concat(map(read, expanded(source)), ignore_index=True)
    for names in inputs:
        if np.result_type(*rows[names].dtypes) == np.float64:
            # Text has no dtype; models have this one, also for the integers beside decimals.
            rows = rows.astype(dict.fromkeys(names, "float32"))
    return td.from_dataframe(rows, variables=variables, **options)


def _read_csv(path: str, numbers: Iterable[str] = ()) -> pd.DataFrame:
    """Return the rows of a file, in which some columns must have a number in every row."""
    try:
        rows = pd.read_csv(path)
        for name in numbers:
            rows[name] = pd.to_numeric(rows[name])
            if rows[name].isna().any():
                raise ValueError(
                    f"expected a number in every row of column {name!r}, got none in row "
                    f"{rows[name].isna().argmax() + 1}; try to leave such rows out"
                )
    except (KeyError, ValueError) as err:
        raise ValueError(f"{path}: {err}") from err
    return rows


def _from_npy(
    arrays: Mapping[str, str], *, coords: str | None = None, chunks: int | Literal["auto"] = "auto"
) -> xr.Dataset:
    """Return samples of ``.npy`` files by name of the variable, and a table of metadata."""
    loaded = {name: np.load(path, mmap_mode="r") for name, path in arrays.items()}
    return td.from_arrays(loaded, coords=_table(coords), chunks=chunks)


def _from_torch(
    dataset: str, *, names: str | Sequence[str | None], coords: str | None = None, **options: Any
) -> xr.Dataset:
    """Return samples of the torch Dataset that a function returns, and a table of metadata."""
    if "collate_fn" in options:
        options["collate_fn"] = import_callable(options["collate_fn"], "collate_fn")
    return td.from_torch(dataset, names=names, coords=_table(coords), **options)


def _table(path: str | None) -> pd.DataFrame | None:
    if path is None:
        return None
    return _read_csv(path) if path.endswith(".csv") else pd.read_parquet(path)


_KINDS: Mapping[str, Callable[..., xr.Dataset]] = {
    "table": td.from_dataframe,
    "csv": _from_csv,
    "arrays": _from_npy,
    "torch": _from_torch,
    "zarr": functools.partial(opened_zarr, consolidated=False),
    "function": called,
}
"""The functions that make samples, by the ``kind`` of a section."""
