"""Read rows of parquet files by index, and convert columns of lists to arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fsspec.core import get_fs_token_paths

from trakdask.samples.blocks import Field, check_dtype

__all__ = ["ParquetRows", "stack"]

Array = np.ndarray[Any, Any]

_SUFFIXES = (".parquet", ".parq")


class ParquetRows:
    """Parquet files as one table, from which tasks read only the row groups that they need.

    Parameters
    ----------
    paths
        Paths, URLs, globs or folders.
    variables
        Name of the variable -> column.
    """

    def __init__(self, paths: list[str], variables: dict[str, str]) -> None:
        self.variables = variables
        self.fields: dict[str, Field] = {}
        self.fs, self.paths = _expand(paths)
        footers = [self._footer(path) for path in self.paths]
        columns = [footer.schema.to_arrow_schema().names for footer in footers]
        self.columns = [name for name in columns[0] if all(name in other for other in columns)]
        # The row groups of all files in order: the file, the index in the file, and the row count.
        groups = [
            (file, group, footer.row_group(group).num_rows)
            for file, footer in enumerate(footers)
            for group in range(footer.num_row_groups)
        ]
        table = np.array(groups, dtype=np.int64).reshape(-1, 3)
        self.groups = table[:, :2]
        self.ends = np.cumsum(table[:, 2])
        self.versions = [self._version(path) for path in self.paths]

    @property
    def n(self) -> int:
        """Number of rows."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def probe(self) -> None:
        """Determine shapes and dtypes from the first row."""
        file, group = self.groups[np.searchsorted(self.ends, 0, side="right")]
        columns = list(dict.fromkeys(self.variables.values()))
        with self.fs.open(self.paths[file], "rb") as opened:
            parquet = pq.ParquetFile(opened)
            batches = parquet.iter_batches(batch_size=1, row_groups=[int(group)], columns=columns)
            row = pa.Table.from_batches([next(batches)])
        for name, column in self.variables.items():
            value = _from_arrow(name, row.column(column).combine_chunks(), 0)
            check_dtype(name, value.dtype)
            self.fields[name] = Field(value.shape[1:], value.dtype)

    def read(self, start: int, stop: int) -> dict[str, Array]:
        """Read the rows ``start:stop`` of every variable."""
        block = {
            name: np.empty((stop - start, *field.shape), field.dtype)
            for name, field in self.fields.items()
        }
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.ends, stop, side="left"))
        for group in range(first, last + 1):
            self._read_group(group, start, stop, block)
        return block

    def _read_group(self, group: int, start: int, stop: int, block: dict[str, Array]) -> None:
        begin = int(self.ends[group - 1]) if group else 0
        low, high = max(start, begin), min(stop, int(self.ends[group]))
        if low >= high:
            return
        file, index = self.groups[group]
        columns = list(dict.fromkeys(self.variables.values()))
        with self.fs.open(self.paths[file], "rb") as opened:
            table = pq.ParquetFile(opened).read_row_group(int(index), columns=columns)
        table = table.slice(low - begin, high - low)
        for name, column in self.variables.items():
            values = _from_arrow(name, table.column(column).combine_chunks(), low)
            self.fields[name].check(name, low, values[0])
            block[name][low - start : high - start] = values

    def read_coords(self, names: tuple[str, ...]) -> dict[str, pd.Series[Any]]:
        """Read whole columns into memory."""
        if not names:
            return {}
        tables = []
        for path in self.paths:
            with self.fs.open(path, "rb") as opened:
                tables.append(pq.ParquetFile(opened).read(columns=list(names)))
        table = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
        # Integers with nulls are read as objects, because floats would silently round them.
        frame = table.to_pandas(date_as_object=False, integer_object_nulls=True)
        return {name: frame[name] for name in names}

    def _footer(self, path: str) -> Any:
        try:
            with self.fs.open(path, "rb") as opened:
                return pq.ParquetFile(opened).metadata
        except FileNotFoundError as err:
            raise FileNotFoundError(
                f"expected a parquet file, got {path!r}, which does not exist; try another path or "
                "pattern"
            ) from err
        except (pa.ArrowException, OSError) as err:
            raise ValueError(
                f"expected a parquet file, got {path!r}, which cannot be read as one "
                f"({str(err).splitlines()[0][:200]}); try pandas.read_csv(path) or the like, and "
                "td.from_dataframe of the DataFrame"
            ) from err

    def _version(self, path: str) -> tuple[Any, ...]:
        info = self.fs.info(path)
        return tuple(str(info.get(key)) for key in ("size", "mtime", "LastModified", "ETag"))


