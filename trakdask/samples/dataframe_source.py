"""Create samples from rows of a table: parquet files, pandas or dask DataFrames."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import xarray as xr

from trakdask.execution.handles import Spooled
from trakdask.samples.array_source import lazy_variables
from trakdask.samples.blocks import Field, assemble, check_chunks, read_bundle
from trakdask.samples.coords import normalise_coords
from trakdask.samples.parquet import ParquetRows, stack

__all__ = ["from_dataframe"]

Array = np.ndarray[Any, Any]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_Table = tuple[dict[str, da.Array], dict[str, Any], int]


def from_dataframe(
    source: Paths | pd.DataFrame | Any,
    *,
    variables: Mapping[str, str],
    coords: Sequence[str] = (),
    chunks: int = 512,
) -> xr.Dataset:
    """Create a Dataset of samples from the rows of a table.

    Parameters
    ----------
    source
        Parquet files that are read inside tasks: a path, URL, glob or folder, or a list of these.
        Or a pandas or dask DataFrame.
    variables
        Model inputs: name of the variable -> column. Columns have numbers, or lists of equal
        length, which become (sample, length).
    coords
        Columns of metadata, loaded into memory: strings, categoricals (decoded), numbers or times.
    chunks
        Samples per block, and thus per task.

    Returns
    -------
    Dataset as of :func:`from_arrays`. Samples are in the order of the files (those of a glob or
    folder are sorted by name) and of their rows.

    Raises
    ------
    TypeError
        If the source is not a table, or a variable's column is not numeric.
    ValueError
        If there are no rows, a column is missing, or for the reasons given in :func:`from_arrays`.
        When computed, if the lists of a column differ in length or a value is missing; the message
        names the row.

    Notes
    -----
    Parquet: this function reads the footers, the first row and the coords, but no variable. A task
    reads complete row groups that contain its samples, so write row groups of about ``chunks``
    rows. In ``attrs["source"]`` files are identified by path, size and modification time. pandas:
    columns stay in memory, as in :func:`from_arrays`. dask DataFrame: the length of each partition,
    the coords and the first row are computed here, in one call.

    Examples
    --------
    >>> import pandas as pd
    >>> frame = pd.DataFrame({"tokens": [[1, 2], [3, 4]], "lang": ["en", "de"]})
    >>> train = from_dataframe(frame, variables={"input_ids": "tokens"}, coords=["lang"])
    >>> train.input_ids.shape, train.lang.values.tolist()
    ((2, 2), ['en', 'de'])
    """
    size = check_chunks(chunks)
    coords = _check_coords(coords)
    _check_variables(variables)
    if isinstance(source, pd.DataFrame):
        table = _from_pandas(source, variables, coords, size)
    elif isinstance(source, dd.DataFrame):
        table = _from_dask(source, variables, coords, size)
    elif isinstance(source, str | os.PathLike | list | tuple):
        table = _from_parquet(source, variables, coords, size)
    else:
        raise TypeError(
            "expected parquet paths, or a pandas or dask DataFrame, as source, got "
            f"{type(source).__name__}; try "
            + ("source.to_pandas()." if hasattr(source, "to_pandas") else "a path.")
        )
    arrays, metadata, n = table
    return assemble(arrays, normalise_coords(metadata, arrays, n))


def _check_variables(variables: Any) -> None:
    if not isinstance(variables, Mapping) or not all(
        isinstance(name, str) and isinstance(column, str) for name, column in variables.items()
    ):
        raise TypeError(
            "expected a mapping from the name of a variable to a column as variables, got "
            f"{variables!r}; try variables={{'x': 'column'}}"
        )
    if not variables:
        raise ValueError(
            "expected at least one model input, got variables={}; try variables={'x': 'column'}"
        )


def _check_coords(coords: Any) -> tuple[str, ...]:
    given = (coords,) if isinstance(coords, str) or not isinstance(coords, Iterable) else coords
    names = tuple(given)
    if not all(isinstance(name, str) for name in names) or isinstance(coords, Mapping):
        raise TypeError(
            f"expected names of columns as coords, got {coords!r}; try coords=['column']"
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"expected different columns as coords, got {twice} several times; try each name once"
        )
    return names


def _check_columns(asked: Iterable[str], available: Iterable[Any]) -> None:
    columns = [str(column) for column in available]
    for column in asked:
        if column not in columns:
            near = difflib.get_close_matches(column, columns, n=3) or columns
            raise ValueError(
                f"expected the name of a column of the table, got {column!r}; try one of {near}"
            )
        if columns.count(column) > 1:
            raise ValueError(
                f"expected one column {column!r}, got {columns.count(column)} of this name; try "
                "renaming them"
            )


def _check_rows(n: int) -> None:
    if n == 0:
        raise ValueError(
            "expected at least one row, got an empty table; try another path or selection of rows"
        )


def _from_pandas(
    frame: pd.DataFrame, variables: Mapping[str, str], coords: tuple[str, ...], size: int
) -> _Table:
    _check_columns([*variables.values(), *coords], frame.columns)
    _check_rows(len(frame))
    arrays = {name: stack(name, frame[column], 0) for name, column in variables.items()}
    return lazy_variables(arrays, size), {name: frame[name] for name in coords}, len(frame)


def _from_parquet(
    source: Paths, variables: Mapping[str, str], coords: tuple[str, ...], size: int
) -> _Table:
    sources = [source] if isinstance(source, str | os.PathLike) else source
    paths = [os.fspath(path) for path in sources]
    rows = ParquetRows(paths, dict(variables))
    _check_columns([*variables.values(), *coords], rows.columns)
    _check_rows(rows.n)
    rows.probe()
    metadata = rows.read_coords(coords)
    return read_bundle(Spooled(rows), rows.fields, rows.n, size), metadata, rows.n


def _from_dask(
    frame: Any, variables: Mapping[str, str], coords: tuple[str, ...], size: int
) -> _Table:
    _check_columns([*variables.values(), *coords], frame.columns)
    columns = list(dict.fromkeys(variables.values()))
    # Delayed objects, because dask may fuse partitions of a DataFrame differently for each column.
    parts = frame[columns].to_delayed()
    summaries = [dask.delayed(_summarise, pure=True)(part) for part in parts]
    rows = frame[list(coords)].to_delayed() if coords else []
    computed, loaded = dask.compute(summaries, rows)
    n = sum(length for length, _ in computed)
    _check_rows(n)
    first = next(head for length, head in computed if length)
    lengths = [length for length, _ in computed]
    arrays = {
        name: _column(name, column, parts, lengths, stack(name, first[column], 0))
        for name, column in variables.items()
    }
    metadata = {name: pd.concat([part[name] for part in loaded]) for name in coords}
    return lazy_variables(arrays, size), metadata, n


def _column(
    name: str, column: str, parts: Sequence[Any], lengths: Sequence[int], first: Array
) -> Any:
    field = Field(first.shape[1:], first.dtype)
    starts = np.cumsum([0, *lengths]).tolist()
    blocks = [
        da.from_delayed(
            dask.delayed(_stack_part, pure=True)(part, name, column, start, field),
            shape=(length, *field.shape),
            dtype=field.dtype,
            meta=np.empty((0,) * first.ndim, field.dtype),
        )
        for part, start, length in zip(parts, starts, lengths, strict=False)
        if length
    ]
    return da.concatenate(blocks)


def _summarise(part: pd.DataFrame) -> tuple[int, pd.DataFrame]:
    return len(part), part.head(1)


def _stack_part(part: pd.DataFrame, name: str, column: str, start: int, field: Field) -> Array:
    return stack(name, part[column], start, field).astype(field.dtype, copy=False)
