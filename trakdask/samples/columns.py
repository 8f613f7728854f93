"""Convert columns of tables to the variables of samples: stacked, or padded to one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from trakdask.samples.blocks import Field, check_dtype

__all__ = [
    "Columns",
    "ColumnsLike",
    "MaxLength",
    "columns_of_arrow",
    "columns_of_pandas",
    "parse_columns",
]

Array = np.ndarray[Any, Any]
ColumnsLike = Mapping[str, str | Sequence[str]]
MaxLength = int | Mapping[str, int] | None

_MASK = "attention_mask"
_FILL = {"labels": -100}
"""What padding is in variables for which zero would mean something, as transformers has it."""


@dataclass(frozen=True)
class _Ragged:
    """Lists that differ in length: all their entries, and how many belong to each sample."""

    values: Array
    lengths: Array

    def mask(self, width: int) -> Array:
        """Return which entries of padded lists are not padding, (sample, width)."""
        return np.arange(width) < self.lengths[:, None]

    def padded(self, width: int, fill: int) -> Array:
        """Return the lists cut or padded on the right, (sample, width, ...)."""
        kept = self.mask(width)
        starts = np.cumsum(self.lengths) - self.lengths
        shape = (len(kept), width, *self.values.shape[1:])
        result = np.full(shape, fill, self.values.dtype)
        result[kept] = self.values[(starts[:, None] + np.arange(width))[kept]]
        return result


@dataclass(frozen=True)
class Columns:
    """The columns that variables are made of.

    Parameters
    ----------
    variables
        Name of the variable -> its column, or several, which are stacked along a new axis.
    max_length
        Length to which the lists of a variable are padded, for those that are to be.
    truncate
        Whether longer lists are cut; otherwise they are an error.
    """

    variables: dict[str, str | tuple[str, ...]]
    max_length: dict[str, int]
    truncate: bool = False

    @property
    def names(self) -> list[str]:
        """Names of all columns that are read, once each."""
        several = [[c] if isinstance(c, str) else c for c in self.variables.values()]
        return list(dict.fromkeys(column for columns in several for column in columns))

    def arrays(self, table: Mapping[str, Any], start: int) -> dict[str, Array]:
        """Return the variables of the rows of a table, whose first row is sample ``start``."""
        arrays: dict[str, Array] = {}
        mask = None
        for name, columns in self.variables.items():
            several = [columns] if isinstance(columns, str) else columns
            is_ragged = name in self.max_length
            parts = [_numpy(name, table[column], start, is_ragged=is_ragged) for column in several]
            if mask is None and isinstance(parts[0], _Ragged) and _MASK not in self.variables:
                mask = parts[0].mask(self.max_length[name]).astype(np.int64)
            values = [self._padded(name, part, start) for part in parts]
            is_one = isinstance(columns, str)
            arrays[name] = values[0] if is_one else _stacked(name, several, values)
        return arrays if mask is None else {**arrays, _MASK: mask}

    def fields(self, arrays: Mapping[str, Array]) -> dict[str, Field]:
        """Return the shape and dtype of each variable, from arrays of the first sample."""
        for name, array in arrays.items():
            check_dtype(name, array.dtype)
        return {name: Field(array.shape[1:], array.dtype) for name, array in arrays.items()}

    def _padded(self, name: str, part: Array | _Ragged, start: int) -> Array:
        if not isinstance(part, _Ragged):
            return part
        width = self.max_length[name]
        too_long = np.flatnonzero(part.lengths > width)
        if len(too_long) and not self.truncate:
            raise ValueError(
                f"expected lists of at most {width} entries (max_length) in variable {name!r}, got "
                f"{part.lengths[too_long[0]]} for sample {start + too_long[0]}; try a larger "
                "max_length, or truncate=True to cut longer lists"
            )
        return part.padded(width, _FILL.get(name, 0))


def _stacked(name: str, columns: Sequence[str], values: Sequence[Array]) -> Array:
    shapes = {column: value.shape[1:] for column, value in zip(columns, values, strict=True)}
    if len(set(shapes.values())) > 1:
        raise ValueError(
            f"expected columns of one shape for variable {name!r}, got {shapes} per sample; try a "
            "variable for each of them"
        )
    return np.stack(values, axis=1)


def parse_columns(variables: Any, max_length: Any, truncate: bool) -> Columns:
    """Check the options of :func:`from_dataframe` that say what the variables are made of."""
    is_mapping = isinstance(variables, Mapping) and bool(variables)
    if not is_mapping or not all(map(_is_columns, variables.values())):
        raise TypeError(
            "expected a mapping from the name of a variable to a column, or a list of columns, as "
            f"variables, got variables={variables!r}; try variables={{'x': 'column'}}"
        )
    lengths = (
        max_length if isinstance(max_length, Mapping) else dict.fromkeys(variables, max_length)
    )
    are_lengths = all(
        type(each) is not bool and each >= 1 for each in lengths.values() if max_length is not None
    )
    if not lengths.keys() <= variables.keys() or not are_lengths:
        raise ValueError(
            f"expected positive integers for some of {list(variables)} as max_length, got "
            f"max_length={max_length!r}; try max_length=128"
        )
    if truncate and max_length is None:
        raise ValueError("truncate=True needs a max_length; try max_length=128")
    columns = {
        n: given if isinstance(given, str) else tuple(given) for n, given in variables.items()
    }
    return Columns(columns, {} if max_length is None else dict(lengths), bool(truncate))


def _is_columns(given: Any) -> bool:
    several = isinstance(given, Sequence) and bool(given)
    return isinstance(given, str) or (several and all(isinstance(column, str) for column in given))


def columns_of_arrow(table: pa.Table) -> dict[str, Any]:
    """Return the columns of an Arrow table by name."""
    return {name: table.column(name).combine_chunks() for name in table.column_names}


def columns_of_pandas(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the columns of a DataFrame by name: numbers as numpy arrays, all others in Arrow."""
    return {str(name): _column_of_pandas(frame[name]) for name in frame.columns}


