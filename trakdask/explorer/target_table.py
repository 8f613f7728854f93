"""The targets: their metadata and what the model says about them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from trakdask.explorer.computing import compute
from trakdask.explorer.metadata import condition_mask, few_values, metadata, searched
from trakdask.explorer.state import View
from trakdask.variables import CHECKPOINT, SAMPLE, TARGET

__all__ = ["ROWS", "TablePage", "TargetTable", "require_position", "row_of"]

ROWS = 25
"""Rows of a page of a table."""

MOST_COLUMNS = 40


@dataclass(frozen=True)
class TablePage:
    """Some rows of a table, indexed by position, and how many there are in all."""

    table: pd.DataFrame
    found: int
    total: int


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
        return few_values(self.metadata, MOST_COLUMNS)

    @cached_property
    def whole(self) -> pd.DataFrame:
        """Metadata, output, loss and disagreement of all targets."""
        names = [name for name in ("output", "out_to_loss") if name in self.features]
        values = compute(*(self.features[name].data for name in names))
        table = self.metadata.copy()
        for name, of_checkpoints in zip(names, values, strict=True):
            mean = np.asarray(of_checkpoints, np.float64).mean(axis=1)
            table["output" if name == "output" else "loss"] = mean
            if name == "output" and of_checkpoints.shape[1] > 1:
                table["disagreement"] = np.std(of_checkpoints, axis=1, ddof=1, dtype=np.float64)
        return table

    def page(self, view: View) -> TablePage:
        """Return the targets that a view searches and filters for, sorted, a page of them.

        Columns: the coords of the targets; ``output``, its mean over checkpoints; ``loss``, the
        mean of Q = ∂loss/∂output; ``disagreement``, the standard deviation of the output between
        checkpoints.
        """
        found = searched(self.whole, view.search)
        if view.targets_where:
            found = found[condition_mask(self.whole, view.targets_where, SAMPLE)[found.index]]
        if view.sort in found:
            found = found.sort_values(view.sort, ascending=view.ascending, kind="stable")
        rows = found.iloc[view.first : view.first + ROWS]
        return TablePage(rows, len(found), len(self.whole))

    def row(self, position: int) -> pd.Series[Any]:
        """Return what the table has about one target."""
        require_position(position, len(self.whole), TARGET)
        return row_of(self.whole, position)

    def one(self, position: int, checkpoints: np.ndarray) -> xr.Dataset:
        """Return the features of one target at some checkpoints."""
        require_position(position, self.features.sizes[SAMPLE], TARGET)
        return self.of(checkpoints).isel({SAMPLE: [position]})

    def of(self, checkpoints: np.ndarray) -> xr.Dataset:
        """Return the features of all targets at some checkpoints."""
        return self.features.sel({CHECKPOINT: checkpoints})


def row_of(table: pd.DataFrame, position: int) -> pd.Series[Any]:
    """Return a row in which integers are still integers."""
    return table.iloc[[position]].astype(object).iloc[0]


def require_position(position: int, n: int, what: str) -> None:
    """Reject the position of a sample or target that is not there.

    Raises
    ------
    ValueError
        If there are fewer.
    """
    if not 0 <= position < n:
        raise ValueError(f"expected a {what} from 0 to {n - 1}, got {position}; try {what} 0")
