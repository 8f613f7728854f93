"""What a damping λ may be given as: a rule, a number, an absolute value, or one per checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import dask.array as da
import numpy as np
import xarray as xr

from trakdask.html_tables import HtmlTable
from trakdask.variables import CHECKPOINT, aligned

__all__ = ["Absolute", "Damping", "brief", "given_damping", "relative_damping"]


@dataclass(frozen=True)
class Absolute(HtmlTable):
    """A damping λ in the units of the gram matrix, the same for all checkpoints.

    Raises
    ------
    ValueError
        If ``value`` is not a finite number of at least 0.
    """

    value: float

    def __post_init__(self) -> None:
        if not _is_positive(self.value):
            raise ValueError(
                f"expected value as a finite number >= 0 in units of the gram matrix, got "
                f"{self.value!r}; try Absolute(1.0)"
            )


Rule = Literal["auto", "completeness", "trace", "closed_form"]
Damping = Rule | float | Absolute | xr.Dataset | xr.DataArray


def given_damping(features: xr.Dataset, damping: xr.Dataset | xr.DataArray) -> da.Array:
    """Return λ of the checkpoints of some features, from what :func:`trakdask.damping` returned."""
    remedy = "try damping=td.damping(features), or to choose λ by other samples, calibrate=samples"
    values = damping.get("damping") if isinstance(damping, xr.Dataset) else damping
    if values is None or values.dims != (CHECKPOINT,) or CHECKPOINT not in values.coords:
        has = list(damping.data_vars) if isinstance(damping, xr.Dataset) else damping.dims
        raise ValueError(
            f"expected 'damping' of each checkpoint, with the coord checkpoint, got {has}; {remedy}"
        )
    if values.dtype.kind not in "fiu":
        raise ValueError(f"expected damping in numbers, got dtype {values.dtype}; {remedy}")
    values = aligned(values, features, what="damping")
    if values.chunks is None and not all(map(_is_positive, values.values)):
        by_checkpoint = dict(
            zip(map(str, features[CHECKPOINT].values), values.values.tolist(), strict=True)
        )
        raise ValueError(f"expected finite damping >= 0, got {by_checkpoint}; {remedy}")
    data: da.Array = values.variable.chunk({CHECKPOINT: 1}).data
    return data


def relative_damping(value: Any) -> float:
    """Return a damping that is relative to tr(K²)/tr(K), as a number of at least 0."""
    if not _is_positive(value):
        raise ValueError(
            "expected damping as 'auto', 'completeness', 'trace', 'closed_form', a number >= 0 "
            "relative to tr(K²)/tr(K), td.Absolute(x), or what td.damping returned, got "
            f"{brief(value)}; try damping='auto'"
        )
    return float(value)


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    return bool(is_number and 0 <= value < np.inf)


def brief(value: Any) -> str:
    """Return a damping as an error shows it."""
    return repr(value) if isinstance(value, (str, int, float, Absolute)) else type(value).__name__