def _column_of_pandas(series: pd.Series[Any]) -> Any:
    if not isinstance(series.dtype, np.dtype):
        return pa.array(series.array, from_pandas=False)
    values = series.to_numpy()
    if values.dtype.kind != "O":
        return values
    if len(values) and np.ndim(values[0]) > 1 and isinstance(values[0], np.ndarray):
        return np.stack(list(values))
    return pa.array(values, from_pandas=False)


def _numpy(name: str, column: Any, start: int, *, is_ragged: bool) -> Array | _Ragged:
    if isinstance(column, np.ndarray):
        return column
    return _from_arrow(name, column, np.arange(start, start + len(column)), is_ragged=is_ragged)


def _from_arrow(
    name: str, column: Any, samples: Array, *, is_ragged: bool = False
) -> Array | _Ragged:
    """Convert a column of numbers, or of lists, to an array (row, ...) or to ragged lists.

    ``samples`` has the sample that each entry of the column belongs to.
    """
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if column.null_count:
        null = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise ValueError(
            f"expected a value in every row of variable {name!r}, got none for sample "
            f"{samples[null]}; try filling or dropping such rows first"
        )
    if not _is_list(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    lengths = np.asarray(pc.list_value_length(column).to_numpy(zero_copy_only=False))
    inner = _from_arrow(name, column.flatten(), np.repeat(samples, lengths))
    assert not isinstance(inner, _Ragged)
    if is_ragged:
        return _Ragged(inner, lengths)
    if len(other := np.flatnonzero(lengths != lengths[:1])):
        raise ValueError(
            f"expected lists of length {int(lengths[0])} in variable {name!r}, as sample "
            f"{samples[0]} has, got {int(lengths[other[0]])} for sample {samples[other[0]]}; try "
            f"max_length={int(lengths.max())}, which means padding to one length, or cropping "
            "the lists"
        )
    width = int(lengths[0]) if len(lengths) else 0
    return inner.reshape(len(column), width, *inner.shape[1:])


def _is_list(kind: Any) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
