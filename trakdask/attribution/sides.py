"""The rows of a product: whole samples, or the parts of samples, which add up to them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize

from trakdask.variables import (
    MODULE,
    SAMPLE,
    TARGET,
    TARGET_PREFIX,
    TOKEN,
    lazy_features,
    validate,
)

__all__ = [
    "coords_of_parts",
    "coords_of_targets",
    "dims_of_scores",
    "lazy_side",
    "part_dim",
    "per_part",
    "require_side",
    "rows",
    "spread",
    "whole",
]

_PARTS = (TOKEN, MODULE)


def part_dim(ds: xr.Dataset) -> str | None:
    """Return the dimension of the parts of samples; None if the features are of whole samples."""
    if "feature" not in ds:
        return None
    return next((dim for dim in _PARTS if dim in ds["feature"].dims), None)


def require_side(ds: xr.Dataset, names: list[str], *, what: str) -> None:
    """Check that a Dataset has features of samples or of their parts, and other variables."""
    dim = part_dim(ds) if isinstance(ds, xr.Dataset) else None
    if dim is None:
        validate(ds, names, what=what)
        return
    if (dims := ds["feature"].dims)[:2] != (SAMPLE, dim):
        raise ValueError(
            f"expected 'feature' of {what} with the dimensions sample and {dim} first, got {dims}; "
            f"try ds.transpose('sample', {dim!r}, ...)"
        )
    if len(ds["feature"].variable.chunksizes.get(dim, ())) > 1:
        raise ValueError(
            f"expected 'feature' of {what} in one chunk along {dim!r}, got "
            f"{ds['feature'].variable.chunksizes[dim]}; try ds.chunk({{{dim!r}: -1}})"
        )
    validate(ds.isel({dim: 0}), names, what=what)


def lazy_side(ds: xr.Dataset) -> xr.Dataset:
    """Return lazy features, as :func:`lazy_features` does; coords of parts stay as they are."""
    dim = part_dim(ds)
    if dim is None:
        return lazy_features(ds)
    kept = {name: coord for name, coord in ds.coords.items() if dim in coord.dims}
    return lazy_features(ds.drop_vars(list(kept))).assign_coords(kept)


def coords_of_parts(ds: xr.Dataset) -> dict[Hashable, xr.Variable]:
    """Return the coords that run along the parts, such as the text of tokens."""
    dim = part_dim(ds)
    return {name: coord.variable for name, coord in ds.coords.items() if dim in coord.dims}


def dims_of_scores(of: xr.Dataset, targets: xr.Dataset) -> tuple[str, ...]:
    """Return the dimensions of scores without that of checkpoints."""
    ours, theirs = part_dim(of), _target_part_dim(targets, of)
    return (SAMPLE, *([ours] if ours else []), TARGET, *([theirs] if theirs else []))


def coords_of_targets(
    targets: xr.Dataset, of: xr.Dataset | None = None
) -> dict[Hashable, xr.Variable]:
    """Return the coords of the parts of targets, with their prefix and dimensions in scores."""
    dim, new = part_dim(targets), _target_part_dim(targets, of)
    return {
        name if name == dim == new else f"{TARGET_PREFIX}{name}": _renamed(coord, {dim: new})
        for name, coord in coords_of_parts(targets).items()
    }


def _target_part_dim(targets: xr.Dataset, of: xr.Dataset | None) -> str | None:
    dim = part_dim(targets)
    is_taken = dim is not None and of is not None and part_dim(of) == dim
    return f"{TARGET_PREFIX}{dim}" if is_taken else dim


def _renamed(coord: xr.Variable, dims: dict[Any, Any]) -> xr.Variable:
    names = {SAMPLE: TARGET, **dims}
    return xr.Variable([names[dim] for dim in coord.dims], coord.data, coord.attrs)


def rows(ds: xr.Dataset) -> da.Array:
    """Return the features of all parts one after the other, (sample * part, proj_dim, checkpoint).

    Features of whole samples are returned as they are.
    """
    data: da.Array = ds["feature"].data
    if part_dim(ds) is None:
        return data
    n = data.shape[1]
    flat: da.Array = da.map_blocks(
        _merged, data,
        drop_axis=1, chunks=(tuple(size * n for size in data.chunks[0]), *data.chunks[2:]),
        dtype=data.dtype, meta=np.empty((0, 0, 0), data.dtype), name=f"rows-{tokenize(data.name)}",
    )  # fmt: skip
    return flat


def _merged(block: np.ndarray) -> np.ndarray:
    return block.reshape(-1, *block.shape[2:])


def whole(ds: xr.Dataset) -> da.Array:
    """Return the features of whole samples, (sample, proj_dim, checkpoint)."""
    data: da.Array = ds["feature"].data
    return data if part_dim(ds) is None else data.sum(axis=1, dtype=data.dtype)


def spread(ds: xr.Dataset, values: da.Array) -> da.Array:
    """Repeat a value of each sample (sample, ...) for all of its parts, (sample * part, ...)."""
    dim = part_dim(ds)
    if dim is None:
        return values
    n = ds.sizes[dim]
    repeated: da.Array = da.map_blocks(
        np.repeat, values, n, axis=0,
        chunks=(tuple(size * n for size in values.chunks[0]), *values.chunks[1:]),
        dtype=values.dtype, name=f"spread-{tokenize(values.name, n)}",
    )  # fmt: skip
    return repeated


def per_part(data: da.Array, axis: int, ds: xr.Dataset) -> da.Array:
    """Split the axis of rows into samples and parts, the inverse of :func:`rows`."""
    dim = part_dim(ds)
    if dim is None:
        return data
    n = ds.sizes[dim]
    sizes = tuple(size // n for size in data.chunks[axis])
    chunks: Any = (*data.chunks[:axis], sizes, n, *data.chunks[axis + 1 :])
    apart: da.Array = da.map_blocks(
        _split, data, axis, n,
        new_axis=axis + 1, chunks=chunks,
        dtype=data.dtype, meta=np.empty((0,) * (data.ndim + 1), data.dtype),
        name=f"per-part-{tokenize(data.name, axis, n)}",
    )  # fmt: skip
    return apart


def _split(block: np.ndarray, axis: int, n: int) -> np.ndarray:
    return block.reshape(*block.shape[:axis], -1, n, *block.shape[axis + 1 :])
