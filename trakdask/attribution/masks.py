"""Masks over tiles of scores: of a text, an array, or a function of the coords."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from trakdask.arrays.topk import TileMask
from trakdask.attribution.conditions import Condition, selection
from trakdask.variables import SAMPLE, TARGET, aligned, coords_along, stays_in_store


def columns_along(scores: xr.DataArray, dim: str) -> dict[Hashable, np.ndarray | da.Array]:
    """Return the values of coords: in memory, or as lazy arrays if they stay in a store."""
    sizes = scores.variable.chunksizes[SAMPLE]
    return {
        name: coord.data if stays_in_store(coord, sizes) else coord.values
        for name, coord in coords_along(scores, dim).items()
    }


def mask_of(scores: xr.DataArray, where: Any) -> np.ndarray | TileMask | None:
    """Return None, a mask over samples, or one of tiles."""
    if where is None:
        return None
    if isinstance(where, str):
        where = selection(scores, where)
    if callable(where) and not isinstance(where, (xr.DataArray, np.ndarray)):
        dims: dict[Hashable, str] = {}
        columns: list[tuple[np.ndarray | da.Array, str]] = []
        for dim, axis in ((SAMPLE, "s"), (TARGET, "t")):
            for name, values in columns_along(scores, dim).items():
                if not isinstance(where, Condition) or name in where.names:
                    dims[name] = dim
                    columns.append((values, axis))
        return TileMask(functools.partial(_mask_of_coords, where, dims), tuple(columns))
    if not isinstance(where, xr.DataArray):  # which makes NaN of what a masked array hides
        n_dims = np.ndim(where)  # and keeps the index of what pandas made
        where = xr.DataArray(where, dims=(SAMPLE, TARGET, *range(2, n_dims))[:n_dims])
    is_bool = where.dtype.kind == "b" and (where.dtype == bool or not where.isnull().any())
    if not is_bool or not where.dims or not set(where.dims) <= {SAMPLE, TARGET}:
        raise ValueError(
            f"expected where as bool over samples, or over both of {dict(scores.sizes)}, got "
            f"{where.dtype} over {dict(where.sizes)}; try where=(scores.label == 3), or "
            "where=lambda tile: tile.label == tile.target_label"
        )
    where = aligned(where, scores, what="where")
    if where.dims == (SAMPLE,):
        return where.values
    index = "t" if where.dims == (TARGET,) else "st"
    values = where.transpose(SAMPLE, TARGET, missing_dims="ignore").values
    return TileMask(_broadcast, ((values, index),))


def _mask_of_coords(
    where: Callable[[xr.Dataset], xr.DataArray],
    dims: Mapping[Hashable, str],
    samples: range,
    targets: range,
    *coords: np.ndarray,
) -> np.ndarray:
    """Return a function of the coords of a tile, (sample, target)."""
    pairs = zip(dims.values(), coords, strict=True)
    positions = {SAMPLE: (SAMPLE, np.array(samples)), TARGET: (TARGET, np.array(targets))}
    tile = xr.Dataset(coords=positions | dict(zip(dims, pairs, strict=True)))
    mask = where(tile)
    is_mask = isinstance(mask, xr.DataArray) and mask.dtype == bool
    if not is_mask or any(tile.sizes.get(dim) != size for dim, size in mask.sizes.items()):
        is_array = isinstance(mask, xr.DataArray)
        actual = f"{mask.dtype} over {dict(mask.sizes)}" if is_array else type(mask).__name__
        raise ValueError(
            f"expected the function where= to return a boolean DataArray over the tile's "
            f"{dict(tile.sizes)}, got {actual}; try lambda tile: tile.label == tile.target_label"
        )
    whole = mask.variable.set_dims(tile.sizes).transpose(SAMPLE, TARGET)
    return np.asarray(whole.values)


def _broadcast(samples: range, targets: range, mask: np.ndarray) -> np.ndarray:
    """Return a mask over targets, or over both, as (sample, target)."""
    return np.broadcast_to(mask, (len(samples), len(targets)))
