"""Results as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from rich.markup import escape
from rich.table import Table

from trakdask import plots
from trakdask.variables import RANK, TARGET, TARGET_PREFIX

__all__ = ["about", "faults", "groups", "ranking"]

_MOST_TARGETS = 5
_MOST_GROUPS = 20
_MOST_ITEMS = 4


def about(data: xr.Dataset | xr.DataArray, title: str) -> Table:
    """Return the sizes, the coords and the attributes of a result."""
    table = _table(title, "", "")
    _add(table, "sizes", ", ".join(f"{size:,} {dim}" for dim, size in data.sizes.items()))
    if isinstance(data, xr.Dataset):
        _add(table, "variables", ", ".join(map(str, data.data_vars)))
    kinds = {n: "text" if c.dtype.kind == "T" else c.dtype for n, c in data.coords.items()}
    coords = (f"{name} ({kind})" for name, kind in kinds.items())
    _add(table, "coords", ", ".join(coords))
    for name, value in data.attrs.items():
        _add(table, name, _brief(value))
    return table


def ranking(ranked: xr.Dataset) -> Table:
    """Return the first targets of a ranking, one row per target, with their metadata."""
    first = ranked.isel({TARGET: slice(_MOST_TARGETS)}).compute()
    unit = plots.power_of_ten(first.score)
    of_samples, of_targets = _names(first, (TARGET, RANK)), _names(first, (TARGET,))
    title = f"{_share(ranked)}; scores in 1e{unit}"
    table = _table(title, TARGET, "score", *of_samples, "position")
    for target in range(first.sizes[TARGET]):
        one = first.isel({TARGET: target})
        described = (f"{n.removeprefix(TARGET_PREFIX)} {one[n].item()}" for n in of_targets)
        _add(
            table,
            _lines([_label(first, TARGET, target), *described]),
            _lines(f"{score / 10.0**unit:+.3f}" for score in one.score.values),
            *(_lines(one[name].values.tolist()) for name in of_samples),
            _lines(one.position.values),
        )
        table.add_section()
    return table


def groups(sums: xr.DataArray) -> Table:
    """Return the sums of scores of the first targets, one row per group."""
    (by,) = (dim for dim in sums.dims if dim != TARGET)
    first = sums.isel({by: slice(_MOST_GROUPS), TARGET: slice(_MOST_TARGETS)})
    unit = plots.power_of_ten(first)
    columns = [f"{TARGET} {_label(first, TARGET, n)}" for n in range(first.sizes[TARGET])]
    table = _table(f"{_share(sums)}; sums of scores in 1e{unit}", str(by), *columns)
    for row in range(first.sizes[by]):
        values = first.isel({by: row}).values / 10.0**unit
        _add(table, _label(first, by, row), *(f"{value:+.3f}" for value in values))
    return table


def faults(found: pd.DataFrame, store: str) -> Table:
    """Return what is wrong with a store, one row per file."""
    table = _table(f"{len(found)} faults of {store}", "path", "found", "try")
    for row in found.itertuples():
        _add(table, row.path, row.found, row.remedy)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=escape(title), title_justify="left", show_header=any(columns))
    for column in columns:
        table.add_column(escape(column), overflow="fold")
    return table


def _add(table: Table, *cells: object) -> None:
    texts = (f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in cells)
    table.add_row(*map(escape, texts))


def _lines(values: Iterable[object]) -> str:
    # Integers are floats where a rank may have no sample.
    texts = (f"{value:.12g}" if isinstance(value, float) else str(value) for value in values)
    return "\n".join(texts)


def _share(data: xr.Dataset | xr.DataArray) -> str:
    n = data.sizes[TARGET]
    return f"{n} targets" if n <= _MOST_TARGETS else f"the first {_MOST_TARGETS} of {n} targets"


def _names(ranked: xr.Dataset, dims: tuple[str, ...]) -> list[str]:
    return [str(n) for n, c in ranked.coords.items() if c.dims == dims and n != TARGET]


def _label(data: xr.Dataset | xr.DataArray, dim: Any, position: int) -> object:
    return data[dim].values[position] if dim in data.coords else position


def _brief(value: object) -> str:
    """Return an attribute in a few words: the first items, and how many there are."""
    if isinstance(value, Mapping):
        return _listed([f"{name}: {_brief(item)}" for name, item in value.items()])
    if isinstance(value, (list, tuple, np.ndarray)):
        return _listed([_brief(item) for item in value])
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _listed(items: Iterable[str]) -> str:
    items = list(items)
    more = len(items) - _MOST_ITEMS
    return ", ".join(items[:_MOST_ITEMS]) + (f", ... ({len(items)})" if more > 0 else "")
