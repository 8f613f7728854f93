"""Read rows of tables by index, inside tasks: parquet and Arrow files, datasets of Hugging Face."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import get_fs_token_paths

from trakdask.samples.blocks import Field
from trakdask.samples.columns import Columns, columns_of_arrow

__all__ = ["DatasetRows", "FileRows", "TableReader", "is_of_datasets"]

Array = np.ndarray[Any, Any]

_ARROW = (".arrow", ".feather", ".ipc")
_SUFFIXES = (".parquet", ".parq", *_ARROW)
_STATE = "state.json"


@dataclass
class TableReader:
    """Reads the variables of a table.

    Parameters
    ----------
    rows
        The table.
    columns
        What the variables are made of.
    """

    rows: FileRows | DatasetRows
    columns: Columns
    fields: dict[str, Field] = field(init=False, default_factory=dict)

    def probe(self) -> None:
        """Determine shapes and dtypes from the first row."""
        _, row = next(self.rows.tables(0, 1, self.columns.names))
        self.fields = self.columns.fields(self.columns.arrays(columns_of_arrow(row), 0))

    def read(self, start: int, stop: int) -> dict[str, Array]:
        """Read the rows ``start:stop`` of every variable."""
        block = {
            name: np.empty((stop - start, *field.shape), field.dtype)
            for name, field in self.fields.items()
        }
        for first, table in self.rows.tables(start, stop, self.columns.names):
            for name, values in self.columns.arrays(columns_of_arrow(table), first).items():
                self.fields[name].check(name, first, values[0])
                block[name][first - start : first - start + len(values)] = values
        return block

    def read_coords(self, names: dict[str, str]) -> dict[str, pd.Series[Any]]:
        """Read whole columns into memory: name of the coord -> column."""
        if not names:
            return {}
        tables = self.rows.whole(list(dict.fromkeys(names.values())))
        table = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
        # Integers with nulls are read as objects, because floats would silently round them.
        frame = table.to_pandas(date_as_object=False, integer_object_nulls=True)
        return {name: frame[column] for name, column in names.items()}


class FileRows:
    """Files as one table, from which tasks read only the groups of rows that they need.

    Parameters
    ----------
    paths
        Paths, URLs, globs or folders, also those of ``save_to_disk`` of the package datasets.

    Notes
    -----
    A group is a row group of a parquet file, or a record batch of an Arrow file (a stream, or the
    format with an index at its end).
    """

    def __init__(self, paths: list[str]) -> None:
        self._fs, files = _expand(paths)
        contents = [self._content(path) for path in files]
        first, *others = (names for names, _ in contents)
        self.names = [name for name in first if all(name in other for other in others)]
        self._files = files
        self._groups = [
            (path, group)
            for path, (_, sizes) in zip(files, contents, strict=True)
            for group in range(len(sizes))
        ]
        self._ends = np.cumsum([size for _, sizes in contents for size in sizes], dtype=np.int64)
        infos = [self._fs.info(path) for path in files]
        keys = ("size", "mtime", "LastModified", "ETag")
        self._versions = [[str(info.get(key)) for key in keys] for info in infos]

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def tables(self, start: int, stop: int, names: list[str]) -> Iterator[tuple[int, pa.Table]]:
        """Yield the rows ``start:stop`` of each group, and the number of the first of them."""
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        for number in range(first, last + 1):
            begin = int(self._ends[number - 1]) if number else 0
            low, high = max(start, begin), min(stop, int(self._ends[number]))
            if low < high:
                table = self._table(*self._groups[number], names)
                yield low, table.slice(low - begin, high - low)

    def whole(self, names: list[str]) -> list[pa.Table]:
        """Return columns of all files."""
        return [self._table(path, None, names) for path in self._files]

    def _table(self, path: str, group: int | None, names: list[str]) -> pa.Table:
        """Return columns of a group of rows, or of the whole file."""
        with self._opened(path) as file:
            if path.endswith(_ARROW):
                schema, batches = _record_batches(file)
                chosen = batches if group is None else itertools.islice(batches, group, group + 1)
                return pa.Table.from_batches(list(chosen), schema).select(names)
            parquet = pq.ParquetFile(file)
            return parquet.read(names) if group is None else parquet.read_row_group(group, names)

    def _content(self, path: str) -> tuple[list[str], list[int]]:
        """Return the names of a file's columns, and the number of rows of each of its groups."""
        kind = "Arrow" if path.endswith(_ARROW) else "parquet"
        try:
            with self._opened(path) as file:
                if kind == "Arrow":
                    schema, batches = _record_batches(file)
                    return schema.names, [len(batch) for batch in batches]
                footer = pq.ParquetFile(file).metadata
                groups = map(footer.row_group, range(footer.num_row_groups))
                return footer.schema.to_arrow_schema().names, [group.num_rows for group in groups]
        except pa.ArrowException as err:  # which says nothing of the file
            raise ValueError(
                f"{path!r} cannot be read as a complete {kind} file: {err}; try writing it again, "
                "or for other formats td.from_dataframe(pandas.read_csv(path), ...)"
            ) from err

    def _opened(self, path: str) -> Any:
        """Open a file; a local one of Arrow is mapped, so that only what is used of it is read."""
        is_local = "file" in np.atleast_1d(self._fs.protocol)
        is_mapped = is_local and path.endswith(_ARROW)
        return pa.memory_map(path) if is_mapped else self._fs.open(path, "rb")


