"""Labels of scores: their dimensions, coords and attrs, from the features on both sides."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from trakdask._version import __version__
from trakdask.provenance import FEATURE_SPEC, as_text
from trakdask.variables import (
    MODULE,
    SAMPLE,
    TARGET,
    TARGET_PREFIX,
    TOKEN,
    VARIABLES,
    coords_along,
)

__all__ = [
    "labelled",
    "labels_of_samples",
    "labels_of_scores",
    "labels_of_targets",
    "require_flag",
    "score_attrs",
]

Labels = tuple[tuple[str, ...], dict[Hashable, Any]]
"""Dimensions, and coords along them."""


def labelled(
    name: str, dims: tuple[str, ...], data: Any, coords: Mapping[Hashable, Any], attrs: Any
) -> xr.DataArray:
    """Return a DataArray without copying its coords, as the constructor of DataArray does."""
    return xr.Dataset({name: (dims, data, attrs)}, coords=coords)[name]


def require_flag(name: str, value: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"expected {name} as True or False, got {value!r}; try {name}=True")


def labels_of_scores(samples: xr.Dataset, targets: xr.Dataset) -> Labels:
    """Return the dimensions and coords of scores; one side may be divided into tokens or modules.

    Raises
    ------
    ValueError
        If coords of training samples have the names of the targets' coords.
    """
    dims, coords = labels_of_samples(samples)
    target_dims, target_coords = labels_of_targets(targets)
    if both := [name for name in coords if name in target_coords]:
        raise ValueError(
            f"expected names of the training samples' coords that scores do not have for the "
            f"targets' coords, got {both[0]!r} for both; try features.rename({{{both[0]!r}: ...}})"
        )
    return (*dims, *target_dims), coords | target_coords


def labels_of_samples(samples: xr.Dataset) -> Labels:
    """Return the dimensions and coords of training samples."""
    parts = _part_dims(samples)
    return (SAMPLE, *parts), coords_along(samples, SAMPLE) | _coords_of(samples, parts)


def labels_of_targets(targets: xr.Dataset) -> Labels:
    """Return the dimensions and coords of targets, with their prefix."""
    coords: dict[Hashable, Any] = {
        f"{TARGET_PREFIX}{name}": (TARGET, coord.values)
        for name, coord in coords_along(targets, SAMPLE).items()
    }
    parts = _part_dims(targets)
    for name, coord in _coords_of(targets, parts).items():
        dims = [TARGET if dim == SAMPLE else dim for dim in coord.dims]
        own = name if name in parts else f"{TARGET_PREFIX}{name}"
        coords[own] = xr.Variable(dims, coord.data, coord.attrs)
    return (TARGET, *parts), coords


def _part_dims(ds: xr.Dataset) -> tuple[str, ...]:
    """Return the dimension of tokens or modules, if samples are divided into these."""
    return tuple(dim for dim in (TOKEN, MODULE) if dim in ds.variables["feature"].dims)


def _coords_of(ds: xr.Dataset, dims: tuple[str, ...]) -> dict[Hashable, xr.Variable]:
    """Return the coords that run along some dimensions, such as the text of tokens."""
    return {n: c.variable for n, c in ds.coords.items() if set(dims) & set(c.dims)}


def score_attrs(
    training: xr.Dataset, targets: xr.Dataset, made: Mapping[str, str], *, may_have_failed: bool
) -> dict[str, Any]:
    """Return the attrs of scores: how features were made, and how scores were made from them."""
    attrs = training.attrs
    kept = {name: attrs[name] for name in FEATURE_SPEC if name in attrs and name != "parameters"}
    return as_text(kept) | {
        **VARIABLES["score"].attrs,
        **made,
        "source": attrs.get("source", ""),
        "target_source": targets.attrs.get("source", ""),
        **({"target_on_error": "record"} if may_have_failed else {}),
        "trakdask_version": __version__,
    }
