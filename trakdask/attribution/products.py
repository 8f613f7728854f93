"""Both operands of each estimator's product: weights of samples, and vectors of targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays.blocks import divided
from trakdask.attribution.dampings import Regularized, regularize
from trakdask.attribution.estimators import Absolute, LearningRates, Options, ResolvedEstimator
from trakdask.attribution.grams import DAMPING, GRAM, N_SAMPLES
from trakdask.attribution.groups import group_codes
from trakdask.provenance import require_comparable
from trakdask.variables import CHECKPOINT, SAMPLE, aligned, lazy_features, validate

__all__ = ["LOGIT_VARIANCE", "LossWeights", "Solver", "loss_weights", "operands", "solver"]

_PRODUCT = "phi_c(z) (K_c + damping_c I)^-1"
_FORMULAS = {
    "trak": f"mean_c[{_PRODUCT} phi_c(t)] mean_c[Q_c(z)]",
    "relatif": f"mean_c[{_PRODUCT} phi_c(t)] sign(Q(z)) / sqrt(mean_c[{_PRODUCT} phi_c(z)])",
    "grad_dot": "mean_c[phi_c(z) phi_c(t)] mean_c[Q_c(z)]",
    "grad_cos": "mean_c[cos(phi_c(z), phi_c(t))] sign(Q(z))",
    "tracin": "sum_c[learning_rate_c Q_c(z) phi_c(z) phi_c(t)]",
}


LOGIT_VARIANCE = "logit_variance"
"""In the attrs of the stored λ: how much log((1 - q)/q) varies at each checkpoint."""

_MOST_TARGETS = 4096
"""In a block. More would make large tiles, of which a selection of targets needs little."""


def operands(features: xr.Dataset, targets: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """Check the features of training samples and of targets, and return them with lazy arrays.

    Raises
    ------
    TypeError, ValueError
        If variables are missing, or have other dimensions or chunks.
    StoreMismatchError
        If they were made differently.
    """
    validate(features, ["feature", "out_to_loss"], what="features")
    validate(targets, ["feature"], what="targets")
    require_comparable(features, targets)
    targets = lazy_features(targets)
    feature = targets["feature"].variable
    sizes = feature.chunksizes[SAMPLE]
    if max(sizes, default=0) > _MOST_TARGETS:
        sizes = divided(sizes, _MOST_TARGETS)
        targets = targets.assign(feature=feature.chunk({SAMPLE: sizes}))
    return lazy_features(features), targets


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

    def vectors(self, targets: xr.Dataset) -> da.Array:
        """Return what features are multiplied with, for some targets."""
        solved = self.solve(targets.feature.data)
        if self.options.estimator.name != "grad_cos":
            return solved
        norms = _inverse_norm(targets)
        unit: da.Array = solved * norms.astype(solved.dtype)[:, None, :]
        return unit

    def weight(self, of: xr.Dataset) -> da.Array:
        """Return the weight of each sample, (sample, checkpoint)."""
        name, q = self.options.estimator.name, of.out_to_loss.data
        if name == "grad_cos":
            return _with_nan_spread(_sign(q) * _inverse_norm(of))
        if name == "tracin":
            # The product is a mean over checkpoints; TracIn is a sum.
            rates = _learning_rates(of, self.options.learning_rates)
            return _with_nan_spread(q * (len(rates) * rates)[None, :])
        weight = self.loss.of(of)
        if name == "relatif" and self.matrix is not None:
            own = self.matrix.leverage(of.feature.data).mean(axis=1, keepdims=True)
            norm = arrays.weights.inverse_norm(da.broadcast_to(own, weight.shape))
            weight = _sign(weight) * norm
        return weight

    def group_sums(self, of: xr.Dataset, by: str) -> tuple[da.Array, np.ndarray]:
        """Return the weighted sum of the features of each group of samples, and the groups."""
        codes, groups = group_codes(of[by].values)
        sums = arrays.groups.group_sum(
            of.feature.data, self.weight(of), codes, len(groups), pooled=self.pooled
        )
        return sums, groups


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


def _inverse_norm(features: xr.Dataset) -> da.Array:
    return arrays.weights.inverse_norm(arrays.weights.squared_norm(features.feature.data))


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
