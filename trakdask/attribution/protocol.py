"""Estimators: values that say which matrix and weights stand between the features of two samples.

A score is mean_c[ φ_c(z)ᵀ (K_c + λ_c I)⁻¹ φ_c(t) ] · mean_c[ g_c(z) ], or less than that. The
estimator knows the weights h of the gram matrix K and g of the samples, whether there is a K at
all, and what chooses λ. Nothing else asks for its name.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self, get_args

import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize

from trakdask import arrays
from trakdask.checks import shown
from trakdask.html_tables import HtmlTable
from trakdask.variables import (
    CHECKPOINT,
    DAMPING,
    GRAM,
    OUTPUT,
    SAMPLE,
    TRAINED_ON,
    aligned,
    checkpoint_names,
)

GIVEN = "given"
"""The weights of a gram matrix that :func:`trakdask.gram` made with weights of its caller."""

LOGIT_VARIANCE = "logit_variance"
"""In the attrs of the stored λ: how much log((1 - q)/q) varies at each checkpoint."""

SCORE_POWER = "score_power"
"""In the attrs of the stored λ: the power of Q in the weights g of scores by ``"auto"``."""

_OF_TRACES = 0.03
"""λ in units of tr(K²)/tr(K) where no rule was measured to be better; fitted by
``tests/benchmarks/quality.py``. That unit is of the size of the largest eigenvalues, and λ has to
be well below these."""

PRODUCT = "phi_c(z) (K_c + damping_c I)^-1"

LEAST_FOLDS = 5
"""Checkpoints, from which on λ is chosen by leaving each of them out."""

SOFT = "soft"

KINDS: dict[str, Any] = {}
"""The classes of estimators by their names, in which stores remember them."""

Rule = Literal["auto", "cross_validation", "completeness", "trace"]


@dataclass(frozen=True)
class Absolute(HtmlTable):
    """A damping λ in the units of the gram matrix, the same for all checkpoints.

    Raises
    ------
    ValueError
        If ``value`` is not a finite number of at least 0.
    """

    value: float

    def __post_init__(self) -> None:
        if not is_positive(self.value):
            raise ValueError(
                f"expected value as a finite number >= 0 in units of the gram matrix, got "
                f"{self.value!r}; try Absolute(1.0)"
            )


Damping = Rule | float | Absolute | xr.Dataset | xr.DataArray


class Estimator(HtmlTable):
    """The fields and methods of all estimators; each of them is a frozen dataclass.

    ``formula`` is the formula of its scores, ``gram_weights`` of h, and ``loss_weights`` of g, as
    text. ``pooled`` says whether the weights of a sample are replaced by their mean over
    checkpoints. ``norms`` are the sides of a product, ``"sample"`` or ``"target"``, whose whole
    features it needs the norm of.
    """

    name: ClassVar[str]
    pooled: ClassVar[bool] = True
    norms: ClassVar[tuple[str, ...]] = ()
    _formula: ClassVar[str]

    def __init_subclass__(cls) -> None:
        # A class that only inherits its name would take the place of the other.
        if "name" in vars(cls):
            KINDS[cls.name] = cls

    @property
    def gram_weights(self) -> str:
        """The formula of h."""
        return "1"

    @property
    def loss_weights(self) -> str:
        """The formula of g."""
        return "Q"

    @property
    def formula(self) -> str:
        """The formula of a score."""
        return self._formula.format(g=self.loss_weights)

    def __repr__(self) -> str:
        values = {field.name: shown(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in values.items())})"

    def __eq__(self, other: object) -> bool:  # of λ as an array, == would be one
        return type(self) is type(other) and tokenize(self) == tokenize(other)

    def __hash__(self) -> int:
        return hash(tokenize(self))

    def resolved(self, features: xr.Dataset) -> Estimator:
        """Return the estimator for some training features, without ``"auto"`` for λ."""
        return self

    def of_scores(self, features: xr.Dataset) -> Estimator:
        """Return the estimator with the weights g that it has for these training features."""
        return self

    def g(self, features: xr.Dataset) -> da.Array:
        """Return the weights of samples in their loss, (sample, checkpoint)."""
        return features.out_to_loss.data

    def weight(self, samples: xr.Dataset, inverse: da.Array | None) -> da.Array:
        """Return the factor of the products of samples, (sample, checkpoint).

        ``inverse`` is the inverse of the damped gram matrix, if there is one.
        """
        return self.g(samples)

    def fold_weights(self, samples: xr.Dataset, inverse: da.Array | None) -> da.Array:
        """Return what mean products are multiplied by where a checkpoint is left out.

        (sample, fold), a fold for each checkpoint; 1 where the weights are in the products. As in
        :meth:`of_scores`, λ and powers are the ones of all checkpoints.
        """
        if self.pooled:
            return arrays.folds.means_of_others(self.g(samples))
        return da.ones_like(samples.out_to_loss.data, dtype=np.float64)

    def vectors(self, solved: da.Array, targets: xr.Dataset) -> da.Array:
        """Return the vectors that samples are multiplied with, from solved features of targets."""
        return solved


class GramEstimator(Estimator):
    """An estimator with the inverse of a gram matrix, and so with a damping λ."""

    damping: Damping
    power: Any = None
    _formula: ClassVar[str] = f"mean_c[{PRODUCT} phi_c(t)] mean_c[{{g}}]"
    sums: ClassVar[tuple[str, ...]] = (GRAM,)
    """The sums over all samples that its scores and the automatic λ need."""

    def __post_init__(self) -> None:
        damping = self.damping
        # Of what td.damping returns, λ alone: how it was chosen would make another estimator of the
        # same.
        if isinstance(damping, xr.Dataset) and DAMPING in damping:
            object.__setattr__(self, "damping", damping[DAMPING])
        elif is_positive(damping):
            object.__setattr__(self, "damping", float(damping))  # type: ignore[arg-type]
        elif not isinstance(damping, Absolute | xr.DataArray) and self.rule not in get_args(Rule):
            raise ValueError(
                f"expected damping as one of {get_args(Rule)}, as a number >= 0 relative to "
                "tr(K²)/tr(K), as td.Absolute(x), or as λ of each checkpoint, as td.damping "
                f"returns it, got {shown(damping)}; try damping='auto'"
            )

    @property
    def rule(self) -> str | None:
        """The rule that chooses λ; None if it is a number, or was passed."""
        return self.damping if isinstance(self.damping, str) else None

    def with_damping(self, damping: Damping) -> Self:
        """Return the estimator with another λ."""
        return replace(self, damping=damping)  # type: ignore[type-var]

    def resolved(self, features: xr.Dataset) -> GramEstimator:
        """Return the estimator with a rule in place of "auto", or with λ of these checkpoints."""
        damping = self.damping
        if self.rule == "auto":
            # Left-out checkpoints need outputs to be predicted, and samples that they were not
            # trained on.
            knows = {TRAINED_ON, OUTPUT} <= {*features}
            has_folds = knows and features.sizes[CHECKPOINT] >= LEAST_FOLDS
            damping = "cross_validation" if has_folds else self.rule_without_folds(features)
        elif isinstance(damping, xr.DataArray):
            damping = of_checkpoints(features, damping, "damping")
        return self.with_damping(damping)

    def rule_without_folds(self, features: xr.Dataset) -> Damping:
        """Return the rule for λ where it is unknown which samples checkpoints were trained on."""
        if OUTPUT not in features:
            return "trace"
        default: Damping = features.attrs.get(
            "default_damping", damping_prior(features) * _OF_TRACES
        )
        # Other estimators have what was measured to be best for TRAK on each kind of task, which is
        # outputs where the task's default is Soft.
        is_soft = SOFT in (self.name, features.attrs.get("default_estimator"))
        return "completeness" if is_soft else default

    def of_sums(self) -> GramEstimator:
        """Return the estimator with the weights that it has in sums over all samples."""
        return self

    def h(self, features: xr.Dataset) -> da.Array | None:
        """Return the weights of samples in the gram matrix, (sample, checkpoint); None for 1."""
        return None

    def completed(self, matrix: da.Array, features: xr.Dataset) -> da.Array:
        """Return the gram matrix with its terms beside the sum of products of features."""
        return matrix

    def rank(self, n_samples: int, features: xr.Dataset) -> int:
        """Return a bound of the rank of a gram matrix of so many samples."""
        return n_samples

    def attrs(self, features: xr.Dataset) -> dict[str, Any]:
        """Return the ``attrs`` of matrices that are reduced from these features."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        is_named = KINDS.get(self.name) is type(self)  # and not a class that is derived from it
        name = self.name if is_named else type(self).__name__
        return {
            # Sums serve any λ.
            "estimator": {**options, "name": name, "damping": "auto"},
            "gram_weights": self.gram_weights,
            "loss_weights": self.loss_weights,
            "power": self.power,
            "wrong_classes": getattr(self, "wrong_classes", False),
            "n_samples": features.sizes[SAMPLE],
            "source": features.attrs.get("source", ""),
            "pooled_checkpoints": checkpoint_names(features),
        }


