"""Read rows of a ``datasets.Dataset`` by index, inside tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from trakdask.samples.blocks import Field
from trakdask.samples.columns import Columns
from trakdask.samples.files import loaded_coords

__all__ = ["DatasetRows", "is_of_datasets"]


def is_of_datasets(source: object) -> bool:
    """Return whether an object is of the package datasets, without importing the package."""
    return type(source).__module__.split(".")[0] == "datasets"


class DatasetRows:
    """A ``datasets.Dataset`` as a table; pickled, it refers to its files and has no rows of them.

    Parameters
    ----------
    dataset
        A Dataset in memory or on disk, also with selected or shuffled rows.
    columns
        What the variables are made of.
    """

    def __init__(self, dataset: Any, columns: Columns) -> None:
        _require_plain(dataset)
        self._dataset = dataset.with_format("arrow")
        self.columns = columns
        self.names = list(dataset.column_names)
        self.fields: dict[str, Field] = {}

    @property
    def n(self) -> int:
        """Number of rows."""
        return len(self._dataset)

    def probe(self) -> None:
        """Determine shapes and dtypes from the first row."""
        self.fields = self.columns.fields(self.columns.from_arrow(self._rows(0, 1), 0))

    def read(self, start: int, stop: int) -> dict[str, np.ndarray[Any, Any]]:
        """Read the rows ``start:stop`` of every variable."""
        block = self.columns.from_arrow(self._rows(start, stop), start)
        for name, values in block.items():
            self.fields[name].check(name, start, values[0])
        return {name: values.astype(self.fields[name].dtype) for name, values in block.items()}

    def read_coords(self, names: dict[str, str]) -> dict[str, pd.Series[Any]]:
        """Read whole columns into memory: name of the coord -> column."""
        columns = list(dict.fromkeys(names.values()))
        return loaded_coords([self._dataset.select_columns(columns)[:]], names) if names else {}

    def _rows(self, start: int, stop: int) -> pa.Table:
        return self._dataset.select_columns(self.columns.names)[start:stop]


def _require_plain(dataset: Any) -> None:
    kind = type(dataset).__name__
    if kind != "Dataset":
        raise TypeError(
            f"expected a datasets.Dataset, whose rows are read by index, got {kind}; try one of "
            "its splits, source['train'], or writing a stream to parquet files, and their path"
        )
    if dataset.format["type"] == "custom":
        raise ValueError(
            "the Dataset has a transform that is applied when rows are read; try "
            "dataset.map(transform, batched=True), or td.from_torch"
        )
