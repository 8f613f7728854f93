"""The ``.trak`` accessor: the public functions as methods, without state of its own.

Importing this module loads nothing but xarray; each method loads what it calls on first use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import xarray as xr

import trakdask as td

if TYPE_CHECKING:
    from trakdask.attribution.combinations import Weights
    from trakdask.attribution.estimators import Damping, Estimator, Power
    from trakdask.attribution.ranking import Where
    from trakdask.storage.saving import AppendDim

__all__ = ["FeaturesAccessor", "ScoresAccessor"]


@xr.register_dataarray_accessor("trak")
class ScoresAccessor:
    """Methods of scores (sample, target)."""

    def __init__(self, scores: xr.DataArray) -> None:
        self._scores = scores

    def top_k(self, k: int, *, where: Where | None = None, largest: bool = True) -> xr.Dataset:
        """See :func:`trakdask.top_k`."""
        return td.top_k(self._scores, k, where=where, largest=largest)

    def top_fraction(
        self, fraction: float, *, by: str | None = None, how: Literal["max", "mean"] = "max"
    ) -> xr.Dataset:
        """See :func:`trakdask.top_fraction`."""
        return td.top_fraction(self._scores, fraction, by=by, how=how)

    def to_zarr(
        self,
        store: str | os.PathLike[str],
        *,
        max_bytes: int | str = "10 GiB",
        overwrite: bool = False,
    ) -> None:
        """See :func:`trakdask.to_zarr`."""
        td.to_zarr(self._scores, store, max_bytes=max_bytes, overwrite=overwrite)

    def to_parquet(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int | str = "10 GiB",
        overwrite: bool = False,
    ) -> None:
        """See :func:`trakdask.to_parquet`."""
        td.to_parquet(self._scores, path, max_bytes=max_bytes, overwrite=overwrite)


@xr.register_dataset_accessor("trak")
class FeaturesAccessor:
    """Methods of features, and of the rankings made from them."""

    def __init__(self, ds: xr.Dataset) -> None:
        self._ds = ds

    def save(
        self,
        store: str | os.PathLike[str],
        *,
        gram: bool = True,
        estimator: Estimator = "auto",
        power: Power = "auto",
        calibrate: xr.Dataset | None = None,
        append_dim: AppendDim | None = None,
        dtype: Literal["float16"] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        progress: bool = True,
        retries: int = 0,
    ) -> xr.Dataset:
        """See :func:`trakdask.save`."""
        return td.save(
            self._ds,
            store,
            gram=gram,
            estimator=estimator,
            power=power,
            calibrate=calibrate,
            append_dim=append_dim,
            dtype=dtype,
            storage_options=storage_options,
            progress=progress,
            retries=retries,
        )

    def combine(
        self,
        *,
        by: str | None = None,
        how: Literal["mean", "sum"] = "mean",
        weights: Weights | None = None,
    ) -> xr.Dataset:
        """See :func:`trakdask.combine`."""
        return td.combine(self._ds, by=by, how=how, weights=weights)

    def gram(self, *, weights: xr.DataArray | None = None) -> xr.DataArray:
        """See :func:`trakdask.gram`."""
        return td.gram(self._ds, weights=weights)

    def damping(
        self,
        damping: Damping = "auto",
        *,
        estimator: Estimator = "auto",
        power: Power = "auto",
        calibrate: xr.Dataset | None = None,
        weights: xr.DataArray | None = None,
    ) -> xr.Dataset:
        """See :func:`trakdask.damping`."""
        return td.damping(
            self._ds,
            damping,
            estimator=estimator,
            power=power,
            calibrate=calibrate,
            weights=weights,
        )

    def score(
        self,
        targets: xr.Dataset,
        *,
        estimator: Estimator = "auto",
        power: Power = "auto",
        damping: Damping = "auto",
        calibrate: xr.Dataset | None = None,
        weights: xr.DataArray | None = None,
        learning_rates: Mapping[str, float] | xr.DataArray | None = None,
        average: bool = True,
    ) -> xr.DataArray:
        """See :func:`trakdask.score`."""
        return td.score(
            self._ds,
            targets,
            estimator=estimator,
            power=power,
            damping=damping,
            calibrate=calibrate,
            weights=weights,
            learning_rates=learning_rates,
            average=average,
        )

    def group_score(
        self,
        targets: xr.Dataset,
        *,
        by: str,
        estimator: Estimator = "auto",
        power: Power = "auto",
        damping: Damping = "auto",
        calibrate: xr.Dataset | None = None,
        weights: xr.DataArray | None = None,
        learning_rates: Mapping[str, float] | xr.DataArray | None = None,
    ) -> xr.DataArray:
        """See :func:`trakdask.group_score`."""
        return td.group_score(
            self._ds,
            targets,
            by=by,
            estimator=estimator,
            power=power,
            damping=damping,
            calibrate=calibrate,
            weights=weights,
            learning_rates=learning_rates,
        )

    def self_influence(
        self,
        *,
        estimator: Estimator = "auto",
        power: Power = "auto",
        damping: Damping = "auto",
        calibrate: xr.Dataset | None = None,
        weights: xr.DataArray | None = None,
        average: bool = True,
    ) -> xr.DataArray:
        """See :func:`trakdask.self_influence`."""
        return td.self_influence(
            self._ds,
            estimator=estimator,
            power=power,
            damping=damping,
            calibrate=calibrate,
            weights=weights,
            average=average,
        )

    def to_parquet(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int | str = "10 GiB",
        overwrite: bool = False,
    ) -> None:
        """See :func:`trakdask.to_parquet`."""
        td.to_parquet(self._ds, path, max_bytes=max_bytes, overwrite=overwrite)