def has_squared_error(features: xr.Dataset) -> bool:
    """Return whether the loss of the task is a squared error, which curves alike everywhere."""
    return bool(features.attrs.get("loss_kind") == "squared error")


def damping_prior(features: xr.Dataset) -> float:
    """Return ρ where outputs are not asked, or see no reason for another one."""
    return float(features.attrs.get("damping_prior", 1.0))


def of_checkpoints(features: xr.Dataset, values: Any, what: str) -> xr.DataArray:
    """Return numbers >= 0 of each checkpoint, in the order of the features."""
    is_labelled = isinstance(values, xr.DataArray) and CHECKPOINT in values.indexes
    if not is_labelled or values.dims != (CHECKPOINT,):
        names = checkpoint_names(features)
        raise ValueError(
            f"expected {what} of each checkpoint of {names}, with the coord checkpoint, got "
            f"{shown(values)}; try {what}=xr.DataArray(..., coords={{'checkpoint': {names}}})"
        )
    values = aligned(values, features, what=what)
    # Lazy numbers are not computed for this.
    if values.chunks is None and not all(map(is_positive, values.values)):
        raise ValueError(
            f"expected finite {what} >= 0, got {values.to_series().to_dict()}; try numbers"
        )
    return values


def is_positive(value: Any) -> bool:
    """Return whether a value is a finite number of at least 0."""
    # True is an int, and an option that means something else.
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    return bool(is_number and 0 <= value < np.inf)
