"""What is reduced from the features of all training samples, to be kept beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.attribution.estimators import DEFAULT_POWER, Estimator, Weights, gather_options
from trakdask.attribution.grams import describe_damping, regularize
from trakdask.attribution.scores import LOGIT_VARIANCE
from trakdask.variables import CHECKPOINT, GRAM, LOSS_GRADIENT, lazy_features


def sums(
    features: xr.Dataset, weights: Weights, names: Sequence[str], index: int
) -> list[da.Array]:
    """Return sums over features at one checkpoint, lazy."""
    feature = features.feature.data[:, :, index : index + 1]
    h = weights.gram_data(features)
    h = None if h is None else h[:, index : index + 1]
    if LOSS_GRADIENT not in names:
        return [arrays.gram.gram(feature, h)]
    g = arrays.weights.pooled(weights.loss_data(features))[:, None]
    if GRAM not in names:
        return [arrays.gram.loss_gradient(feature, g)]
    return list(arrays.gram.gram_and_sum(feature, h, g))


def chosen_damping(
    ds: xr.Dataset, calibrate: xr.Dataset | None
) -> tuple[np.ndarray, dict[str, Any]]:
    """Choose λ, from the stored eigenvectors; return its values and attrs."""
    features, power, variance = lazy_features(ds), ds[GRAM].attrs.get("power"), None
    estimator: Estimator = "trak"
    if power is not None:
        estimator, variance = "soft", arrays.weights.logit_variance(features.out_to_loss.data)
    power = DEFAULT_POWER if power is None else power
    options = gather_options(ds, estimator, power, "auto", calibrate)
    regularized = regularize(features, options, quiet=True)
    chosen, variance = dask.compute(describe_damping(regularized), variance)
    attrs: dict[str, Any] = {
        "asked": options.rule,
        "rule": str(chosen.rule.values),
        "pooled_checkpoints": [str(name) for name in ds[CHECKPOINT].values],
    }
    if variance is not None:
        attrs[LOGIT_VARIANCE] = variance.tolist()
    if options.rule == "completeness":
        attrs |= {name: float(chosen[name]) for name in ("relative", "peak", "threshold")}
        attrs["curve"] = chosen.curve.values.tolist()
        attrs["tried"] = [text.removeprefix("completeness, ") for text in regularized.rules[:-1]]
    return chosen.damping.values, attrs