def _record_batches(file: Any) -> tuple[Any, Iterator[Any]]:
    """Return schema and batches of an Arrow file, which is a stream or has an index at its end."""
    try:
        stream = pa.ipc.open_stream(file)
        return stream.schema, iter(stream)
    except pa.ArrowInvalid:
        file.seek(0)
        indexed = pa.ipc.open_file(file)
        return indexed.schema, map(indexed.get_batch, range(indexed.num_record_batches))


def _expand(paths: list[str]) -> tuple[Any, list[str]]:
    fs = None
    files: list[str] = []
    for path in paths:
        fs, _, matches = get_fs_token_paths(path)
        for match in sorted(matches):
            files += _inside(fs, match) if fs.isdir(match) else [match]
    if fs is None or not files:
        raise FileNotFoundError(
            f"expected at least one parquet or Arrow file, got {paths}, which matches none; try "
            f"another path or pattern (in a folder, files are named {', '.join(_SUFFIXES)})"
        )
    return fs, files


def _inside(fs: Any, folder: str) -> list[str]:
    """Return the files with rows in a folder; ``save_to_disk`` says which they are."""
    inside = sorted(fs.find(folder))
    if f"{folder}/{_STATE}" in inside:
        state = json.loads(fs.cat_file(f"{folder}/{_STATE}"))
        # Opened by name, so that a missing file is an error.
        return [f"{folder}/{part['filename']}" for part in state.get("_data_files", [])]
    if f"{folder}/dataset_dict.json" in inside:
        splits = [path for path in inside if path.endswith(f"/{_STATE}")]
        raise ValueError(
            f"expected the folder of one split, got {folder!r} with those of {len(splits)}; try "
            f"{os.path.dirname((splits or inside)[0])!r}"
        )
    return [path for path in inside if path.endswith(_SUFFIXES)]


def is_of_datasets(source: object) -> bool:
    """Return whether an object is of the package datasets, without importing the package."""
    return type(source).__module__.split(".")[0] == "datasets"


class DatasetRows:
    """A ``datasets.Dataset`` as a table; pickled, it refers to its files and has no rows of them.

    Parameters
    ----------
    dataset
        A Dataset in memory or on disk, also with selected or shuffled rows.
    """

    def __init__(self, dataset: Any) -> None:
        kind = type(dataset).__name__
        if kind != "Dataset":
            raise TypeError(
                f"expected a datasets.Dataset, whose rows are read by index, got {kind}; try one "
                "of its splits, source['train'], or writing a stream to parquet files, and their "
                "path"
            )
        if dataset.format["type"] == "custom":
            raise ValueError(
                "the Dataset has a transform that is applied when rows are read; try "
                "dataset.map(transform, batched=True), or td.from_torch"
            )
        self._dataset = dataset.with_format("arrow")
        self.names = list(dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def tables(self, start: int, stop: int, names: list[str]) -> Iterator[tuple[int, pa.Table]]:
        """Yield the rows ``start:stop``, and the number of the first of them."""
        yield start, self._dataset.select_columns(names)[start:stop]

    def whole(self, names: list[str]) -> list[pa.Table]:
        """Return whole columns."""
        return [self._dataset.select_columns(names)[:]]
