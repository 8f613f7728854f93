"""Create samples from rows of a table: files, DataFrames, datasets of Hugging Face."""

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

from trakdask.samples.array_source import lazy_variables
from trakdask.samples.blocks import (
    Field,
    assemble,
    check_chunks,
    members,
    read_bundle,
    require_samples,
)
from trakdask.samples.columns import (
    Columns,
    ColumnsLike,
    MaxLength,
    columns_of_pandas,
    parse_columns,
)
from trakdask.samples.coords import check_name
from trakdask.samples.fingerprints import fingerprint
from trakdask.samples.rows import DatasetRows, FileRows, TableReader, is_of_datasets

__all__ = ["from_dataframe"]

Array = np.ndarray[Any, Any]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_Table = tuple[dict[str, da.Array], dict[str, Any]]


def from_dataframe(
    source: Paths | pd.DataFrame | Any,
    *,
    variables: ColumnsLike,
    coords: Sequence[str] | Mapping[str, str] = (),
    chunks: int = 512,
    max_length: MaxLength = None,
    truncate: bool = False,
) -> xr.Dataset:
    """Create a Dataset of samples from the rows of a table.

    Parameters
    ----------
    source
        Parquet or Arrow files that are read inside tasks: a path, URL, glob or folder (also one
        that ``save_to_disk`` of the package datasets wrote), or a list of these. Or a
        ``datasets.Dataset``, or a pandas or dask DataFrame.
    variables
        Model inputs: name of the variable -> column. Columns have numbers, or lists of equal
        length, which become (sample, length). A list of columns becomes one variable, with one
        more dimension for the columns.
    coords
        Columns of metadata, loaded into memory: strings, categoricals (decoded), numbers or times.
        A mapping gives them other names: name of the coord -> column.
    chunks
        Samples per block, and thus per task.
    max_length
        For lists that differ in length, such as tokens: the length to which they are padded on the
        right, or a mapping from the names of some variables to it. Padding is 0, or -100 in a
        variable ``labels``. Unless there is a variable ``attention_mask``, it is added: 1 for
        entries of the first padded variable, 0 for padding.
    truncate
        Cut longer lists to ``max_length``, instead of an error.

    Returns
    -------
    Dataset as of :func:`from_arrays`. Samples are in the order of the files (those of a glob or
    folder are sorted by name) and of their rows.

    Raises
    ------
    TypeError
        If the source is not a table, or a variable's column is not numeric.
    FileNotFoundError
        If no file matches, or a part of a saved dataset is missing.
    ValueError
        If there are no rows, a column is missing, or for the reasons given in :func:`from_arrays`.
        When computed, if the lists of a column differ in length without ``max_length``, a list is
        longer than it, or a value is missing; the message names the row.

    Notes
    -----
    Parquet: this function reads the footers, the first row and the coords, but no variable. A task
    reads complete row groups that contain its samples, so write row groups of about ``chunks``
    rows. Arrow: the same holds for record batches; local files are memory-mapped. In
    ``attrs["source"]`` files are identified by path, size and modification time.
    ``datasets.Dataset``: workers need to see its files; one in memory is sent to them. pandas:
    columns of numbers stay in memory, as in :func:`from_arrays`. dask DataFrame: the length of each
    partition, the coords and the first row are computed here, in one call.


    Examples
    --------
    >>> import pandas as pd
    >>> frame = pd.DataFrame({"tokens": [[1, 2], [3, 4]], "lang": ["en", "de"]})
    >>> train = from_dataframe(frame, variables={"input_ids": "tokens"}, coords=["lang"])
    >>> train.input_ids.shape, train.lang.values.tolist()
    ((2, 2), ['en', 'de'])

    Lists that differ in length, and a coord with another name than its column:

    >>> frame = pd.DataFrame({"tokens": [[1, 2], [3]], "target": [0, 1]})
    >>> train = from_dataframe(
    ...     frame, variables={"input_ids": "tokens"}, coords={"label": "target"}, max_length=3
    ... )
    >>> train.input_ids.values.tolist(), train.attention_mask.values.tolist()
    ([[1, 2, 0], [3, 0, 0]], [[1, 1, 0], [1, 0, 0]])
    """
    size = check_chunks(chunks)
    names = _check_coords(coords)
    columns = parse_columns(variables, max_length, truncate)
    if isinstance(source, pd.DataFrame):
        table = _from_pandas(source, columns, names, size)
    elif isinstance(source, dd.DataFrame):
        table = _from_dask(source, columns, names, size)
    elif is_of_datasets(source):
        table = _from_rows(DatasetRows(source), columns, names, size)
    elif isinstance(source, str | os.PathLike | list | tuple):
        sources = [source] if isinstance(source, str | os.PathLike) else source
        paths = [os.fspath(path) for path in sources]
        table = _from_rows(FileRows(paths), columns, names, size)
    else:
        raise TypeError(
            "expected paths of parquet or Arrow files, a datasets.Dataset, or a pandas or dask "
            f"DataFrame, as source, got {type(source).__name__}; try "
            + ("source.to_pandas()" if hasattr(source, "to_pandas") else "a path")
        )
    return assemble(*table)


