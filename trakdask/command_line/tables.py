"""Results as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
import xarray as xr
from rich.markup import escape
from rich.table import Table

from trakdask.variables import RANK, TARGET

__all__ = ["about", "groups", "ranking", "table"]

_MOST_TARGETS = 5
_MOST_GROUPS = 20
_MOST_ITEMS = 4


def table(frame: pd.DataFrame, title: str) -> Table:
    """Return a table with the columns of a frame, and long texts folded."""
    made = Table(title=escape(title), title_justify="left")
    for column in frame:
        made.add_column(escape(str(column)), overflow="fold")
    for row in frame.itertuples(index=False):
        made.add_row(*(escape(_brief(value)) for value in row))
    return made


def about(data: xr.Dataset | xr.DataArray, title: str) -> Table:
    """Return the sizes, the variables, the coords and the attributes of a result."""
    variables = data.data_vars if isinstance(data, xr.Dataset) else [data.name]
    coords = {n: "text" if c.dtype.kind == "T" else c.dtype for n, c in data.coords.items()}
    rows = {
        "sizes": ", ".join(f"{size:,} {dim}" for dim, size in data.sizes.items()),
        "variables": ", ".join(map(str, variables)),
        "coords": ", ".join(f"{name} ({kind})" for name, kind in coords.items()),
        **data.attrs,
    }
    return table(pd.DataFrame(rows.items(), columns=["", " "]), title)


def ranking(ranked: xr.Dataset) -> Table:
    """Return the first targets of a ranking, with their metadata."""
    first = ranked.isel({TARGET: slice(_MOST_TARGETS)}).compute()
    frame = first.to_dataframe(dim_order=[TARGET, RANK]).reset_index()
    return table(frame, _share(ranked))


def groups(sums: xr.DataArray) -> Table:
    """Return the sums of scores of the first targets, one row per group."""
    (by,) = (dim for dim in sums.dims if dim != TARGET)
    first = sums.isel({by: slice(_MOST_GROUPS), TARGET: slice(_MOST_TARGETS)}).compute()
    frame = first.transpose(by, TARGET).to_pandas().rename(columns=lambda n: f"{TARGET} {n}")
    return table(frame.reset_index(), f"sums of scores of {_share(sums)}")


def _share(data: xr.Dataset | xr.DataArray) -> str:
    n = data.sizes[TARGET]
    return f"{n} targets" if n <= _MOST_TARGETS else f"the first {_MOST_TARGETS} of {n} targets"


def _brief(value: object) -> str:
    """Return a value in a few words: the first items, and how many there are."""
    if isinstance(value, Mapping):
        return _listed([f"{name}: {_brief(item)}" for name, item in value.items()])
    if isinstance(value, (list, tuple, np.ndarray)):
        return _listed([_brief(item) for item in value])
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _listed(items: Iterable[str]) -> str:
    items = list(items)
    more = len(items) - _MOST_ITEMS
    return ", ".join(items[:_MOST_ITEMS]) + (f", ... ({len(items)})" if more > 0 else "")
