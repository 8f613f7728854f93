"""The two sides of each estimator's product: weights of samples, and vectors of targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.attribution.dampings import Absolute
from trakdask.attribution.estimators import Weights
from trakdask.attribution.options import LearningRates, Options
from trakdask.attribution.regularization import regularize
from trakdask.attribution.sides import rows, spread, whole
from trakdask.variables import CHECKPOINT, aligned

__all__ = ["Factors", "factors"]

_PRODUCT = "phi_c(z) (K_c + damping_c I)^-1"
_FORMULAS = {
    "trak": f"mean_c[{_PRODUCT} phi_c(t)] mean_c[Q_c(z)]",
    "relatif": f"mean_c[{_PRODUCT} phi_c(t)] sign(Q(z)) / sqrt(mean_c[{_PRODUCT} phi_c(z)])",
    "grad_dot": "mean_c[phi_c(z) phi_c(t)] mean_c[Q_c(z)]",
    "grad_cos": "mean_c[cos(phi_c(z), phi_c(t))] sign(Q(z))",
    "tracin": "sum_c[learning_rate_c Q_c(z) phi_c(z) phi_c(t)]",
}


@dataclass(frozen=True)
class Factors:
    """score = mean_c[ weight_c(z) φ_c(z)·solved_c(t) ]; ``attrs`` say how it was made.

    Where ``pooled``, each checkpoint's weight is replaced by their mean.
    """

    solved: da.Array
    weight: da.Array
    attrs: dict[str, str]
    pooled: bool = True


def factors(
    features: xr.Dataset, targets: xr.Dataset, options: Options, of: xr.Dataset | None = None
) -> Factors:
    """Return what to multiply features with; all sides are chunked already.

    Parameters
    ----------
    features
        The training samples, which the gram matrix is a sum over.
    targets
        Features of targets, or of their parts.
    options
        The options of the score.
    of
        What is multiplied: the training samples by default, or parts of some of them.
    """
    of = features if of is None else of
    if options.estimator.has_gram:
        made = _with_gram(features, targets, options, of)
    else:
        made = _without_gram(of, targets, options)
    return replace(made, weight=spread(of, made.weight))


def _with_gram(
    features: xr.Dataset, targets: xr.Dataset, options: Options, of: xr.Dataset
) -> Factors:
    matrix, estimator = regularize(features, options), options.estimator
    solved = matrix.solve(rows(targets))
    weight = estimator.weights.loss_data(of)
    if estimator.name == "relatif":
        own = matrix.leverage(whole(of)).mean(axis=1, keepdims=True)
        weight = _sign(weight) * arrays.weights.inverse_norm(da.broadcast_to(own, weight.shape))
    damping = options.damping
    attrs = {
        "estimator": estimator.name,
        "formula": _FORMULAS.get(estimator.name, _soft_formula(estimator.weights)),
        "damping": f"{damping.value}" if isinstance(damping, Absolute) else matrix.rules[-1],
        "gram_weights": estimator.weights.gram if options.weights is None else "given",
    }
    if matrix.choice is not None:
        attrs["damping"] = f"completeness, {arrays.damping_choice.STANDARD_ERRORS} SE"
    return Factors(solved, weight, attrs)


def _soft_formula(weights: Weights) -> str:
    return f"mean_c[{_PRODUCT} phi_c(t)] mean_c[{weights.loss}]"


def _without_gram(features: xr.Dataset, targets: xr.Dataset, options: Options) -> Factors:
    estimator = options.estimator.name
    attrs = {"estimator": estimator, "formula": _FORMULAS[estimator]}
    solved, q = rows(targets), features.out_to_loss.data
    if estimator == "grad_dot":
        return Factors(solved, q, attrs)
    if estimator == "grad_cos":
        norms = (arrays.weights.squared_norm(whole(side)) for side in (features, targets))
        ours, theirs = (arrays.weights.inverse_norm(norm) for norm in norms)
        unit = solved * spread(targets, theirs).astype(solved.dtype)[:, None, :]
        return Factors(unit, _with_nan_spread(_sign(q) * ours), attrs, pooled=False)
    rates = _learning_rates(features, options.learning_rates)
    attrs["learning_rates"] = ", ".join(f"{rate:g}" for rate in rates)
    # The product is a mean over checkpoints; TracIn is a sum.
    return Factors(solved, _with_nan_spread(q * (len(rates) * rates)[None, :]), attrs, pooled=False)


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
