"""Rows of tables, read by index inside tasks, and the variables that their columns become.

Parquet and Arrow files, and datasets of Hugging Face. Lists are stacked, or padded to one length.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trakdask.files import matching
from trakdask.samples.sources import check_dtype, fields_of

_ARROW = (".arrow", ".feather", ".ipc")
_SUFFIXES = (".parquet", ".parq", *_ARROW)
_STATE = "state.json"
_MASK = "attention_mask"
_FILL = {"labels": -100}
"""Padding of variables in which 0 would mean something, as in transformers."""


@dataclass(frozen=True)
class Columns:
    """The columns that variables are made of.

    Parameters
    ----------
    variables
        Name of the variable -> its column, or several, which are stacked along a new axis.
    max_length
        Length to which the lists of a variable are padded; variables that are not named are not.
    truncate
        Whether to cut longer lists, instead of an error.
    """

    variables: Mapping[str, str | Sequence[str]]
    max_length: Mapping[str, int]
    truncate: bool = False

    @property
    def names(self) -> list[str]:
        """Names of all columns that are read, once each."""
        return list(dict.fromkeys(np.hstack([*self.variables.values()]).tolist()))

    def arrays(self, table: pa.Table | pd.DataFrame, start: int) -> dict[str, np.ndarray]:
        """Return the variables of the rows of a table, whose first row is sample ``start``."""
        arrays: dict[str, np.ndarray] = {}
        masks: list[np.ndarray] = []
        for name, columns in self.variables.items():
            several = [columns] if isinstance(columns, str) else columns
            converted = [self._array(name, _column_of(table, c), start) for c in several]
            values = [array for array, _ in converted]
            for column, array in zip(several, values, strict=True):
                check_dtype(name, array.dtype, column)  # numpy would convert text, and not dates
            masks += [mask for _, mask in converted if mask is not None]
            arrays[name] = values[0] if isinstance(columns, str) else np.stack(values, axis=1)
        if masks and _MASK not in arrays:
            arrays[_MASK] = masks[0].astype(np.int64)
        return arrays

    def _array(self, name: str, column: Any, start: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return a column as an array (row, ...) and, if it was padded, the mask of its values."""
        if isinstance(column, np.ndarray):
            return column, None
        samples = np.arange(start, start + len(column))
        column = _complete(name, column, samples)
        if name not in self.max_length or not _is_list(column.type):
            return _stacked(name, column, samples), None
        values, lengths = _flattened(name, column, samples)
        width = self.max_length[name]
        too_long = np.flatnonzero(lengths > width)
        if len(too_long) and not self.truncate:
            raise ValueError(
                f"expected lists of at most {width} entries in variable {name!r}, got "
                f"{lengths[too_long[0]]} for sample {samples[too_long[0]]}; try a larger "
                "max_length, or truncate=True"
            )
        mask = np.arange(width) < lengths[:, None]
        padded = np.full((*mask.shape, *values.shape[1:]), _FILL.get(name, 0), values.dtype)
        starts = np.cumsum(lengths) - lengths
        # (row, width) places in ``values``, the concatenated lists; only those in the mask exist.
        padded[mask] = values[(starts[:, None] + np.arange(width))[mask]]
        return padded, mask


def _column_of(table: pa.Table | pd.DataFrame, name: str) -> Any:
    """Return a column: numbers of pandas as a numpy array, everything else in Arrow."""
    if isinstance(table, pa.Table):
        return table.column(name).combine_chunks()
    if not isinstance(table[name].dtype, np.dtype):
        return pa.array(table[name].array, from_pandas=False)
    values = table[name].to_numpy()
    if values.dtype.kind != "O":
        return values
    if len(values) and isinstance(values[0], np.ndarray) and values[0].ndim > 1:
        # Arrow has no lists of arrays with several axes.
        return np.stack(list(values))
    # NaN stays a number. Arrow takes it for a missing value where it gets a Series of pandas.
    return pa.array(values, from_pandas=False)


