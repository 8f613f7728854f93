"""The weights g of training samples in scores, whose power may depend on the model's outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.attribution.estimators import ResolvedEstimator
from trakdask.attribution.matrices import DAMPING, GRAM, N_SAMPLES
from trakdask.variables import CHECKPOINT, SAMPLE

__all__ = ["LOGIT_VARIANCE", "LossWeights", "loss_weights"]

LOGIT_VARIANCE = "logit_variance"
"""In the attrs of the stored λ: how much log((1 - q)/q) varies at each checkpoint."""


@dataclass(frozen=True)
class LossWeights:
    """How scores weight training samples: Q if ``power`` is None, else q^power.

    ``power`` is lazy, (), where it depends on outputs that are not computed yet. ``name`` is the
    formula.
    """

    name: str
    power: float | da.Array | None = None

    def of(self, features: xr.Dataset) -> da.Array:
        """Return g (sample, checkpoint) of some samples, not necessarily training samples."""
        q: da.Array = features.out_to_loss.data
        return q if self.power is None else arrays.weights.soft_loss_weights(q, self.power)


def loss_weights(estimator: ResolvedEstimator, features: xr.Dataset) -> LossWeights:
    """Return the weights of an estimator; features are those of all training samples, chunked."""
    weights = estimator.weights
    if not estimator.is_adaptive:
        return LossWeights(weights.loss, weights.power)
    known = _stored_variance(features)
    if known is not None:
        power = arrays.weights.power_of(known)
        return LossWeights(f"q^{power:.3g}", power)
    lazy = arrays.weights.adaptive_power(features.out_to_loss.data)
    return LossWeights("q^b, b in [0.5, 1] by the spread of log((1 - q)/q)", lazy)


def _stored_variance(features: xr.Dataset) -> np.ndarray[Any, Any] | None:
    """Return what :func:`trakdask.save` stored of these checkpoints.

    Rows selected from the store have the power of the whole, as they have its gram matrix.
    """
    if DAMPING not in features or GRAM not in features:
        return None
    attrs = features[DAMPING].attrs
    # Stores of trak, and of earlier versions, have λ without these variances.
    variances = attrs.get(LOGIT_VARIANCE, ())
    known = dict(zip(attrs.get("pooled_checkpoints", ()), variances, strict=False))
    names = [str(name) for name in features[CHECKPOINT].values]
    if not set(names) <= set(known) or features.sizes[SAMPLE] > attrs[N_SAMPLES]:
        return None
    return np.array([known[name] for name in names])