def _expand(paths: list[str]) -> tuple[Any, list[str]]:
    fs = None
    files: list[str] = []
    for path in paths:
        fs, matches = _matches(path)
        for match in sorted(matches):
            inside = sorted(fs.find(match)) if fs.isdir(match) else None
            files += [match] if inside is None else [p for p in inside if p.endswith(_SUFFIXES)]
    if fs is None or not files:
        raise FileNotFoundError(
            f"expected at least one parquet file, got {paths}, which matches none; try another "
            "path or pattern (in a folder, files are named *.parquet or *.parq)"
        )
    return fs, files


def _matches(path: str) -> tuple[Any, list[str]]:
    try:
        fs, _, matches = get_fs_token_paths(path)
        return fs, matches
    # An unknown protocol, one whose package is not installed, or a folder that cannot be read.
    except (ValueError, ImportError, OSError) as err:
        kind = ImportError if isinstance(err, ImportError) else ValueError
        raise kind(
            f"expected a path, URL or pattern of parquet files that fsspec can open, got {path!r} "
            f"({err}); try a local path, or a URL such as 's3://bucket/train/*.parquet'"
        ) from err


def _from_arrow(name: str, column: Any, start: int, per_row: int = 1) -> Array:
    """Convert a column of numbers, or of lists of equal length, to an array (row, ...).

    ``start`` is the sample of the first row; ``per_row`` values of the column make one row.
    """
    if column.null_count:
        null = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise _missing(name, start + null // per_row)
    if not _is_list(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    if (lengths != lengths[0]).any():
        other = int(np.argmax(lengths != lengths[0]))
        raise ValueError(
            f"expected lists of length {int(lengths[0])} in variable {name!r}, as sample {start} "
            f"has, got {int(lengths[other])} for sample {start + other // per_row}; try padding or "
            "cropping all lists to one length"
        )
    width = int(lengths[0])
    inner = _from_arrow(name, column.flatten(), start, per_row * max(1, width))
    return inner.reshape(len(column), width, *inner.shape[1:])


def _missing(name: str, sample: int) -> ValueError:
    return ValueError(
        f"expected a value in every row of variable {name!r}, got none for sample {sample}; try "
        "filling or dropping such rows first"
    )


def _is_list(kind: Any) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def stack(name: str, series: pd.Series[Any], start: int, field: Field | None = None) -> Array:
    """Convert a pandas column of numbers, or of lists of equal length, to an array (row, ...).

    Parameters
    ----------
    name
        Name of the variable, for errors.
    series
        Numbers, or lists of numbers of equal length.
    start
        Index of the sample in the first row, for errors.
    field
        Shape and dtype that every row must have; by default, those of the first row.

    Returns
    -------
    Array (row, ...).
    """
    values = series.to_numpy()
    if len(values) and isinstance(values[0], list | tuple | np.ndarray):
        values = _stack_lists(name, values, start, field)
    check_dtype(name, values.dtype)
    if field is not None and len(values):
        field.check(name, start, values[0])
    return values


def _stack_lists(name: str, values: Array, start: int, field: Field | None) -> Array:
    rows = []
    for sample, value in enumerate(values, start):
        if value is None or value is pd.NA or isinstance(value, float):  # NaN marks a missing list
            raise _missing(name, sample)
        row = _as_row(name, sample, value)
        field = Field(row.shape, row.dtype) if field is None else field
        field.check(name, sample, row)
        rows.append(row)
    return np.stack(rows)


def _as_row(name: str, sample: int, value: Any) -> Array:
    try:
        row = np.asarray(value)
        return np.stack(list(row)) if row.dtype.kind == "O" and row.size else row
    except ValueError as err:
        raise ValueError(
            f"expected nested lists of one length in variable {name!r}, got some that differ in "
            f"length for sample {sample}; try padding or cropping all lists to one length"
        ) from err
