"""Results as tables on a terminal."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

import pandas as pd
import xarray as xr
from rich import box
from rich.table import Table

from trakdask.variables import PROJ_DIM, RANK, SAMPLE, TARGET, checkpoint_names

_MOST_TARGETS = 5
_SHORT = reprlib.Repr()
_SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 8, 80, 80


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
    """Return three lines on what a store of features has, and how it was made."""
    n, p = features.sizes[SAMPLE], features.sizes[PROJ_DIM]
    coords = ", ".join(str(name) for name, coord in features.coords.items() if SAMPLE in coord.dims)
    names = _SHORT.repr(checkpoint_names(features))
    task, formula = (features.attrs.get(name, "unknown") for name in ("task", "formula"))
    return (
        f"{store}: {n:,} samples, {p:,} columns; checkpoints {names}\n"
        f"  metadata: {coords or 'none'}\n"
        f"  {task}; {formula}"
    )


def first_targets(ranking: xr.Dataset) -> Table:
    """Return the table that ``top-k`` prints: the first targets, with their metadata."""
    n = ranking.sizes[TARGET]
    first = ranking.isel({TARGET: slice(_MOST_TARGETS)}).compute()
    title = f"{n} targets" if n <= _MOST_TARGETS else f"the first {_MOST_TARGETS} of {n} targets"
    return table(first.to_dataframe(dim_order=[TARGET, RANK]).reset_index(), title)


def _brief(value: object) -> str:
    """Return a value in a few words; a value with many items by its first ones."""
    if isinstance(value, Mapping | list | tuple):
        return _SHORT.repr(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
