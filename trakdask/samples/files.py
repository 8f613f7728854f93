"""Read rows of parquet and Arrow files by index, inside tasks."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import get_fs_token_paths

from trakdask.samples.blocks import Field
from trakdask.samples.columns import Columns

__all__ = ["FileRows", "loaded_coords"]

Array = np.ndarray[Any, Any]

_ARROW = (".arrow", ".feather", ".ipc")
_SUFFIXES = (".parquet", ".parq", *_ARROW)
_STATE = "state.json"


class FileRows:
    """Files as one table, from which tasks read only the groups of rows that they need.

    Parameters
    ----------
    paths
        Paths, URLs, globs or folders, also those of ``save_to_disk`` of the package datasets.
    columns
        What the variables are made of.

    Notes
    -----
    A group is a row group of a parquet file, or a record batch of an Arrow file (a stream, or the
    format with an index at its end).
    """

    def __init__(self, paths: list[str], columns: Columns) -> None:
        self.columns = columns
        self.fields: dict[str, Field] = {}
        self.fs, self.paths = _expand(paths)
        contents = [self._content(path) for path in self.paths]
        first, *others = (names for names, _ in contents)
        self.names = [name for name in first if all(name in other for other in others)]
        groups = [
            (file, group, n_rows)
            for file, (_, sizes) in enumerate(contents)
            for group, n_rows in enumerate(sizes)
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
        row = self._read_rows(int(file), int(group), 0, 1)
        self.fields = self.columns.fields(self.columns.from_arrow(row, 0))

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
        rows = self._read_rows(int(file), int(index), low - begin, high - begin)
        for name, values in self.columns.from_arrow(rows, low).items():
            self.fields[name].check(name, low, values[0])
            block[name][low - start : high - start] = values

    def _read_rows(self, file: int, group: int, start: int, stop: int) -> pa.Table:
        path, names = self.paths[file], self.columns.names
        if path.endswith(_ARROW):
            with self._batches(path) as batches:
                batch = next(itertools.islice(batches, group, None))
                return pa.Table.from_batches([batch]).select(names).slice(start, stop - start)
        with self.fs.open(path, "rb") as opened:
            table = pq.ParquetFile(opened).read_row_group(group, columns=names)
        return table.slice(start, stop - start)

    def read_coords(self, names: dict[str, str]) -> dict[str, pd.Series[Any]]:
        """Read whole columns into memory: name of the coord -> column."""
        columns = list(dict.fromkeys(names.values()))
        return loaded_coords([self._read_columns(path, columns) for path in self.paths], names)

    def _read_columns(self, path: str, names: list[str]) -> pa.Table:
        if path.endswith(_ARROW):
            with self._batches(path) as batches:
                return pa.Table.from_batches(list(batches), batches.schema).select(names)
        with self.fs.open(path, "rb") as opened:
            return pq.ParquetFile(opened).read(columns=names)

    def _content(self, path: str) -> tuple[list[str], list[int]]:
        """Return the names of a file's columns, and the number of rows of each of its groups."""
        kind = "Arrow" if path.endswith(_ARROW) else "parquet"
        try:
            if kind == "Arrow":
                with self._batches(path) as batches:
                    return batches.schema.names, [len(batch) for batch in batches]
            with self.fs.open(path, "rb") as opened:
                footer = pq.ParquetFile(opened).metadata
        except pa.ArrowException as err:  # which says nothing of the file
            raise ValueError(
                f"{path!r} cannot be read as a complete {kind} file: {err}; try writing it again, "
                "or for other formats td.from_dataframe(pandas.read_csv(path), ...)"
            ) from err
        groups = range(footer.num_row_groups)
        sizes = [footer.row_group(group).num_rows for group in groups]
        return footer.schema.to_arrow_schema().names, sizes

    @contextmanager
    def _batches(self, path: str) -> Iterator[_Batches]:
        with self._opened(path) as file:
            yield _Batches(file)

    def _opened(self, path: str) -> Any:
        """Open a file; a local one is mapped, so that only what is used of it is read."""
        is_local = "file" in np.atleast_1d(self.fs.protocol)
        return pa.memory_map(path) if is_local else self.fs.open(path, "rb")

    def _version(self, path: str) -> tuple[Any, ...]:
        info = self.fs.info(path)
        return tuple(str(info.get(key)) for key in ("size", "mtime", "LastModified", "ETag"))


class _Batches:
    """The record batches of an Arrow file, which is a stream or has an index at its end."""

    def __init__(self, file: Any) -> None:
        try:
            self._reader = pa.ipc.open_stream(file)
            self._is_stream = True
        except pa.ArrowInvalid:
            file.seek(0)
            self._reader = pa.ipc.open_file(file)
            self._is_stream = False
        self.schema = self._reader.schema

    def __iter__(self) -> Iterator[Any]:
        if self._is_stream:
            return iter(self._reader)
        return map(self._reader.get_batch, range(self._reader.num_record_batches))


def loaded_coords(tables: list[pa.Table], names: dict[str, str]) -> dict[str, pd.Series[Any]]:
    """Return whole columns of Arrow tables: name of the coord -> column."""
    if not names:
        return {}
    table = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
    # Integers with nulls are read as objects, because floats would silently round them.
    frame = table.to_pandas(date_as_object=False, integer_object_nulls=True)
    return {name: frame[column] for name, column in names.items()}


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
        files = [f"{folder}/{each['filename']}" for each in state.get("_data_files", [])]
        if missing := [each for each in files if each not in inside]:
            raise FileNotFoundError(
                f"expected the files that {folder}/{_STATE} names, got {len(files) - len(missing)} "
                f"of {len(files)}: {missing[0]!r} is missing; try copying the folder again"
            )
        return files
    if f"{folder}/dataset_dict.json" in inside:
        splits = [each for each in inside if each.endswith(f"/{_STATE}")]
        raise ValueError(
            f"expected the folder of one split, got {folder!r} with those of {len(splits)}; try "
            f"{os.path.dirname((splits or inside)[0])!r}"
        )
    return [each for each in inside if each.endswith(_SUFFIXES)]
