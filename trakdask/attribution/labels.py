"""Labels of scores: their coords and attrs, from those of the features on both sides."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from trakdask._version import __version__
from trakdask.provenance import FEATURE_SPEC, as_text
from trakdask.variables import (
    SAMPLE,
    TARGET,
    TARGET_PREFIX,
    VARIABLES,
    coords_along,
    may_have_failed,
)

__all__ = [
    "labelled",
    "require_flag",
    "require_own_names",
    "sample_coords",
    "score_attrs",
    "target_coords",
]


def labelled(
    name: str, dims: tuple[str, ...], data: Any, coords: Mapping[Hashable, Any], attrs: Any
) -> xr.DataArray:
    """Return a DataArray without copying its coords, as the constructor of DataArray does."""
    return xr.Dataset({name: (dims, data, attrs)}, coords=coords)[name]


def sample_coords(ds: xr.Dataset) -> dict[Hashable, Any]:
    """Return the coords of samples alone."""
    return {**coords_along(ds, SAMPLE)}


def target_coords(targets: xr.Dataset) -> dict[Hashable, Any]:
    """Return the same for targets, with their prefix."""
    coords = sample_coords(targets)
    return {f"{TARGET_PREFIX}{name}": (TARGET, coord.values) for name, coord in coords.items()}


def require_flag(name: str, value: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"expected {name} as True or False, got {value!r}; try {name}=True")


def require_own_names(features: xr.Dataset, targets: xr.Dataset) -> None:
    """Refuse coords of training samples that have the names of the targets' coords."""
    both = [name for name in sample_coords(features) if name in target_coords(targets)]
    if both:
        raise ValueError(
            f"expected names of the training samples' coords that scores do not have for the "
            f"targets' coords, got {both[0]!r} for both; try features.rename({{{both[0]!r}: ...}})"
        )


def score_attrs(
    features: xr.Dataset, targets: xr.Dataset, made: Mapping[str, str]
) -> dict[str, Any]:
    """Return the attrs of scores: how features were made, and how scores were made from them."""
    attrs = {name: features.attrs[name] for name in FEATURE_SPEC if name in features.attrs}
    attrs.pop("parameters", None)
    return as_text(attrs) | {
        "description": VARIABLES["score"].attrs["description"],
        **made,
        "source": features.attrs.get("source", ""),
        "target_source": targets.attrs.get("source", ""),
        **({"target_on_error": "record"} if may_have_failed(targets) else {}),
        "trakdask_version": __version__,
    }
