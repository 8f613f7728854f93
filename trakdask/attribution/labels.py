"""Labels of scores: their dimensions, coords and attrs, from the features on both sides."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from trakdask._version import __version__
from trakdask.attribution.sides import Side
from trakdask.provenance import FEATURE_SPEC, as_text
from trakdask.variables import SAMPLE, TARGET, TARGET_PREFIX, VARIABLES, coords_along

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


def labels_of_scores(of: Side, targets: Side) -> Labels:
    """Return the dimensions and coords of scores.

    Raises
    ------
    ValueError
        If coords of training samples have the names of the targets' coords.
    """
    dims, coords = labels_of_samples(of)
    target_dims, target_coords = labels_of_targets(targets, of)
    if both := [name for name in coords if name in target_coords]:
        raise ValueError(
            f"expected names of the training samples' coords that scores do not have for the "
            f"targets' coords, got {both[0]!r} for both; try features.rename({{{both[0]!r}: ...}})"
        )
    return (*dims, *target_dims), coords | target_coords


def labels_of_samples(of: Side) -> Labels:
    """Return the dimensions and coords of training samples and of their parts."""
    return (SAMPLE, of.part) if of.part else (SAMPLE,), coords_along(of.ds, SAMPLE) | _of_parts(of)


def labels_of_targets(targets: Side, of: Side | None = None) -> Labels:
    """Return the dimensions and coords of targets and of their parts, with their prefix.

    If samples have parts of the same kind, the dimension of those of targets is renamed.
    """
    coords: dict[Hashable, Any] = {
        f"{TARGET_PREFIX}{name}": (TARGET, coord.values)
        for name, coord in coords_along(targets.ds, SAMPLE).items()
    }
    part = targets.part
    if part is None:
        return (TARGET,), coords
    renamed = f"{TARGET_PREFIX}{part}" if of is not None and of.part == part else part
    names = {SAMPLE: TARGET, part: renamed}
    for name, coord in _of_parts(targets).items():
        own = name if name == part == renamed else f"{TARGET_PREFIX}{name}"
        coords[own] = xr.Variable([names[str(d)] for d in coord.dims], coord.data, coord.attrs)
    return (TARGET, renamed), coords


def _of_parts(side: Side) -> dict[Hashable, xr.Variable]:
    """Return the coords that run along the parts, such as the text of tokens."""
    if side.part is None:
        return {}
    return {name: c.variable for name, c in side.ds.coords.items() if side.part in c.dims}


def score_attrs(training: Side, targets: Side, made: Mapping[str, str]) -> dict[str, Any]:
    """Return the attrs of scores: how features were made, and how scores were made from them."""
    attrs = training.ds.attrs
    kept = {name: attrs[name] for name in FEATURE_SPEC if name in attrs and name != "parameters"}
    return as_text(kept) | {
        **VARIABLES["score"].attrs,
        **made,
        "source": attrs.get("source", ""),
        "target_source": targets.ds.attrs.get("source", ""),
        **({"target_on_error": "record"} if targets.may_have_failed else {}),
        "trakdask_version": __version__,
    }
