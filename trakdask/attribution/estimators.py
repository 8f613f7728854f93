"""The options of scores, checked once: estimators with their weights of samples, λ, rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.checks import shown
from trakdask.html_tables import HtmlTable
from trakdask.variables import CHECKPOINT, SAMPLE, aligned

Estimator = Literal["auto", "trak", "soft", "relatif", "grad_dot", "grad_cos", "tracin"]
DEFAULT_ESTIMATOR: Estimator = "auto"

Power = float | Literal["auto"]
DEFAULT_POWER: Power = "auto"

#: a of soft weights under which outputs choose λ for any estimator, and of their gram matrix where
#: a is automatic.
GRAM_POWER = 0.5

_WITHOUT_GRAM = ("grad_dot", "grad_cos", "tracin")
"""Estimators whose scores are products of features alone."""

_MEASURED_TASKS = ("Classification", "ImageClassification", "TextClassification", "MultiLabel")
"""Tasks for which tests/benchmarks/quality.py and quality_wider.py found what is best."""

_TRACE_TASKS = ("Regression", "CausalLM")
"""Tasks for which λ = tr(K)/n was measured to be the best by quality_ideas.py beside it."""

_QUADRATIC_TASKS = ("Regression",)
"""Tasks whose Q is a residual of either sign, of a loss with constant curvature."""


@dataclass(frozen=True)
class Weights:
    """Weights of samples in the gram matrix (h) and in scores (g), by the power of soft ones.

    With q = out_to_loss and the power a, h = q^a (1 - q) and g = q^a; without a power, h = 1 and
    g = q. The power is lazy where it depends on outputs that are not computed yet.
    """

    power: float | da.Array | None = None

    @property
    def gram(self) -> str:
        """The formula of h, which the ``attrs`` of stored matrices record."""
        return "1" if self.power is None else f"{self.loss} (1 - q)"

    @property
    def loss(self) -> str:
        """The formula of g."""
        if isinstance(self.power, da.Array):
            return "q^b, b in [0.5, 1] by the spread of log((1 - q)/q)"
        return "Q" if self.power is None else f"q^{self.power:g}"

    @property
    def sums(self) -> tuple[str, ...]:
        """What scores with these weights and the automatic λ need of all samples."""
        return ("gram",) if self.power is None else ("gram", "loss_gradient")

    def gram_data(self, features: xr.Dataset) -> da.Array | None:
        """Return h (sample, checkpoint), None for 1."""
        if self.power is None:
            return None
        assert isinstance(self.power, float), "a lazy power is one of scores alone"
        return arrays.weights.soft_gram_weights(features.out_to_loss.data, self.power)

    def loss_data(self, features: xr.Dataset) -> da.Array:
        """Return g (sample, checkpoint)."""
        q: da.Array = features.out_to_loss.data
        return q if self.power is None else arrays.weights.soft_loss_weights(q, self.power)

    def attrs(self, features: xr.Dataset) -> dict[str, Any]:
        """Return the ``attrs`` of matrices that are reduced from these features."""
        return {
            "gram_weights": self.gram,
            "loss_weights": self.loss,
            "power": self.power,
            "n_samples": features.sizes[SAMPLE],
            "source": features.attrs.get("source", ""),
            "pooled_checkpoints": [str(name) for name in features[CHECKPOINT].values],
        }


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
        if not _is_positive(self.value):
            raise ValueError(
                f"expected value as a finite number >= 0 in units of the gram matrix, got "
                f"{self.value!r}; try Absolute(1.0)"
            )


Rule = Literal["auto", "completeness", "trace", "closed_form"]
Damping = Rule | float | Absolute | xr.Dataset | xr.DataArray

LearningRates = Mapping[str, float] | xr.DataArray


@dataclass(frozen=True)
class Options:
    """The options that :func:`score`, :func:`group_score` and others share, checked and resolved.

    Parameters
    ----------
    estimator
        Its name; never ``"auto"``.
    weights
        The weights of its gram matrix and of its scores.
    choosing
        The weights under which outputs choose λ: those of the estimator, or soft ones of power ½.
    is_adaptive
        Whether the outputs of training samples choose the power of its weights in scores.
    damping
        As it was passed, but a Dataset is replaced by its λ, in the order of the checkpoints.
    rule
        What chooses λ, with ``"auto"`` resolved; None if λ is a number, or was passed.
    calibrate
        Features of held-out samples whose outputs choose λ.
    gram_weights
        h (sample, checkpoint) in place of that of the estimator.
    learning_rates
        A rate for each checkpoint, for ``"tracin"`` only.
    """

    estimator: Estimator
    weights: Weights
    choosing: Weights
    is_adaptive: bool
    damping: str | float | Absolute | xr.DataArray
    rule: str | None
    calibrate: xr.Dataset | None = None
    gram_weights: da.Array | None = None
    learning_rates: np.ndarray | None = None

    @property
    def has_gram(self) -> bool:
        """Whether scores are products with the inverse of a gram matrix."""
        return self.estimator not in _WITHOUT_GRAM


def gather_options(
    features: xr.Dataset,
    estimator: Estimator = DEFAULT_ESTIMATOR,
    power: Power = DEFAULT_POWER,
    damping: Damping = "auto",
    calibrate: xr.Dataset | None = None,
    weights: xr.DataArray | None = None,
    learning_rates: LearningRates | None = None,
    *,
    allowed: tuple[str, ...] = get_args(Estimator),
) -> Options:
    """Resolve options for the task that the features were made with, and check them.

    The estimator ``"auto"`` is ``"soft"`` where that was measured to be the best, else ``"trak"``.
    Weights of samples need chunked features.

    Raises
    ------
    ValueError
        If the estimator is not one of those allowed, if an option is out of range, or has no effect
        with this estimator and damping.
    """
    if not isinstance(estimator, str) or estimator not in allowed:
        raise ValueError(
            f"expected estimator as one of {list(allowed)}, got {estimator!r}; "
            f"try estimator={DEFAULT_ESTIMATOR!r}"
        )
    task = str(features.attrs.get("task", "")).partition("(")[0]
    was_measured = task in _MEASURED_TASKS
    quadratic_task = features.attrs["task"] if task in _QUADRATIC_TASKS else None
    if estimator == "auto":
        estimator = "soft" if was_measured else "trak"
    rule: str | None = damping if isinstance(damping, str) else None
    if rule == "auto":
        without_outputs = "trace" if task in _TRACE_TASKS else "closed_form"
        rule = "completeness" if estimator == "soft" or was_measured else without_outputs
    _require_effects(estimator, damping, rule, calibrate, weights, learning_rates)
    return Options(
        estimator=estimator,
        weights=Weights(_soft_power(power, quadratic_task) if estimator == "soft" else None),
        choosing=Weights(GRAM_POWER if quadratic_task is None else None),
        damping=_checked_damping(features, damping),
        is_adaptive=estimator == "soft" and power == "auto" and quadratic_task is None,
        rule=rule,
        calibrate=calibrate,
        gram_weights=None if weights is None else gram_weights(features, weights),
        learning_rates=_rates(features, learning_rates) if estimator == "tracin" else None,
    )


def _require_effects(
    estimator: Estimator, damping: Any, rule: str | None, calibrate: Any, weights: Any, rates: Any
) -> None:
    """Reject options that have no effect with an estimator and a rule for λ."""
    has_gram = estimator not in _WITHOUT_GRAM
    has_effect = {
        "damping": has_gram or (isinstance(damping, str) and damping == "auto"),
        "weights": has_gram or weights is None,
        "calibrate": (has_gram and rule == "completeness") or calibrate is None,
        "learning_rates": estimator == "tracin" or rates is None,
    }
    if not all(has_effect.values()):
        useless = ", ".join(name for name, is_used in has_effect.items() if not is_used)
        raise ValueError(
            f"expected only options that have an effect with estimator={estimator!r} and "
            f"damping={shown(damping)}, got {useless}; try leaving them out, or "
            "damping='completeness' with calibrate, or estimator='tracin' with learning_rates"
        )


def _soft_power(power: Any, quadratic_task: str | None) -> float | None:
    """Return a of the gram matrix, None for a squared error, whose weights are those of "trak"."""
    if isinstance(power, str) and power == "auto":
        return GRAM_POWER if quadratic_task is None else None
    if not _is_positive(power) or power > 1:
        raise ValueError(
            f"expected power='auto' or a number in [0, 1], got {power!r}; try power='auto'"
        )
    if quadratic_task is not None and power != 1:
        raise ValueError(
            f"expected power=1 for the task {quadratic_task}, whose loss is a squared error, got "
            f"power={power}; try power=1, or estimator='trak', which gives the same scores"
        )
    return float(power) if quadratic_task is None else None


def _checked_damping(features: xr.Dataset, damping: Any) -> Any:
    """Return a rule or a number as it is, and what :func:`trakdask.damping` returned as λ."""
    is_rule = isinstance(damping, str) and damping in get_args(Rule)
    if is_rule or isinstance(damping, Absolute) or _is_positive(damping):
        return damping
    lam = damping.get("damping") if isinstance(damping, xr.Dataset) else damping
    if not isinstance(lam, xr.DataArray):
        raise ValueError(
            f"expected damping as one of {get_args(Rule)}, as a number >= 0 relative to "
            "tr(K²)/tr(K), as td.Absolute(x), or as λ of each checkpoint, as td.damping returns "
            f"it, got {shown(damping)}; try damping='auto'"
        )
    return _of_checkpoints(features, lam, "damping")


def _rates(features: xr.Dataset, learning_rates: Any) -> np.ndarray:
    """Return the learning rate of each checkpoint."""
    if isinstance(learning_rates, Mapping):
        values = np.array(list(learning_rates.values()), dtype=object)
        learning_rates = xr.DataArray(values, coords={CHECKPOINT: list(learning_rates)})
    return _of_checkpoints(features, learning_rates, "learning_rates").values.astype(np.float64)


def _of_checkpoints(features: xr.Dataset, values: Any, what: str) -> xr.DataArray:
    """Return numbers >= 0 of each checkpoint, in the order of the features."""
    is_labelled = isinstance(values, xr.DataArray) and CHECKPOINT in values.indexes
    if not is_labelled or values.dims != (CHECKPOINT,):
        names = [str(name) for name in features[CHECKPOINT].values]
        raise ValueError(
            f"expected {what} of each checkpoint of {names}, with the coord checkpoint, got "
            f"{shown(values)}; try {what}=xr.DataArray(..., coords={{'checkpoint': {names}}})"
        )
    values = aligned(values, features, what=what)
    if values.chunks is None and not all(map(_is_positive, values.values)):
        raise ValueError(
            f"expected finite {what} >= 0, got {values.to_series().to_dict()}; try numbers"
        )
    return values  # type: ignore[no-any-return]


def _is_positive(value: Any) -> bool:
    """Return whether a value is a finite number of at least 0."""
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    return bool(is_number and 0 <= value < np.inf)


def gram_weights(features: xr.Dataset, weights: xr.DataArray) -> da.Array:
    """Return weights that were passed, (sample, checkpoint), in the chunks of the features.

    By their labels where both sides have them: see :func:`trakdask.variables.aligned`.
    """
    shape = {dim: features.sizes[dim] for dim in (SAMPLE, CHECKPOINT)}
    if isinstance(weights, xr.DataArray) and set(weights.dims) <= set(shape):
        weights = aligned(weights, features, what="weights")
    sizes = dict(weights.sizes) if isinstance(weights, xr.DataArray) else type(weights).__name__
    if sizes not in ({SAMPLE: shape[SAMPLE]}, shape) or weights.dtype.kind not in "fiub":
        raise ValueError(
            f"expected weights as a DataArray of numbers, {shape} with or without checkpoint, got "
            f"{sizes} of {getattr(weights, 'dtype', 'objects')}; try xr.DataArray(h, dims='sample')"
        )
    if weights.chunks is None:
        bad = np.argwhere(~(np.isfinite(weights.values) & (weights.values >= 0)))
        if len(bad):
            where = dict(zip(weights.dims, bad[0].tolist(), strict=True))
            raise ValueError(
                "expected finite weights >= 0, since the gram matrix must stay positive, got "
                f"{weights.values[tuple(bad[0])]} at {where}; try weights.clip(min=0).fillna(0)"
            )
    chunks = {dim: features.feature.variable.chunksizes[dim] for dim in shape}
    data: da.Array = weights.variable.set_dims(shape).chunk(chunks).data
    return data
