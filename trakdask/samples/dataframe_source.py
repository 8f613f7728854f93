"""Create samples from rows of a table: files, DataFrames, datasets of Hugging Face."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import xarray as xr

from trakdask.checks import nearest, require_flags, require_integer
from trakdask.samples.array_source import lazy_variable
from trakdask.samples.datasets import assemble
from trakdask.samples.sources import (
    block_size,
    check_field,
    fields_of,
    lazy_fields,
    require_samples,
    unpacked,
)
from trakdask.samples.tables import Columns, Files, HuggingFace, Table
from trakdask.variables import SAMPLE


def from_dataframe(
    source: Any,
    *,
    variables: Mapping[str, str | Sequence[str]],
    coords: Sequence[str] | Mapping[str, str] = (),
    chunks: int | Literal["auto"] = "auto",
    max_length: int | Mapping[str, int] | None = None,
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
        As in :func:`from_arrays`.
    max_length
        For lists that differ in length, such as tokens: the length to which they are padded on the
        right, or a mapping from the names of some variables to it. Padding is 0, or -100 in a
        variable ``labels``. Unless there is a variable ``attention_mask``, it is added: 1 for
        entries of the first padded variable, 0 for padding.
    truncate
        Cut longer lists to ``max_length``, instead of an error.

    Returns
    -------
    Dataset as of :func:`from_arrays`. Samples are in the order of the files (sorted by name in a
    glob or folder) and of their rows.

    Raises
    ------
    TypeError
        If the source is not a table, a variable's column is not numeric, or ``chunks`` or a
        ``max_length`` is not an integer.
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
    (512) rows. Arrow: the same holds for record batches; local files are memory-mapped. In
    ``attrs["source"]`` local files are identified by their bytes, which are read once for that, and
    others by path, size and time of change. ``datasets.Dataset``: workers need to see its files;
    one in memory is sent to them. pandas: columns of numbers stay in memory, as in
    :func:`from_arrays`. dask DataFrame: the length of each partition, the coords and the first row
    are computed here, in one call.

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
    # 1. Columns that are read, each of which the table has once.
    size = block_size(chunks)
    columns, table = _columns(variables, max_length, truncate), _table(source)
    columns_of = [coords] if isinstance(coords, str) else coords or ()
    names = columns_of if isinstance(columns_of, Mapping) else {name: name for name in columns_of}
    available = [str(column) for column in table.columns]
    for column in [*columns.names, *names.values()]:
        if (n := available.count(column)) != 1:
            remedy = nearest(column, available) if n == 0 else None
            raise ValueError(
                f"expected the name of one column, got {column!r}, which {n} of the columns "
                f"{available} have; try {repr(remedy) if remedy else 'one of these'}"
            )
    # 2. Lazy variables and loaded coords, by the kind of the table.
    metadata = list(dict.fromkeys(names.values()))
    if isinstance(table, pd.DataFrame):
        arrays = columns.arrays(table, 0)
        lazy, loaded = {n: lazy_variable(n, a, size) for n, a in arrays.items()}, table
    elif isinstance(table, dd.DataFrame):
        lazy, loaded = _from_dask(table, columns, metadata, size)
    else:
        require_samples(len(table), "the table")
        lazy = lazy_fields(Table(table, columns), size)
        loaded = pd.DataFrame()
        if metadata:
            tables = [part for _, part in table.parts(0, len(table), metadata)]
            whole = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
            # Integers with nulls as objects, because floats would silently round them.
            loaded = whole.to_pandas(date_as_object=False, integer_object_nulls=True)
    loaded = loaded.reset_index(drop=True)  # rows are in the order of the samples
    return assemble(lazy, {name: loaded[column] for name, column in names.items()}, chunks)


def _table(source: Any) -> Any:
    if isinstance(source, pd.DataFrame | dd.DataFrame):
        return source
    kind = type(source)
    if kind.__module__.startswith("datasets.") and kind.__name__ == "Dataset":  # not imported here
        return HuggingFace(source)
    if isinstance(source, str | os.PathLike | list | tuple):
        sources = [source] if isinstance(source, str | os.PathLike) else source
        return Files([os.fspath(path) for path in sources])
    raise TypeError(
        "expected parquet or Arrow files, a datasets.Dataset, or a pandas or dask DataFrame, got "
        f"{kind.__name__}; try source['train'], source.to_pandas(), or a path"
    )


def _columns(variables: Any, max_length: Any, truncate: bool) -> Columns:
    """Check the options that say how columns become variables, except the names of the columns."""
    if not isinstance(variables, Mapping) or not variables or not all(variables.values()):
        raise TypeError(
            "expected a column, or a list of columns, by name of the variable, got "
            f"variables={variables!r}; try variables={{'x': 'column'}}"
        )
    if not isinstance(max_length, Mapping):
        max_length = {} if max_length is None else dict.fromkeys(variables, max_length)
    for name, length in max_length.items():
        require_integer(f"max_length of {name!r}", length, 1, remedy="try max_length=128")
    require_flags(truncate=truncate)
    return Columns(variables, max_length, truncate)


def _from_dask(
    frame: Any, columns: Columns, metadata: list[str], size: int
) -> tuple[dict[str, xr.Variable], pd.DataFrame]:
    # Delayed objects, because dask may fuse partitions of a DataFrame differently for each column.
    parts = frame[columns.names].to_delayed()
    # One call for all that is needed here, because each call would read the partitions again.
    heads = [(part.shape[0], part.head(1)) for part in parts]
    computed, loaded = dask.compute(heads, frame[metadata].to_delayed() if metadata else [])
    lengths = [length for length, _ in computed]
    require_samples(sum(lengths), "the table")
    # Partitions may be empty, as after a filter.
    first = next(head for length, head in computed if length)
    for column, value in first.iloc[0].items():
        if isinstance(value, str) and value.startswith(("[", "(", "array(")):
            raise TypeError(
                f"expected numbers or lists in column {column!r}, got the text {value[:40]!r}, "
                "into which dask turns lists of pandas; try dask.config.set("
                "{'dataframe.convert-string': False}) before from_pandas(...)"
            )
    fields = fields_of(columns.arrays(first, 0))
    starts = np.cumsum([0, *lengths]).tolist()
    # Pure, so that the names of tasks follow from their inputs, and are the same in each process.
    convert = dask.delayed(_convert, pure=True)
    blocks = [
        da.from_delayed(
            convert(part, columns, fields, start), (length,), meta=np.empty((0,), object)
        )
        for part, start, length in zip(parts, starts, lengths, strict=False)
        if length
    ]
    whole = da.concatenate(blocks)
    # The blocks are the partitions here, which have no common size for the names.
    read = unpacked(whole, fields, whole.name, 0)
    lazy = {name: variable.chunk({SAMPLE: size}) for name, variable in read.items()}
    return lazy, pd.concat(loaded) if metadata else pd.DataFrame()


def _convert(
    part: pd.DataFrame, columns: Columns, fields: dict[str, np.ndarray], start: int
) -> dict[str, np.ndarray]:
    arrays = columns.arrays(part, start)
    for name, values in arrays.items():
        check_field(name, fields[name], start, values)
    return {n: values.astype(fields[n].dtype, copy=False) for n, values in arrays.items()}