def _check_coords(coords: Any) -> dict[str, str]:
    """Return name of the coord -> column."""
    given = (coords,) if isinstance(coords, str) or not isinstance(coords, Iterable) else coords
    names = tuple(given)
    columns = tuple(coords.values()) if isinstance(coords, Mapping) else names
    are_names = all(isinstance(name, str) for name in (*names, *columns))
    if not are_names or len(set(names)) < len(names):
        raise ValueError(
            "expected different columns, or a mapping from other names to columns, as coords, got "
            f"{coords!r}; try coords=['column'] or coords={{'name': 'column'}}"
        )
    for name in names:
        check_name(name, "coord", is_column=not isinstance(coords, Mapping))
    return dict(zip(names, columns, strict=True))


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


def _from_pandas(
    frame: pd.DataFrame, columns: Columns, coords: dict[str, str], size: int
) -> _Table:
    _check_columns([*columns.names, *coords.values()], frame.columns)
    require_samples(len(frame), "the table")
    arrays = columns.arrays(columns_of_pandas(frame[columns.names]), 0)
    metadata = {name: frame[column] for name, column in coords.items()}
    return lazy_variables(arrays, size), metadata


def _from_rows(
    rows: FileRows | DatasetRows, columns: Columns, coords: dict[str, str], size: int
) -> _Table:
    _check_columns([*columns.names, *coords.values()], rows.names)
    require_samples(len(rows), "the table")
    reader = TableReader(rows, columns)
    reader.probe()
    arrays = read_bundle(reader, fingerprint(reader), reader.fields, len(rows), size)
    return arrays, reader.read_coords(coords)


def _from_dask(frame: Any, columns: Columns, coords: dict[str, str], size: int) -> _Table:
    _check_columns([*columns.names, *coords.values()], frame.columns)
    # Delayed objects, because dask may fuse partitions of a DataFrame differently for each column.
    parts = frame[columns.names].to_delayed()
    summaries = [dask.delayed(_summarise, pure=True)(part) for part in parts]
    rows = frame[list(dict.fromkeys(coords.values()))].to_delayed() if coords else []
    computed, loaded = dask.compute(summaries, rows)
    lengths = [length for length, _ in computed]
    require_samples(sum(lengths), "the table")
    first = next(head for length, head in computed if length)
    _require_no_text(first)
    fields = columns.fields(columns.arrays(columns_of_pandas(first), 0))
    metadata = {name: pd.concat([part[c] for part in loaded]) for name, c in coords.items()}
    starts = np.cumsum([0, *lengths]).tolist()
    blocks = [
        da.from_delayed(
            dask.delayed(_convert, pure=True)(part, columns, fields, start),
            shape=(length,),
            meta=np.empty((0,), object),
        )
        for part, start, length in zip(parts, starts, lengths, strict=False)
        if length
    ]
    bundle = da.concatenate(blocks)
    return lazy_variables(members(bundle, fields, bundle.name, 0), size), metadata


def _require_no_text(first: pd.DataFrame) -> None:
    for column in first.columns:
        value = first[column].iloc[0]
        if isinstance(value, str) and value.startswith(("[", "(", "array(")):
            raise TypeError(
                f"expected numbers or lists of numbers in column {column!r}, got the text "
                f"{value[:40]!r}, since dask turns lists of a pandas DataFrame into text; try "
                "dask.config.set({'dataframe.convert-string': False}) before from_pandas(...)"
            )


def _summarise(part: pd.DataFrame) -> tuple[int, pd.DataFrame]:
    return len(part), part.head(1)


def _convert(
    part: pd.DataFrame, columns: Columns, fields: dict[str, Field], start: int
) -> dict[str, Array]:
    arrays = columns.arrays(columns_of_pandas(part), start)
    for name, values in arrays.items():
        fields[name].check(name, start, values[0])
    return {n: values.astype(fields[n].dtype, copy=False) for n, values in arrays.items()}
