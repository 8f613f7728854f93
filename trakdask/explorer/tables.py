"""Tables of training samples and targets: their metadata, and what the model says about them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from trakdask.attribution.conditions import Condition
from trakdask.explorer.computing import compute
from trakdask.explorer.view import View
from trakdask.variables import CHECKPOINT, SAMPLE, coords_along

__all__ = [
    "ROWS",
    "ConditionError",
    "TablePage",
    "TargetTable",
    "condition_mask",
    "few_values",
    "metadata",
    "require_position",
    "row_of",
    "searched",
]

ROWS = 25
"""Rows of a page of a table."""

_MOST_COLUMNS = 40


class ConditionError(ValueError):
    """A condition cannot be evaluated; the form in which it was typed says why."""


@dataclass(frozen=True)
class TablePage:
    """Some rows of a table, indexed by position, and of how many they are."""

    table: pd.DataFrame
    found: int


class TargetTable:
    """Targets and the table of them.

    Parameters
    ----------
    features
        Their features, with outputs and Q.
    """

    def __init__(self, features: xr.Dataset) -> None:
        self.features = features

    @cached_property
    def metadata(self) -> pd.DataFrame:
        """The coords of the targets, by position."""
        return metadata(self.features)

    @cached_property
    def groupings(self) -> list[str]:
        """The coords of the targets that have from 2 to 40 different values."""
        return few_values(self.metadata, _MOST_COLUMNS)

    @cached_property
    def whole(self) -> pd.DataFrame:
        """Metadata, output, loss and disagreement of all targets."""
        output, q = compute(self.features["output"].data, self.features["out_to_loss"].data)
        table = self.metadata.assign(output=np.asarray(output, np.float64).mean(axis=1))
        if output.shape[1] > 1:
            table["disagreement"] = np.std(output, axis=1, ddof=1, dtype=np.float64)
        table["loss"] = np.asarray(q, np.float64).mean(axis=1)
        return table

    def page(self, view: View) -> TablePage:
        """Return the targets that a view searches and filters for, sorted, a page of them.

        Columns: the coords of the targets; ``output``, its mean over checkpoints; ``loss``, the
        mean of Q = ∂loss/∂output; ``disagreement``, the standard deviation of the output between
        checkpoints.
        """
        table = searched(self.whole, view.search)
        if view.targets_where:
            table = table[condition_mask(self.whole, view.targets_where)[table.index]]
        if view.sort in table:
            table = table.sort_values(view.sort, ascending=view.ascending, kind="stable")
        return TablePage(table.iloc[view.first : view.first + ROWS], len(table))

    def row(self, position: int) -> pd.Series[Any]:
        """Return what the table has about one target."""
        require_position(position, len(self.whole), "target")
        return row_of(self.whole, position)

    def one(self, position: int, checkpoints: np.ndarray) -> xr.Dataset:
        """Return the features of one target at some checkpoints."""
        require_position(position, self.features.sizes[SAMPLE], "target")
        return self.of(checkpoints).isel({SAMPLE: [position]})

    def of(self, checkpoints: np.ndarray) -> xr.Dataset:
        """Return the features of all targets at some checkpoints."""
        return self.features.sel({CHECKPOINT: checkpoints})


def metadata(ds: xr.Dataset) -> pd.DataFrame:
    """Return the coords along the samples as columns, loaded, by position."""
    coords = {
        str(name): np.asarray(variable.values)
        for name, variable in coords_along(ds, SAMPLE).items()
        if variable.dtype.kind != "V"
    }
    return pd.DataFrame(coords, index=pd.RangeIndex(ds.sizes[SAMPLE]))


def condition_mask(table: pd.DataFrame, condition: str) -> np.ndarray:
    """Return for which rows of a table a condition on its columns is true.

    Raises
    ------
    ConditionError
        If it is no condition, or names other columns.

    Examples
    --------
    >>> condition_mask(pd.DataFrame({"label": [1, 3]}), "label == 3").tolist()
    [False, True]
    """
    coords: dict[Hashable, tuple[str, np.ndarray]] = {
        name: (SAMPLE, table[name].to_numpy()) for name in table
    }
    coords.setdefault(SAMPLE, (SAMPLE, np.arange(len(table))))
    try:
        mask = Condition(condition)(xr.Dataset(coords=coords))
    except ValueError as err:
        raise ConditionError(str(err)) from err
    return np.asarray(np.broadcast_to(mask.values, len(table)))


def searched(table: pd.DataFrame, text: str) -> pd.DataFrame:
    """Return the rows in which some column of texts contains a text, in any case.

    Examples
    --------
    >>> searched(pd.DataFrame({"source": ["Web", "book"]}), "web").index.tolist()
    [0]
    """
    if not text:
        return table
    is_found = np.zeros(len(table), bool)
    for name in table:
        if table[name].dtype.kind not in "fiubMm":
            texts = table[name].astype(str)
            is_found |= texts.str.contains(text, case=False, regex=False).to_numpy(bool)
    return table[is_found]


def few_values(table: pd.DataFrame, most: int) -> list[str]:
    """Return the columns that have at least two and at most some number of different values."""
    counts = {str(name): table[name].nunique() for name in table}
    return [name for name, count in counts.items() if 2 <= count <= most]


def row_of(table: pd.DataFrame, position: int) -> pd.Series[Any]:
    """Return a row in which integers are still integers."""
    return table.iloc[[position]].astype(object).iloc[0]


def require_position(position: int, n: int, what: str) -> None:
    """Reject the position of a sample or target that is not there."""
    if not 0 <= position < n:
        raise ValueError(f"There is no {what} {position}: they are numbered from 0 to {n - 1}.")
