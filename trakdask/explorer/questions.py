"""Small tables that answer questions to lazy attributions; nothing here knows of pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
import xarray as xr

import trakdask as td
from trakdask.attribution.conditions import selection
from trakdask.explorer.state import View, damping_of
from trakdask.variables import SAMPLE, TARGET

__all__ = ["Questions", "TargetsPage"]

ROWS = 25


@dataclass(frozen=True)
class TargetsPage:
    """Some rows of the table of targets, and how many there are in all."""

    table: pd.DataFrame
    found: int
    total: int


class Questions:
    """Answers about features and targets, each from what it needs and no more."""

    def __init__(self, features: xr.Dataset, targets: xr.Dataset, **options: Any) -> None:
        self.features, self.targets, self.options = features, targets, options

    def targets_page(self, view: View) -> TargetsPage:
        coords = {n: c.values for n, c in self.targets.coords.items() if c.dims == (SAMPLE,)}
        table = pd.DataFrame(coords, index=pd.RangeIndex(self.targets.sizes[SAMPLE], name=TARGET))
        return TargetsPage(table.iloc[view.first : view.first + ROWS], len(table), len(table))

    def top(self, view: View, *, largest: bool = True) -> pd.DataFrame:
        options = dict(self.options)
        if view.estimator:
            options["estimator"] = view.estimator
        if view.damping:
            options["damping"] = damping_of(view.damping)
        scores = td.score(self.features, self.targets.isel({SAMPLE: [view.target]}), **options)
        where = selection(scores, view.where) if view.where else None
        top = td.top_k(scores, view.k, where=where, largest=largest).compute()
        return top.isel({TARGET: 0}, drop=True).to_dataframe().reset_index()
