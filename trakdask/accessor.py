"""The ``.trak`` accessor: the public functions as methods, without state of its own.

Importing this module loads nothing but xarray; each method loads what it calls on first use.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import xarray as xr

import trakdask as td


class _Method:
    """A public function with the array of the accessor as its first argument."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, accessor: Any, owner: type) -> Any:
        function = getattr(td, self._name)
        return function if accessor is None else MethodType(function, accessor._array)


@xr.register_dataarray_accessor("trak")
class ScoresAccessor:
    """Methods of scores (sample, target)."""

    def __init__(self, scores: xr.DataArray) -> None:
        self._array = scores

    top_k = _Method()
    to_zarr = _Method()
    to_parquet = _Method()


@xr.register_dataset_accessor("trak")
class FeaturesAccessor:
    """Methods of features, of scores with intervals, and of the rankings made from them."""

    def __init__(self, ds: xr.Dataset) -> None:
        self._array = ds

    save = _Method()
    combine = _Method()
    gram = _Method()
    damping = _Method()
    score = _Method()
    group_score = _Method()
    top_k = _Method()
    self_influence = _Method()
    to_zarr = _Method()
    to_parquet = _Method()
