"""Tables of metadata: their conditions and searches."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pandas as pd
import xarray as xr

from trakdask.attribution.conditions import Condition
from trakdask.variables import SAMPLE, coords_along

__all__ = ["condition_mask", "few_values", "metadata", "searched"]


def metadata(ds: xr.Dataset) -> pd.DataFrame:
    """Return the coords along the samples as columns, loaded, by position."""
    coords = {
        str(name): np.asarray(variable.values)
        for name, variable in coords_along(ds, SAMPLE).items()
        if variable.dtype.kind != "V"
    }
    return pd.DataFrame(coords, index=pd.RangeIndex(ds.sizes[SAMPLE]))


def condition_mask(table: pd.DataFrame, condition: str, dim: str) -> np.ndarray:
    """Return for which rows of a table a condition on its columns is true.

    Raises
    ------
    ValueError
        If it is no condition, or names other columns.

    Examples
    --------
    >>> condition_mask(pd.DataFrame({"label": [1, 3]}), "label == 3", "sample").tolist()
    [False, True]
    """
    coords: dict[Hashable, tuple[str, np.ndarray]] = {
        name: (dim, table[name].to_numpy()) for name in table
    }
    coords.setdefault(dim, (dim, np.arange(len(table))))
    mask = Condition(condition)(xr.Dataset(coords=coords))
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
    found = np.zeros(len(table), bool)
    for name in table:
        if table[name].dtype.kind not in "fiubMm":
            texts = table[name].astype(str)
            found |= texts.str.contains(text, case=False, regex=False).to_numpy(bool)
    return table[found]


def few_values(table: pd.DataFrame, most: int) -> list[str]:
    """Return the columns that have at least two and at most some number of different values."""
    counts = {str(name): table[name].nunique() for name in table}
    return [name for name, count in counts.items() if 2 <= count <= most]
