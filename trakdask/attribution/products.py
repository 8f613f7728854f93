"""The two sides of each estimator's product: weights of samples, and vectors of targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.attribution.dampings import Absolute
from trakdask.attribution.loss_weights import LossWeights, loss_weights
from trakdask.attribution.options import LearningRates, Options
from trakdask.attribution.regularization import Regularized, regularize
from trakdask.attribution.sides import Side
from trakdask.variables import CHECKPOINT, aligned

__all__ = ["Solver", "solver"]

_PRODUCT = "phi_c(z) (K_c + damping_c I)^-1"
_FORMULAS = {
    "trak": f"mean_c[{_PRODUCT} phi_c(t)] mean_c[Q_c(z)]",
    "relatif": f"mean_c[{_PRODUCT} phi_c(t)] sign(Q(z)) / sqrt(mean_c[{_PRODUCT} phi_c(z)])",
    "grad_dot": "mean_c[phi_c(z) phi_c(t)] mean_c[Q_c(z)]",
    "grad_cos": "mean_c[cos(phi_c(z), phi_c(t))] sign(Q(z))",
    "tracin": "sum_c[learning_rate_c Q_c(z) phi_c(z) phi_c(t)]",
}


@dataclass(frozen=True)
class Solver:
    """The two sides of an estimator's product, each of which can be asked for alone.

    ``features`` are those of all training samples, which are compared with their norms as they are
    read if their gram matrix is stored. ``matrix`` is None where there is no gram matrix; ``attrs``
    say how scores are made; ``loss`` are the weights of samples. Where ``pooled``, those of
    checkpoints are replaced by their mean.
    """

    features: xr.Dataset
    options: Options
    matrix: Regularized | None
    attrs: dict[str, str]
    loss: LossWeights
    pooled: bool = True

    def solve(self, vectors: da.Array) -> da.Array:
        """Return (K + λ)⁻¹ of vectors, (row, proj_dim, checkpoint); them where there is no K."""
        return vectors if self.matrix is None else self.matrix.solve(vectors)

    def vectors(self, targets: Side) -> da.Array:
        """Return what features are multiplied with, for targets or their parts."""
        solved = self.solve(targets.rows())
        if self.options.estimator.name != "grad_cos":
            return solved
        norms = targets.spread(arrays.weights.inverse_norm(_norm(targets)))
        unit: da.Array = solved * norms.astype(solved.dtype)[:, None, :]
        return unit

    def weight(self, of: Side) -> da.Array:
        """Return the weight of each row, (row, checkpoint)."""
        name, q = self.options.estimator.name, of.ds.out_to_loss.data
        if name == "grad_cos":
            weight = _with_nan_spread(_sign(q) * arrays.weights.inverse_norm(_norm(of)))
        elif name == "tracin":
            # The product is a mean over checkpoints; TracIn is a sum.
            rates = _learning_rates(of.ds, self.options.learning_rates)
            weight = _with_nan_spread(q * (len(rates) * rates)[None, :])
        else:
            weight = self.loss.of(of.ds)
        if name == "relatif" and self.matrix is not None:
            own = self.matrix.leverage(of.whole()).mean(axis=1, keepdims=True)
            norm = arrays.weights.inverse_norm(da.broadcast_to(own, weight.shape))
            weight = _sign(weight) * norm
        return of.spread(weight)


def solver(features: xr.Dataset, options: Options) -> Solver:
    """Return the solver of an estimator; features are those of all training samples, chunked."""
    estimator, loss = options.estimator, loss_weights(options.estimator, features)
    attrs: dict[str, str] = {"estimator": estimator.name}
    if not estimator.has_gram:
        attrs["formula"] = _FORMULAS[estimator.name]
        if estimator.name == "tracin":
            rates = _learning_rates(features, options.learning_rates)
            attrs["learning_rates"] = ", ".join(f"{rate:g}" for rate in rates)
        pooled = estimator.name == "grad_dot"
        return Solver(features, options, None, attrs, loss, pooled=pooled)
    matrix, damping = regularize(features, options), options.damping
    attrs |= {
        "formula": _FORMULAS.get(
            estimator.name, f"mean_c[{_PRODUCT} phi_c(t)] mean_c[{loss.name}]"
        ),
        "damping": f"{damping.value}" if isinstance(damping, Absolute) else matrix.rules[-1],
        "gram_weights": estimator.weights.gram if options.weights is None else "given",
    }
    if matrix.choice is not None:
        attrs["damping"] = "completeness"
    return Solver(matrix.features, options, matrix, attrs, loss)


def _norm(side: Side) -> da.Array:
    return arrays.weights.squared_norm(side.whole())


def _sign(q: da.Array) -> da.Array:
    """Return the sign of the mean of Q over checkpoints, (sample, 1); that of 0 is +1."""
    sign: da.Array = da.where(q.mean(axis=1, keepdims=True) < 0, -1.0, 1.0)
    return sign


def _with_nan_spread(weight: da.Array) -> da.Array:
    """Spread NaN: a sample that failed at one checkpoint has no mean over them."""
    whole: da.Array = weight + 0 * weight.mean(axis=1, keepdims=True)
    return whole


def _learning_rates(features: xr.Dataset, given: LearningRates | None) -> np.ndarray:
    names = [str(name) for name in features[CHECKPOINT].values]
    typed = ", ".join(f"{name!r}: 0.1" for name in names[:2])
    is_labelled = isinstance(given, xr.DataArray) and given.dims == (CHECKPOINT,)
    if isinstance(given, xr.DataArray) and is_labelled and CHECKPOINT in given.indexes:
        given = aligned(given, features, what="learning_rates")
        given = dict(zip(map(str, given[CHECKPOINT].values), given.values.tolist(), strict=True))
    if not isinstance(given, Mapping) or not set(names) <= set(given):
        shown = list(given) if isinstance(given, Mapping) else given
        raise ValueError(
            f"expected learning_rates of each checkpoint {names}, as a mapping or a DataArray with "
            f"the coord checkpoint, got {shown!r}; try learning_rates={{{typed}, ...}}"
        )
    return np.array([_rate(name, given[name]) for name in names])


def _rate(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < np.inf:
        raise ValueError(
            f"expected finite learning_rates >= 0, got {value!r} for checkpoint {name!r}; try the "
            "rate that the optimiser used there"
        )
    return float(value)
