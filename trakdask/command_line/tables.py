"""Results as tables on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import xarray as xr
from rich import box
from rich.table import Table

from trakdask.checks import shown
from trakdask.variables import PROJ_DIM, RANK, SAMPLE, TARGET, checkpoint_names

_MOST_TARGETS = 5


def table(frame: pd.DataFrame, title: str) -> Table:
    """Return a table with the columns of a frame, and long texts folded."""
    # As narrow as can be: a terminal may have 80 columns.
    printed = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        show_edge=False, pad_edge=False,
    )  # fmt: skip
    for column in frame:
        printed.add_column(str(column), overflow="fold")
    for row in frame.itertuples(index=False):
        printed.add_row(*map(_brief, row))
    return printed


def brief(features: xr.Dataset, store: str) -> str:
    """Return a line on what a store of features has."""
    n, p = features.sizes[SAMPLE], features.sizes[PROJ_DIM]
    names = shown(checkpoint_names(features))
    return f"{store}: {n:,} samples, {p:,} columns; checkpoints {names}"


def first_targets(ranking: xr.Dataset) -> Table:
    """Return the table that ``top-k`` prints: the first targets, with their metadata."""
    n = ranking.sizes[TARGET]
    first = ranking.isel({TARGET: slice(_MOST_TARGETS)}).compute()
    title = f"{n} targets" if n <= _MOST_TARGETS else f"the first {_MOST_TARGETS} of {n} targets"
    return table(first.to_dataframe(dim_order=[TARGET, RANK]).reset_index(), title)


def _brief(value: object) -> str:
    if isinstance(value, Mapping | list | tuple):
        return shown(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
