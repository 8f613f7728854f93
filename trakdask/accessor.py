"""The ``.trak`` accessor: the public functions as methods, without state of its own."""

from __future__ import annotations

import os
from typing import Any

import xarray as xr

from trakdask import attribution, export, storage

__all__ = ["FeaturesAccessor", "ScoresAccessor"]


@xr.register_dataarray_accessor("trak")
class ScoresAccessor:
    """Methods of scores (sample, target)."""

    def __init__(self, scores: xr.DataArray) -> None:
        self._scores = scores

    def top_k(self, k: int, **options: Any) -> xr.Dataset:
        """See :func:`trakdask.top_k`."""
        return attribution.top_k(self._scores, k, **options)

    def to_zarr(self, store: str | os.PathLike[str], **options: Any) -> None:
        """See :func:`trakdask.to_zarr`."""
        export.to_zarr(self._scores, store, **options)

    def to_parquet(self, path: str | os.PathLike[str], **options: Any) -> None:
        """See :func:`trakdask.to_parquet`."""
        export.to_parquet(self._scores, path, **options)


@xr.register_dataset_accessor("trak")
class FeaturesAccessor:
    """Methods of features, and of the rankings made from them."""

    def __init__(self, ds: xr.Dataset) -> None:
        self._ds = ds

    def save(self, store: str | os.PathLike[str], **options: Any) -> xr.Dataset:
        """See :func:`trakdask.save`."""
        return storage.save(self._ds, store, **options)

    def gram(self, **options: Any) -> xr.DataArray:
        """See :func:`trakdask.gram`."""
        return attribution.gram(self._ds, **options)

    def damping(self, *args: Any, **options: Any) -> xr.Dataset:
        """See :func:`trakdask.damping`."""
        return attribution.damping(self._ds, *args, **options)

    def score(self, targets: xr.Dataset, **options: Any) -> xr.DataArray:
        """See :func:`trakdask.score`."""
        return attribution.score(self._ds, targets, **options)

    def group_score(self, targets: xr.Dataset, **options: Any) -> xr.DataArray:
        """See :func:`trakdask.group_score`."""
        return attribution.group_score(self._ds, targets, **options)

    def self_influence(self, **options: Any) -> xr.DataArray:
        """See :func:`trakdask.self_influence`."""
        return attribution.self_influence(self._ds, **options)

    def to_parquet(self, path: str | os.PathLike[str], **options: Any) -> None:
        """See :func:`trakdask.to_parquet`."""
        export.to_parquet(self._ds, path, **options)
