"""The estimators, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays.blocks import where
from trakdask.arrays.graphs import plain
from trakdask.attribution.protocol import (
    KINDS,
    LOGIT_VARIANCE,
    PRODUCT,
    SOFT,
    Damping,
    Estimator,
    GramEstimator,
    has_squared_error,
    is_positive,
    of_checkpoints,
)
from trakdask.checks import nearest, require_choice, require_flags, shown
from trakdask.provenance import pooled_checkpoints
from trakdask.variables import (
    CHECKPOINT,
    COLUMN,
    DAMPING,
    GRAM,
    LOSS_GRADIENT,
    N_SAMPLES,
    PROJ_DIM,
    PROJ_DIM_1,
    SAMPLE,
    TARGET,
    WRONG_CLASSES,
    checkpoint_names,
)


@dataclass(frozen=True, eq=False, repr=False)
class Soft(GramEstimator):
    """The curvature and the gradient of one loss that is flatter than the real one.

    With q = Q in [0, 1] and a = ``power``, h = q^a (1 - q) and g = q^a. a = 1 is the Gauss-Newton
    influence function. For a classifier of several classes, K also has the curvature between the
    wrong classes. The loss of a squared error has the same curvature everywhere, so that there this
    is :class:`Trak`.

    Parameters
    ----------
    power
        a, in [0, 1]; lower for models whose training was stopped early. ``"auto"``: ½ in h; in g it
        rises from ½ to 1 as the model's confidence becomes more uniform (by the standard deviation
        of log((1 - q)/q) over training samples: ½ from 1.4 on, 1 up to 0.8). 1 for a squared error.
    damping
        λ. ``"auto"`` is ``"completeness"``: one ρ for all checkpoints, λ_c = ρ tr(K_c)/n, chosen by
        the outputs of the model; see :func:`trakdask.damping`. Where features have ``trained_on``
        and five or more checkpoints, it is ``"cross_validation"``: that ρ, or another one within a
        decade by which left-out checkpoints are predicted better. Where features have no
        ``output``, it is ``"trace"``: tr(K_c)/n, so ρ = 1; n counts samples that failed, too. A
        number is relative to tr(K_c²)/tr(K_c), the mean of the eigenvalues, weighted by themselves.
        ``Absolute(x)`` is x itself. What :func:`trakdask.damping` returned is taken as it is. Where
        a store keeps λ, ``"auto"`` and the rule that it stands for are the stored λ, unless the
        features were changed.
    wrong_classes
        Whether K has n times the variable ``wrong_classes`` of the training features, if they have
        it, as features of :func:`trakdask.fit` do. It is in K before λ is chosen, and in a stored
        K, so that a query costs no more than without them.

    Raises
    ------
    ValueError
        If an option is none of these.

    Notes
    -----
    On seven small classification tasks with half of the samples removed, the linear datamodeling
    score of ``Soft()`` was at least the score of :class:`Trak` at the best λ in hindsight
    (``tests/benchmarks/results/2026-11-23-quality.txt``). Other packages are on the page
    "Leaderboard and other packages".

    References
    ----------
    Koh & Liang 2017 (influence functions).

    Examples
    --------
    >>> Soft() == Soft("auto"), Soft(power=1) == Soft(power=1.0)
    (True, True)
    """

    name: ClassVar[str] = SOFT
    sums: ClassVar[tuple[str, ...]] = (GRAM, LOSS_GRADIENT)
    power: float | Literal["auto"] | da.Array = "auto"  # lazy only as `of_scores` returns it
    damping: Damping = "auto"
    wrong_classes: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_flags(wrong_classes=self.wrong_classes)
        power: Any = self.power
        if is_positive(power) and power <= 1:
            # A float, so that 1 and 1.0 have the same token, by which estimators are compared.
            object.__setattr__(self, "power", float(power))
        elif not isinstance(power, da.Array) and not (isinstance(power, str) and power == "auto"):
            raise ValueError(
                f"expected power='auto' or a number in [0, 1], got {power!r}; try power='auto'"
            )

    @property
    def gram_weights(self) -> str:
        """The formula of h."""
        between = ", and 2 q^0.5 between wrong classes" if self.wrong_classes else ""
        return f"{self.loss_weights} (1 - q){between}"

    @property
    def loss_weights(self) -> str:
        """The formula of g."""
        if isinstance(self.power, da.Array):
            return "q^b, b in [0.5, 1] by the spread of log((1 - q)/q)"
        return f"q^{self.power:g}"

    def resolved(self, features: xr.Dataset) -> GramEstimator:
        """Return the estimator with a rule for λ; for a squared error it is :class:`Trak`."""
        # K can only have what the features have, and its formula, by which it is found again, says
        # which.
        here = replace(self, wrong_classes=self.wrong_classes and WRONG_CLASSES in features)
        resolved = super(Soft, here).resolved(features)
        if not has_squared_error(features):
            return resolved
        if not isinstance(self.power, str) and self.power != 1:
            raise ValueError(
                f"expected power=1 for the task {features.attrs['task']}, whose loss is a squared "
                f"error, got power={self.power}; try Trak(), which gives the same scores as power=1"
            )
        return Trak(resolved.damping)

    def of_sums(self) -> Soft:
        """Return the estimator with the power that it has in sums over all samples."""
        return replace(self, power=0.5) if isinstance(self.power, str) else self

    def of_scores(self, features: xr.Dataset) -> Soft:
        """Return the estimator with the power that it has in g, which may be lazy.

        Rows that were selected from a store have the power of all, as they have its gram matrix.
        """
        if not isinstance(self.power, str):
            return self
        attrs = features[DAMPING].attrs if DAMPING in features and GRAM in features else {}
        # Only stores keep variances, and not if they were saved for "trak".
        variances = attrs.get(LOGIT_VARIANCE, ())
        by_name = dict(zip(pooled_checkpoints(attrs), variances, strict=False))
        names = checkpoint_names(features)
        # More rows than the store has are no selection from it: they have a power of their own.
        if set(names) <= set(by_name) and features.sizes[SAMPLE] <= attrs[N_SAMPLES]:
            variance = np.array([by_name[name] for name in names])
            return replace(self, power=arrays.weights.power_of(variance))
        return replace(self, power=arrays.weights.adaptive_power(features.out_to_loss.data))

    def h(self, features: xr.Dataset) -> da.Array:
        """Return q^a (1 - q)."""
        assert isinstance(self.power, float), "a power of sums"
        return arrays.weights.soft_gram_weights(features.out_to_loss.data, self.power)

    def completed(self, matrix: da.Array, features: xr.Dataset) -> da.Array:
        """Return the matrix plus n times the mean curvature between wrong classes."""
        if not self.wrong_classes:
            return matrix
        whole = features.variables[WRONG_CLASSES].chunk({PROJ_DIM: -1, PROJ_DIM_1: -1})
        mean = plain(whole.chunk({CHECKPOINT: 1}).data)
        if COLUMN in features.coords:  # isel(proj_dim=...) selects along one axis
            rows = features[COLUMN].values
            sizes = len(rows), len(rows), 1
            mean = mean.map_blocks(arrays.gram.of_rows, rows=rows, chunks=sizes, meta=mean._meta)
        return matrix + features.sizes[SAMPLE] * mean

    def rank(self, n_samples: int, features: xr.Dataset) -> int:
        """Return a bound of the rank."""
        # The wrong classes add a matrix of full rank, however few the samples.
        return int(features.sizes[PROJ_DIM]) if self.wrong_classes else n_samples

    def g(self, features: xr.Dataset) -> da.Array:
        """Return q^a."""
        assert not isinstance(self.power, str), "a power of sums or of scores"
        return arrays.weights.soft_loss_weights(features.out_to_loss.data, self.power)


@dataclass(frozen=True, eq=False, repr=False)
class Trak(GramEstimator):
    """TRAK as it was published: h = 1, g = Q.

    Parameters
    ----------
    damping
        λ, as in :class:`Soft`. ``"auto"`` is ``"completeness"`` for classification into one of
        several classes or by several labels, ``"trace"`` for regression and causal language models,
        as was measured to be best; else it is 0.03, relative to tr(K_c²)/tr(K_c).

    References
    ----------
    Park et al. 2023, equation 17; traker's ``TRAKer.finalize_scores``, which gives the scores of
    ``Trak(Absolute(lambda_reg))`` up to one factor per checkpoint.

    Examples
    --------
    >>> import trakdask as td
    >>> td.Trak(damping=td.Absolute(1.0))
    Trak(damping=Absolute(value=1.0))
    """

    name: ClassVar[str] = "trak"
    damping: Damping = "auto"


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
        # g(z) / √(g(z)² l), where l is the leverage: of g only its sign is left.
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
        # The cosine is of each checkpoint, so its norm is not pooled; the sign is of the mean.
        norm = arrays.weights.squared_norm(samples.feature.data)
        return _of_all_checkpoints(_over_root(_sign(_mean(self.g(samples))), norm))

    def fold_weights(self, samples: xr.Dataset, inverse: da.Array | None) -> da.Array:
        """Return -1 where the mean of Q has another sign without a checkpoint."""
        q = self.g(samples)
        # The products have the sign of all checkpoints already.
        return _sign(arrays.folds.means_of_others(q)) * _sign(_mean(q))

    def vectors(self, solved: da.Array, targets: xr.Dataset) -> da.Array:
        """Return vectors of length 1."""
        norm = arrays.weights.squared_norm(targets.feature.data)
        # Norms are float64, and float64 vectors would make all products with them float64.
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
            # As objects: among numbers, numpy would make 1.0 of True, which is to be refused.
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
    # Classes of users are in KINDS by their names, too.
    names = ["auto", *(name for name in KINDS if name != TracIn.name)]  # which has no short form
    # "tracin" lacks its learning rates: the other error shows how to give them.
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
    # ½ is the power that Soft() has in sums, so that its K and r serve.
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
