"""Samples that a configuration describes, by the ``kind`` of their section."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
import pandas as pd
import xarray as xr
from zarr.storage import LocalStore

import trakdask as td
from trakdask.checks import import_callable, require_choice, shown
from trakdask.command_line.configuration import require_form, require_keys
from trakdask.files import is_url, matching
from trakdask.samples.fingerprints import content_of_folder
from trakdask.samples.sources import known_by
from trakdask.variables import CHECKPOINT, SAMPLE, TRAINED_ON


def described(options: dict[str, Any]) -> xr.Dataset:
    """Return the samples that a section describes."""
    masks = options.pop("trained_on", None)
    samples: xr.Dataset = of_kind(options, _KINDS)
    if masks is None:
        return samples
    require_form("trained_on", masks, str, remedy="trained_on: masks.npy")
    return samples.assign_coords(
        {TRAINED_ON: ((CHECKPOINT, SAMPLE), np.array(_array(TRAINED_ON, masks)))}
    )


def of_kind(options: dict[str, Any], kinds: Mapping[str, Callable[..., Any]]) -> Any:
    """Call the function that ``kind`` names, with the other options, and return its result."""
    kind = options.pop("kind", None)
    require_choice("kind", kind, list(kinds), remedy="see `trakdask init`")
    if isinstance(inner := options.get("then"), dict):  # of a mask
        options["then"] = of_kind(dict(inner), kinds)
    require_keys(options, kinds[str(kind)])
    return kinds[str(kind)](**options)


def called(
    function: str, arguments: Mapping[str, Any] | None = None, item: int | None = None
) -> Any:
    """Return the result of the function ``"package.module:callable"``, or an item of it."""
    require_form("arguments", arguments or {}, dict, remedy="arguments: {seed: 0}")
    if item is not None:
        require_form("item", item, int, remedy="item: 0")
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
    # A folder may be named "a:b", and goes first.
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
    require_form("source", pattern, str, remedy="source: rows/*.csv")
    # One path stays as it is: whoever reads it says what is wrong with it.
    if not any(sign in pattern for sign in "*?["):
        return [pattern]
    system, paths = matching(pattern)
    if not paths:
        raise FileNotFoundError(f"expected files {pattern!r}, got none; try another pattern")
    return [system.unstrip_protocol(path) if is_url(pattern) else path for path in paths]


def opened_zarr(path: str, **options: Any) -> xr.Dataset:
    """Open a zarr group; zarr itself takes a folder ``a::b`` for a chain of protocols."""
    is_folder = "::" in path and not is_url(path)
    return xr.open_zarr(LocalStore(path) if is_folder else path, **options)


def _from_csv(
    source: str, *, variables: Mapping[str, str | list[str]], **options: Any
) -> xr.Dataset:
    """Return samples of the rows of one or several files, which are read into memory."""
    require_keys({"source": source, "variables": variables, **options}, td.from_dataframe)
    require_form("variables", variables, dict, remedy="variables: {x: [height, weight]}")
    for name, columns in variables.items():
        require_form(f"variables.{name}", columns, str, list, remedy=f"{name}: column")
    inputs = [[names] if isinstance(names, str) else names for names in variables.values()]
    # Only columns that the model reads have to be numbers; the others are metadata.
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
            require_choice("a column", name, [*map(str, rows)], remedy="try one of these")
            rows[name] = pd.to_numeric(rows[name])
            if rows[name].isna().any():
                raise ValueError(
                    f"expected a number in every row of column {name!r}, got none in row "
                    f"{rows[name].isna().argmax() + 1}; try to leave such rows out"
                )
    except (KeyError, ValueError) as err:
        raise ValueError(f"{path}: {err}") from err
    return rows


def _from_files(
    arrays: str | Mapping[str, str],
    *,
    coords: str | Sequence[str] | Mapping[str, str] | None = None,
    chunks: int | Literal["auto"] = "auto",
) -> xr.Dataset:
    """Return samples of arrays in ``.npy`` and ``.npz`` files, and metadata of them or a table."""
    loaded = _arrays("arrays", arrays)
    metadata: Any = coords
    is_list = isinstance(coords, list) and all(isinstance(x, str) for x in coords)
    if isinstance(coords, Mapping):
        metadata = _arrays("coords", coords)
    elif isinstance(coords, str) and Path(coords).suffix:
        is_csv = coords.endswith(".csv")  # else the file may bring a shuffled index
        metadata = _read_csv(coords) if is_csv else pd.read_parquet(coords).reset_index(drop=True)
    elif coords is not None and not is_list:
        names = f"[{coords}]" if coords in loaded else "metadata.csv"
        raise TypeError(
            "expected coords as a .csv or .parquet file of metadata, or a list of names among "
            f"{[*loaded]}, got {shown(coords)}; try coords: {names}"
        )
    return td.from_arrays(loaded, coords=metadata, chunks=chunks)


def _arrays(key: str, described: Any) -> dict[str, np.ndarray]:
    """Return arrays by name: of files by name, or all that one ``.npz`` file has."""
    if isinstance(described, str) and described.endswith(".npz"):
        with _opened(described) as file:
            described = {name: f"{described}:{name}" for name in file}
    remedy = f"{key}: {{image: image.npy, label: train.npz:label}}, or {key}: train.npz"
    require_form(key, described, dict, remedy=remedy)
    for name, path in described.items():
        require_form(f"{key}.{name}", path, str, remedy=remedy)
    return {name: _array(name, path) for name, path in described.items()}


def _array(name: str, path: str) -> np.ndarray:
    """Return the array of a ``.npy`` file, or of ``"train.npz:x"``; by default it has the name."""
    # The last colon: a path may have others.
    path, _, member = path.rpartition(":") if ".npz:" in path else (path, "", name)
    loaded = _opened(path)
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        if member not in loaded:
            raise ValueError(
                f"expected an array of {path!r} for {name!r}, got {path}:{member}, which has only "
                f"{', '.join(loaded)}; try {path}:{next(iter(loaded), 'name')}"
            )
        try:
            array: np.ndarray = loaded[member]
        except ValueError as err:
            raise TypeError(
                f"expected numbers or text in {path}:{member}, got {err}; try saving "
                f"np.array({member}, str)"
            ) from err
    return array


def _opened(path: str) -> Any:
    try:
        # Of .npy files only the head is read here. In .npz files arrays cannot be mapped.
        return np.load(path, mmap_mode="r")
    except (EOFError, ValueError, BadZipFile) as err:
        raise ValueError(
            f"expected a complete .npy or .npz file, got {path!r}: {err}; try np.savez"
        ) from err


def _from_zarr(store: str, group: str | None = None, **options: Any) -> xr.Dataset:
    """Return the samples of a store; those of a local one are known by what its files contain."""
    require_form("store", store, str, remedy="store: samples.zarr")
    opened = opened_zarr(store, group=group, **{"consolidated": False, **options})
    if not os.path.isdir(folder := os.path.join(store, group or "")):
        return opened
    # Dask would name the arrays by the path: a store that was moved, or only touched, would seem to
    # be another one.
    token = content_of_folder(folder)
    lazy = {str(n): known_by(token, str(n), x.data) for n, x in opened.items() if x.chunks}
    return opened.assign(
        {n: (opened[n].dims, v.data, opened[n].attrs | v.attrs) for n, v in lazy.items()}
    )


_KINDS: Mapping[str, Callable[..., xr.Dataset]] = {
    "table": td.from_dataframe,
    "csv": _from_csv,
    "arrays": _from_files,
    "zarr": _from_zarr,
    "function": called,
}
"""The functions that make samples, by the ``kind`` of a section."""
