"""The options of a score: checked together, and gathered once into one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import dask.array as da
import numpy as np
import xarray as xr

from trakdask.attribution.dampings import Damping, brief
from trakdask.attribution.estimators import (
    Estimator,
    ResolvedEstimator,
    resolve_estimator,
)
from trakdask.variables import CHECKPOINT, SAMPLE, aligned

__all__ = ["LearningRates", "Options", "gather_options", "weight_data"]

LearningRates = Mapping[str, float] | xr.DataArray


@dataclass(frozen=True)
class Options:
    """The options that :func:`score`, :func:`group_score` and others share, checked.

    All are as given, but for the estimator, which is resolved.
    """

    estimator: ResolvedEstimator
    damping: Damping = "auto"
    calibrate: xr.Dataset | None = None
    weights: xr.DataArray | None = None
    learning_rates: LearningRates | None = None

    @property
    def is_damped_by_outputs(self) -> bool:
        """Return whether λ is chosen by the outputs of the model."""
        rule = self.damping if isinstance(self.damping, str) else None
        return (self.estimator.damping if rule == "auto" else rule) == "completeness"


def gather_options(
    features: xr.Dataset,
    estimator: Estimator,
    power: float,
    damping: Damping,
    calibrate: xr.Dataset | None,
    weights: xr.DataArray | None,
    learning_rates: LearningRates | None = None,
    *,
    allowed: tuple[str, ...] = get_args(Estimator),
) -> Options:
    """Resolve the estimator for the features, and check that the other options go with it.

    Raises
    ------
    ValueError
        If the estimator is not one of those allowed, if its power is out of range, or if an option
        is given that has no effect with this estimator and damping.
    """
    resolved = resolve_estimator(estimator, power, features, allowed=allowed)
    if learning_rates is not None and estimator != "tracin":
        raise ValueError(
            f"expected estimator='tracin', the only one with learning_rates, got {estimator!r}; "
            "try estimator='tracin', or leave learning_rates out"
        )
    options = Options(resolved, damping, calibrate, weights, learning_rates)
    if not resolved.has_gram:
        _require_no_gram_options(options)
    elif calibrate is not None and not options.is_damped_by_outputs:
        raise ValueError(
            "expected damping='completeness' with calibrate, the rule that looks at outputs, got "
            f"damping={brief(damping)} and estimator={resolved.name!r}; try "
            "damping='completeness', or leave calibrate out"
        )
    return options


def _require_no_gram_options(options: Options) -> None:
    """Reject options of the gram matrix for an estimator that has none."""
    is_auto = isinstance(options.damping, str) and options.damping == "auto"
    is_given = {"damping": not is_auto, "calibrate": options.calibrate is not None}
    is_given["weights"] = options.weights is not None
    if given := [name for name, value in is_given.items() if value]:
        raise ValueError(
            "expected neither damping, calibrate nor weights with estimator="
            f"{options.estimator.name!r}, which has no gram matrix, got {', '.join(given)}; try "
            "leaving them out, or estimator='trak'"
        )


def weight_data(features: xr.Dataset, weights: xr.DataArray | None) -> da.Array | None:
    """Return given weights (sample, checkpoint) in the chunks of the features, checked.

    By their labels where both sides have them: see :func:`trakdask.variables.aligned`.
    """
    if weights is None:
        return None
    shape = {dim: features.sizes[dim] for dim in (SAMPLE, CHECKPOINT)}
    if isinstance(weights, xr.DataArray) and set(weights.dims) <= set(shape):
        weights = aligned(weights, features, what="weights")
    sizes = dict(weights.sizes) if isinstance(weights, xr.DataArray) else type(weights).__name__
    if sizes not in ({SAMPLE: shape[SAMPLE]}, shape):
        raise ValueError(
            f"expected weights as a DataArray of {shape}, with or without checkpoint, got {sizes}; "
            "try xr.DataArray(h, dims='sample')"
        )
    if weights.dtype.kind not in "fiub":
        raise ValueError(
            f"expected weights in numbers, got dtype {weights.dtype}; try weights.astype(float)"
        )
    if weights.chunks is None:
        _require_positive(weights)
    chunks = {dim: features.feature.variable.chunksizes[dim] for dim in shape}
    full = weights.broadcast_like(
        xr.DataArray(np.empty(features.sizes[CHECKPOINT]), dims=CHECKPOINT)
    )
    data: da.Array = full.transpose(SAMPLE, CHECKPOINT).variable.chunk(chunks).data
    return data


def _require_positive(weights: xr.DataArray) -> None:
    values = weights.values
    bad = ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        at = np.argwhere(bad)[0]
        where = ", ".join(f"{dim} {int(i)}" for dim, i in zip(weights.dims, at, strict=True))
        raise ValueError(
            f"expected finite weights >= 0, since the gram matrix must stay positive, got "
            f"{values[tuple(at)]} at {where}; try weights.clip(min=0).fillna(0)"
        )
