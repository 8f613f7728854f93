"""The two sides of each estimator's product: weights of samples, and vectors of targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.attribution.estimators import (
    Estimator,
    Weights,
    chosen_estimator,
    estimator_weights,
    require_estimator,
)
from trakdask.attribution.regularization import Absolute, Damping, regularize
from trakdask.provenance import require_comparable
from trakdask.variables import CHECKPOINT, aligned, lazy_features, validate

__all__ = ["WITHOUT_GRAM", "Factors", "cholesky", "factors", "refuse_options"]

WITHOUT_GRAM = ("grad_dot", "grad_cos", "tracin")
_PRODUCT = "phi_c(z) (K_c + damping_c I)^-1"
_FORMULAS = {
    "trak": f"mean_c[{_PRODUCT} phi_c(t)] mean_c[Q_c(z)]",
    "relatif": f"mean_c[{_PRODUCT} phi_c(t)] sign(Q(z)) / sqrt(mean_c[{_PRODUCT} phi_c(z)])",
    "grad_dot": "mean_c[phi_c(z) phi_c(t)] mean_c[Q_c(z)]",
    "grad_cos": "mean_c[cos(phi_c(z), phi_c(t))] sign(Q(z))",
    "tracin": "sum_c[learning_rate_c Q_c(z) phi_c(z) phi_c(t)]",
}

LearningRates = Mapping[str, float] | xr.DataArray


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
    features: xr.Dataset,
    targets: xr.Dataset,
    estimator: Estimator,
    *,
    power: float,
    learning_rates: LearningRates | None,
    **options: Any,
) -> tuple[xr.Dataset, Factors]:
    """Return the chunked features, and what to multiply them with."""
    require_estimator(estimator)
    validate(features, ["feature", "out_to_loss"], what="features")
    validate(targets, ["feature"], what="targets")
    require_comparable(features, targets)
    if learning_rates is not None and estimator != "tracin":
        raise ValueError(
            f"expected estimator='tracin', the only one with learning_rates, got {estimator!r}; "
            "try estimator='tracin', or leave learning_rates out"
        )
    estimator = chosen_estimator(estimator, features)
    features, targets = lazy_features(features), lazy_features(targets)
    if estimator in WITHOUT_GRAM:
        refuse_options(estimator, **options)
        found = _without_gram(features, targets, estimator, learning_rates)
    else:
        found = _with_gram(features, targets, estimator, power, **options)
    return features, found


def refuse_options(
    estimator: str, damping: Damping, calibrate: xr.Dataset | None, weights: xr.DataArray | None
) -> None:
    """Refuse options of the gram matrix where there is none."""
    is_auto = isinstance(damping, str) and damping == "auto"
    options = {"damping": not is_auto, "calibrate": calibrate is not None}
    options["weights"] = weights is not None
    if given := [name for name, is_given in options.items() if is_given]:
        raise ValueError(
            f"expected neither damping, calibrate nor weights with estimator={estimator!r}, which "
            f"has no gram matrix, got {', '.join(given)}; try leaving them out, or estimator='trak'"
        )


def _with_gram(
    features: xr.Dataset,
    targets: xr.Dataset,
    estimator: Estimator,
    power: float,
    *,
    damping: Damping,
    calibrate: xr.Dataset | None,
    weights: xr.DataArray | None,
) -> Factors:
    found = regularize(
        features,
        targets,
        damping,
        estimator=estimator,
        power=power,
        calibrate=calibrate,
        weights=weights,
    )
    factor = cholesky(features, found.gram, found.damping)  # lazy: made only if it is needed
    if found.spectrum is not None:
        solved = arrays.totals.solve(found.spectrum, found.damping, targets.feature.data)
    else:
        solved = arrays.solve.solve(factor, targets.feature.data)
    formula = estimator_weights(features, estimator, power)
    weight = formula.loss_data(features)
    if estimator == "relatif":
        own = arrays.solve.leverage(factor, features.feature.data).mean(axis=1, keepdims=True)
        weight = _sign(weight) * arrays.weights.inverse_norm(da.broadcast_to(own, weight.shape))
    attrs = {
        "estimator": estimator,
        "formula": _FORMULAS.get(estimator, _soft_formula(formula)),
        "damping": f"{damping.value}" if isinstance(damping, Absolute) else found.rules[-1],
        "gram_weights": formula.gram if weights is None else "given",
    }
    if found.choice is not None:
        attrs["damping"] = "completeness, 0.5 SE"
    return Factors(solved, weight, attrs)


def _soft_formula(formula: Weights) -> str:
    return f"mean_c[{_PRODUCT} phi_c(t)] mean_c[{formula.loss}]"


def cholesky(features: xr.Dataset, gram: da.Array, damping: da.Array) -> da.Array:
    """Return the factor of K_c + λ_c I; errors name the checkpoint."""
    labels = [str(name) for name in features[CHECKPOINT].values]
    return arrays.solve.cholesky(gram, damping, labels)


def _without_gram(
    features: xr.Dataset,
    targets: xr.Dataset,
    estimator: Estimator,
    learning_rates: LearningRates | None,
) -> Factors:
    attrs = {"estimator": estimator, "formula": _FORMULAS[estimator]}
    solved, q = targets.feature.data, features.out_to_loss.data
    if estimator == "grad_dot":
        return Factors(solved, q, attrs)
    if estimator == "grad_cos":
        norms = (arrays.weights.squared_norm(x) for x in (features.feature.data, solved))
        ours, theirs = (arrays.weights.inverse_norm(norm) for norm in norms)
        unit = solved * theirs.astype(solved.dtype)[:, None, :]
        return Factors(unit, _with_nan_spread(_sign(q) * ours), attrs, pooled=False)
    rates = _learning_rates(features, learning_rates)
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
        found = list(given) if isinstance(given, Mapping) else given
        raise ValueError(
            f"expected learning_rates of each checkpoint {names}, as a mapping or a DataArray with "
            f"the coord checkpoint, got {found!r}; try learning_rates={{{typed}, ...}}"
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