def _stacked(name: str, column: Any, samples: np.ndarray) -> np.ndarray:
    """Convert a column of numbers, or of lists of one length, to an array (row, ...).

    ``samples`` has the sample that each entry of the column belongs to.
    """
    column = _complete(name, column, samples)
    if not _is_list(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    values, lengths = _flattened(name, column, samples)
    # Compared with a slice, because a part of a table may have no rows.
    if len(other := np.flatnonzero(lengths != lengths[:1])):
        raise ValueError(
            f"expected lists of length {int(lengths[0])} in variable {name!r}, as sample "
            f"{samples[0]} has, got {int(lengths[other[0]])} for sample {samples[other[0]]}; try "
            f"max_length={int(lengths.max())}, which pads them"
        )
    return values.reshape(len(column), int(lengths[0]) if len(lengths) else 0, *values.shape[1:])


def _flattened(name: str, column: Any, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries of all lists of a column, one after the other, and the lists' lengths."""
    lengths = np.asarray(pc.list_value_length(column).to_numpy(zero_copy_only=False))
    # Not ``values``, which has the entries of all rows, also of those that a slice leaves out.
    # Lists may hold lists, so their entries are a column again.
    return _stacked(name, column.flatten(), np.repeat(samples, lengths)), lengths


def _complete(name: str, column: Any, samples: np.ndarray) -> Any:
    """Return a column without its extension type, after a check that it has all values."""
    if isinstance(column, pa.ExtensionArray):
        if column.type.extension_name.startswith("pandas."):  # periods, intervals
            raise TypeError(
                f"expected numbers or lists in variable {name!r}, got {column.type}; try "
                "frame[column].dt.start_time for periods, and days as numbers"
            )
        column = column.storage
    if column.null_count:
        null = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise ValueError(
            f"expected a value in every row of variable {name!r}, got none for sample "
            f"{samples[null]}; try filling or dropping such rows first"
        )
    return column


def _is_list(kind: Any) -> bool:
    return isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


class Table:
    """The variables of a table, as a source of samples."""

    def __init__(self, table: Files | HuggingFace, columns: Columns) -> None:
        self.table, self.columns = table, columns
        _, row = next(table.parts(0, 1, columns.names))
        self.fields = fields_of(columns.arrays(row, 0))

    def __len__(self) -> int:
        return len(self.table)

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yield the rows ``start:stop`` of every variable, part by part."""
        for first, part in self.table.parts(start, stop, self.columns.names):
            yield first, self.columns.arrays(part, first)


class Files:
    """Files as one table, from which tasks read only the groups of rows that they need.

    Parameters
    ----------
    paths
        Paths, URLs, globs or folders, also folders of ``save_to_disk`` of the package datasets.

    Notes
    -----
    A group is a row group of a parquet file, or a record batch of an Arrow file (a stream, or the
    format with an index at its end).
    """

    def __init__(self, paths: list[str]) -> None:
        self._fs, files = _expand(paths)
        (first, *others), sizes = zip(*map(self._content, files), strict=True)
        self.columns = [name for name in first if all(name in other for other in others)]
        # The rows at which the groups of each file begin and end, counted from its first.
        ends = (np.cumsum([0, *groups]) for groups in sizes)
        self._files = list(zip(files, ends, strict=True))
        # Pickled with this object, they identify files that are too far to be hashed.
        infos = map(self._fs.info, files)
        keys = ("size", "mtime", "LastModified", "ETag")
        self._versions = [[str(info.get(key)) for key in keys] for info in infos]

    @property
    def _is_local(self) -> bool:
        return "file" in np.atleast_1d(self._fs.protocol)

    def content_of_files(self) -> Any:
        """Return what a fingerprint is made of, the bytes of the files; None if they are far."""
        if not self._is_local:
            return None
        return self.columns, [(np.memmap(path, "u1", "r"), ends) for path, ends in self._files]

    def __len__(self) -> int:
        return sum(int(ends[-1]) for _, ends in self._files)

    def parts(self, start: int, stop: int, names: list[str]) -> Iterator[tuple[int, pa.Table]]:
        """Yield the rows ``start:stop`` of each file, and the number of the first of them."""
        before = 0
        for path, ends in self._files:
            low, high = max(start - before, 0), min(stop - before, int(ends[-1]))
            if low < high:
                # The groups that the first and the last of these rows are in.
                first, last = np.searchsorted(ends, [low, high - 1], side="right") - 1
                table = self._read(path, range(first, last + 1), names)
                yield before + low, table.slice(low - int(ends[first]), high - low)
            before += int(ends[-1])

    def _read(self, path: str, groups: range, names: list[str]) -> pa.Table:
        """Return columns of some groups of rows of a file."""
        with self._opened(path) as file:
            if not path.endswith(_ARROW):
                return pq.ParquetFile(file).read_row_groups(groups, names)
            schema, batches = _record_batches(file)
            chosen = itertools.islice(batches, groups.start, groups.stop)
            return pa.Table.from_batches(list(chosen), schema).select(names)

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
                f"expected a complete {kind} file, got {path!r}: {err}; try writing it again, or "
                "td.from_dataframe(pandas.read_csv(path), ...) for other formats"
            ) from err

    def _opened(self, path: str) -> Any:
        """Open a file; a local one of Arrow is mapped, so that only the parts in use are read."""
        is_mapped = self._is_local and path.endswith(_ARROW)
        return pa.memory_map(path) if is_mapped else self._fs.open(path, "rb")


def _record_batches(file: Any) -> tuple[Any, Iterator[Any]]:
    """Return schema and batches of an Arrow file, which is a stream or has an index at its end."""
    try:
        # Both kinds have the same suffixes, so the first bytes decide.
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
        fs, matches = matching(path)
        for match in matches:
            if not fs.isdir(match):
                files.append(match)
                continue
            inside = sorted(fs.find(match))
            if f"{match}/{_STATE}" in inside:  # ``save_to_disk`` says which files have rows
                state = json.loads(fs.cat_file(f"{match}/{_STATE}"))
                # Opened by name, so that a missing file is an error.
                files += [f"{match}/{part['filename']}" for part in state.get("_data_files", [])]
            elif f"{match}/dataset_dict.json" in inside:
                splits = [path for path in inside if path.endswith(f"/{_STATE}")]
                raise ValueError(
                    f"expected the folder of one split, got {match!r} with {len(splits)} splits; "
                    f"try {os.path.dirname((splits or inside)[0])!r}"
                )
            else:
                files += [path for path in inside if path.endswith(_SUFFIXES)]
    if fs is None or not files:
        raise FileNotFoundError(
            f"expected a parquet or Arrow file ({', '.join(_SUFFIXES)}), got {paths}, which "
            "matches none; try another path or pattern"
        )
    return fs, files


class HuggingFace:
    """A ``datasets.Dataset`` as a table; its pickle refers to its files, without their rows.

    Parameters
    ----------
    dataset
        A Dataset in memory or on disk, also with selected or shuffled rows.
    """

    def __init__(self, dataset: Any) -> None:
        if dataset.format["type"] == "custom":
            raise ValueError(
                "expected a Dataset without a transform of its rows, got one; try "
                "dataset.map(transform, batched=True), or td.from_torch"
            )
        self._dataset = dataset.with_format("arrow")
        self.columns = list(dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def parts(self, start: int, stop: int, names: list[str]) -> Iterator[tuple[int, pa.Table]]:
        """Yield the rows ``start:stop``, and the number of the first of them."""
        yield start, self._dataset.select_columns(names)[start:stop]
