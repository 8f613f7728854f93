"""What is reduced from the features of all training samples, to be kept beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.attribution.estimators import LOGIT_VARIANCE, GramEstimator, Soft
from trakdask.attribution.regularization import describe_damping, regularize
from trakdask.variables import CHECKPOINT, GRAM, LOSS_GRADIENT, checkpoint_names, lazy_features


def sums(
    features: xr.Dataset, estimator: GramEstimator, names: Sequence[str], index: int
) -> list[da.Array]:
    """Return sums over features at one checkpoint, lazy."""
    feature = features.feature.data[:, :, index : index + 1]
    h = estimator.h(features)
    h = None if h is None else h[:, index : index + 1]
    at_one = features.isel({CHECKPOINT: slice(index, index + 1)})
    if LOSS_GRADIENT not in names:
        return [estimator.completed(arrays.gram.gram(feature, h), at_one)]
    g = arrays.weights.pooled(estimator.g(features))[:, None]
    if GRAM not in names:
        return [arrays.gram.loss_gradient(feature, g)]
    matrix, gradient = arrays.gram.gram_and_sum(feature, h, g)
    return [estimator.completed(matrix, at_one), gradient]


def chosen_damping(
    ds: xr.Dataset, estimator: GramEstimator, calibrate: xr.Dataset | None
) -> tuple[np.ndarray, dict[str, Any]]:
    """Choose λ, from the stored eigenvectors; return its values and attrs."""
    features, variance = lazy_features(ds), None
    if isinstance(estimator, Soft):
        variance = arrays.weights.logit_variance(features.out_to_loss.data)
    resolved = estimator.resolved(ds)
    regularized = regularize(features, resolved, calibrate, quiet=True)
    chosen, variance = dask.compute(describe_damping(regularized), variance)
    attrs: dict[str, Any] = {
        "rule": str(chosen.rule.values),
        "pooled_checkpoints": checkpoint_names(ds),
    }
    if variance is not None:
        attrs[LOGIT_VARIANCE] = variance.tolist()
    if regularized.choice is not None:
        attrs |= {name: float(chosen[name]) for name in ("relative", "peak", "threshold")}
        attrs["curve"] = chosen.curve.values.tolist()
        attrs["samples"] = regularized.rules[0].removeprefix("completeness, ")
    return chosen.damping.values, attrs
