"""The estimators, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays.blocks import where
from trakdask.attribution.gauss_newton import Soft, Trak
from trakdask.attribution.protocol import (
    KINDS,
    PRODUCT,
    Damping,
    Estimator,
    GramEstimator,
    has_squared_error,
    of_checkpoints,
)
from trakdask.checks import nearest, require_choice, shown
from trakdask.variables import CHECKPOINT, SAMPLE, TARGET, WRONG_CLASSES, checkpoint_names


@dataclass(frozen=True, eq=False, repr=False)
class RelatIF(GramEstimator):
    """TRAK's score divided by the square root of the sample's self-influence.

    See :func:`trakdask.self_influence`. The size of Q cancels. Each training sample is solved for,
    too: 2 p² flops.

    Parameters
    ----------
    damping
        λ, as in :class:`Trak`.

    References
    ----------
    Barshan et al. 2020 (ℓ-RelatIF).
    """

    name: ClassVar[str] = "relatif"
    norms: ClassVar[tuple[str, ...]] = (SAMPLE,)
    _formula: ClassVar[str] = (
        f"mean_c[{PRODUCT} phi_c(t)] sign(Q(z)) / sqrt(mean_c[{PRODUCT} phi_c(z)])"
    )
    damping: Damping = "auto"

    def weight(self, samples: xr.Dataset, inverse: da.Array | None) -> da.Array:
        """Return the sign of Q by the root of the leverage."""
        assert inverse is not None, "there is a gram matrix"
        leverage = arrays.solve.leverage(inverse, samples.feature.data)
        return _over_root(_sign(_mean(self.g(samples))), _mean(leverage))

    def fold_weights(self, samples: xr.Dataset, inverse: da.Array | None) -> da.Array:
        """Return the same of all checkpoints but one."""
        assert inverse is not None, "there is a gram matrix"
        leverage = arrays.folds.means_of_others(
            arrays.solve.leverage(inverse, samples.feature.data)
        )
        return _over_root(_sign(arrays.folds.means_of_others(self.g(samples))), leverage)


@dataclass(frozen=True, eq=False, repr=False)
class GradDot(Estimator):
    """Products of gradients, without a gram matrix: mean_c[φ_c(z)·φ_c(t)] · mean_c[Q_c(z)].

    References
    ----------
    Charpiat et al. 2019.
    """

    name: ClassVar[str] = "grad_dot"
    _formula: ClassVar[str] = "mean_c[phi_c(z) phi_c(t)] mean_c[{g}]"


@dataclass(frozen=True, eq=False, repr=False)
class GradCos(Estimator):
    """Cosines of gradients: mean_c[cos(φ_c(z), φ_c(t))] times the sign of Q.

    Cosines with a zero feature are NaN.

    References
    ----------
    Charpiat et al. 2019.
    """

    name: ClassVar[str] = "grad_cos"
    pooled: ClassVar[bool] = False
    norms: ClassVar[tuple[str, ...]] = (SAMPLE, TARGET)
    _formula: ClassVar[str] = "mean_c[cos(phi_c(z), phi_c(t))] sign(Q(z))"

    def weight(self, samples: xr.Dataset, inverse: da.Array | None) -> da.Array:
        """Return the sign of Q by the norm."""
        norm = arrays.weights.squared_norm(samples.feature.data)
        return _of_all_checkpoints(_over_root(_sign(_mean(self.g(samples))), norm))

    def fold_weights(self, samples: xr.Dataset, inverse: da.Array | None) -> da.Array:
        """Return -1 where the mean of Q has another sign without a checkpoint."""
        q = self.g(samples)
        return _sign(arrays.folds.means_of_others(q)) * _sign(_mean(q))

    def vectors(self, solved: da.Array, targets: xr.Dataset) -> da.Array:
        """Return vectors of length 1."""
        norm = arrays.weights.squared_norm(targets.feature.data)
        return solved * _over_root(1, norm).astype(solved.dtype)[:, None, :]


@dataclass(frozen=True, eq=False, repr=False)
class TracIn(Estimator):
    """Products of gradients along the training: Σ_c η_c Q_c(z) φ_c(z)·φ_c(t).

    Parameters
    ----------
    learning_rates
        η of each checkpoint: a list in the order of the checkpoints; or by their names, a mapping
        or a DataArray (checkpoint).

    References
    ----------
    Pruthi et al. 2020 (TracInCP).

    Examples
    --------
    >>> TracIn({"c0": 0.1, "c1": 0.05})
    TracIn(learning_rates={'c0': 0.1, 'c1': 0.05})
    >>> TracIn([0.1, 0.05])
    TracIn(learning_rates=[0.1, 0.05])
    """

    name: ClassVar[str] = "tracin"
    pooled: ClassVar[bool] = False
    _formula: ClassVar[str] = "sum_c[learning_rate_c Q_c(z) phi_c(z) phi_c(t)]"
    learning_rates: Mapping[str, float] | Sequence[float] | xr.DataArray

    def resolved(self, features: xr.Dataset) -> TracIn:
        """Return the estimator with the rates in the order of the checkpoints."""
        rates: Any = self.learning_rates
        names = checkpoint_names(features)
        if not isinstance(rates, Mapping | xr.DataArray):
            if np.ndim(rates) != 1 or len(rates) != len(names):
                raise ValueError(
                    f"expected a learning rate of each of the {len(names)} checkpoints {names}, "
                    f"got {shown(rates)}; try td.TracIn({dict.fromkeys(names[:3], 0.1)})"
                )
            rates = dict(zip(names, rates, strict=True))
        if isinstance(rates, Mapping):
            values = np.array(list(rates.values()), dtype=object)
            rates = xr.DataArray(values, coords={CHECKPOINT: list(map(str, rates))})
        rates = of_checkpoints(features, rates, "learning_rates")
        return TracIn(rates.astype(np.float64))

    @property
    def rates(self) -> np.ndarray:
        """η of each checkpoint, once resolved."""
        assert isinstance(self.learning_rates, xr.DataArray), "as `resolved` has them"
        return self.learning_rates.values

    def weight(self, samples: xr.Dataset, inverse: da.Array | None) -> da.Array:
        """Return η Q; times the number of checkpoints, since the product is a mean over them."""
        return _of_all_checkpoints(self.g(samples) * (len(self.rates) * self.rates))


EstimatorLike = Estimator | Literal["auto", "soft", "trak", "relatif", "grad_dot", "grad_cos"]


def kind_of(features: xr.Dataset, name: str) -> type[Estimator]:
    """Return the class of an estimator by its name; the task of the features names ``"auto"``."""
    if name == "auto":
        name = features.attrs.get("default_estimator", Trak.name)
    require_choice("estimator", name, list(KINDS), remedy="try estimator='auto'")
    return KINDS[name]


def resolve(features: xr.Dataset, estimator: EstimatorLike) -> Estimator:
    """Return the estimator that a value or its short form stands for, with these features.

    Raises
    ------
    ValueError
        If it is none, or does not fit the task or the checkpoints of the features.
    """
    names = ["auto", *(name for name in KINDS if name != TracIn.name)]  # which has no short form
    if isinstance(estimator, str) and estimator != TracIn.name:
        require_choice("estimator", estimator, names, remedy="try estimator='auto'")
        estimator = kind_of(features, estimator)()
    if not isinstance(estimator, Estimator):
        raise ValueError(
            f"expected estimator as one of {names}, or as a value such as td.Soft(power=1) or "
            f"td.TracIn(learning_rates), got {shown(estimator)}; try estimator="
            f"{nearest(estimator, names) or 'auto'!r}"
        )
    return estimator.resolved(features)


def with_gram(features: xr.Dataset, estimator: EstimatorLike) -> GramEstimator:
    """Return an estimator for some features, if it has a gram matrix.

    Raises
    ------
    ValueError
        If it has none; and as :func:`resolve` does.
    """
    resolved = resolve(features, estimator)
    if not isinstance(resolved, GramEstimator):
        raise ValueError(
            f"expected an estimator with a gram matrix, and so with λ, got {resolved}; try "
            "estimator='auto'"
        )
    return resolved


def choosing(features: xr.Dataset) -> GramEstimator:
    """Return the estimator under whose weights outputs choose λ for any other."""
    if has_squared_error(features):
        return Trak()
    return Soft(power=0.5, wrong_classes=WRONG_CLASSES in features)


def _over_root(x: da.Array | int, norm: da.Array) -> da.Array:
    """Return x / √norm, NaN where the norm is 0."""
    return x * (1 / da.sqrt(where(norm > 0, norm, np.nan)))


def _sign(q: da.Array) -> da.Array:
    """Return the sign of mean values of Q; +1 for 0."""
    return where(q < 0, -1.0, 1.0)


def _mean(values: da.Array) -> da.Array:
    """Return the mean over checkpoints, (sample, 1)."""
    return values.mean(axis=1, keepdims=True)


def _of_all_checkpoints(weight: da.Array) -> da.Array:
    """Return weights that are NaN for samples that failed at some checkpoint: they have no mean."""
    return weight + 0 * _mean(weight)
