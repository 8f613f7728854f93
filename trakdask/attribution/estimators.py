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
AutomaticDamping = Literal["completeness", "trace", "closed_form"]
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
    """Weights of the gram matrix (h) and of the scores (g) as names, and where they come from.

    The names are formulas in q = out_to_loss. They are recorded in the
    ``attrs`` of stored matrices, which are used for the same name and no other. ``power`` is a of
    soft weights, None for others. It is lazy where it depends on outputs that are not computed yet.
    """

    gram: str = "1"
    loss: str = "Q"
    power: float | da.Array | None = None

    @classmethod
    def soft(cls, power: float) -> Weights:
        """Return soft weights of power a: h = q^a (1 - q), g = q^a."""
        a = f"q^{float(power)!r}"
        return cls(gram=f"{a} (1 - q)", loss=a, power=float(power))

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
class ResolvedEstimator:
    """An estimator with everything that follows from its name, its power and the features.

    Parameters
    ----------
    name
        The estimator; never ``"auto"``.
    weights
        The weights of its gram matrix and of its scores.
    choosing
        The weights under which outputs choose λ: its own, or soft ones of power ½.
    damping
        The rule that ``damping="auto"`` stands for.
    is_adaptive
        Whether the outputs of training samples choose the power of its weights in scores.
    has_gram
        Whether its scores are products with the inverse of a gram matrix.
    """

    name: Estimator
    weights: Weights
    choosing: Weights
    damping: AutomaticDamping
    is_adaptive: bool
    has_gram: bool


def resolve_estimator(
    estimator: Estimator,
    power: Power,
    features: xr.Dataset,
    *,
    allowed: tuple[str, ...] = get_args(Estimator),
) -> ResolvedEstimator:
    """Resolve an estimator for the task that the features were made with.

    ``"auto"`` is ``"soft"`` where that was measured to be the best, and ``"trak"`` for other tasks.

    Raises
    ------
    ValueError
        If the estimator is not one of those allowed; if its ``power`` is not in [0, 1], or not 1
        for a quadratic loss.
    """
    if not isinstance(estimator, str) or estimator not in allowed:
        raise ValueError(
            f"expected estimator as one of {list(allowed)}, got {estimator!r}; "
            f"try estimator={DEFAULT_ESTIMATOR!r}"
        )
    task = str(features.attrs.get("task", "")).partition("(")[0]
    was_measured = task in _MEASURED_TASKS
    if estimator == "auto":
        estimator = "soft" if was_measured else "trak"
    is_quadratic = task in _QUADRATIC_TASKS
    is_automatic = isinstance(power, str) and power == "auto"
    weights = Weights()
    if estimator == "soft":
        if not is_automatic:
            _require_power(power, features.attrs["task"] if is_quadratic else None)
        if not is_quadratic:
            weights = Weights.soft(GRAM_POWER if is_automatic else float(power))
    choosing = weights if is_quadratic else Weights.soft(GRAM_POWER)
    by_outputs = estimator == "soft" or was_measured
    without_outputs: AutomaticDamping = "trace" if task in _TRACE_TASKS else "closed_form"
    return ResolvedEstimator(
        name=estimator,
        weights=weights,
        choosing=choosing,
        damping="completeness" if by_outputs else without_outputs,
        is_adaptive=is_automatic and weights.power is not None,
        has_gram=estimator not in _WITHOUT_GRAM,
    )


def _require_power(power: Any, quadratic_task: object) -> None:
    if not _is_positive(power) or power > 1:
        raise ValueError(
            f"expected power='auto' or a number in [0, 1], got {power!r}; try power='auto'"
        )
    if quadratic_task is not None and power != 1:
        raise ValueError(
            f"expected power=1 for the task {quadratic_task}, whose loss is a squared error, got "
            f"power={power}; try power=1, or estimator='trak', which gives the same scores"
        )


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
    """The options that :func:`score`, :func:`group_score` and others share, checked.

    ``damping`` is as given, but a Dataset is replaced by its λ, in the order of the checkpoints.
    ``rule`` is what chooses λ, with ``"auto"`` resolved; None if λ is a number, or given.
    ``learning_rates`` has a rate for each checkpoint, for ``"tracin"`` only.
    """

    estimator: ResolvedEstimator
    damping: str | float | Absolute | xr.DataArray
    rule: str | None
    calibrate: xr.Dataset | None
    weights: xr.DataArray | None
    learning_rates: np.ndarray | None

    @property
    def is_damped_by_outputs(self) -> bool:
        """Whether λ is chosen by the outputs of the model."""
        return self.rule == "completeness"


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
    """Resolve the estimator for the features, and check that the other options go with it.

    Raises
    ------
    ValueError
        If the estimator is not one of those allowed, if an option is out of range, or has no effect
        with this estimator and damping.
    """
    resolved = resolve_estimator(estimator, power, features, allowed=allowed)
    asked = damping if isinstance(damping, str) else None
    rule = resolved.damping if asked == "auto" else asked
    has_effect = {
        "damping": resolved.has_gram or asked == "auto",
        "weights": resolved.has_gram or weights is None,
        "calibrate": (resolved.has_gram and rule == "completeness") or calibrate is None,
        "learning_rates": resolved.name == "tracin" or learning_rates is None,
    }
    if not all(has_effect.values()):
        useless = ", ".join(name for name, is_used in has_effect.items() if not is_used)
        raise ValueError(
            f"expected only options that have an effect with estimator={resolved.name!r} and "
            f"damping={shown(damping)}, got {useless}; try leaving them out, or "
            "damping='completeness' with calibrate, or estimator='tracin' with learning_rates"
        )
    return Options(
        estimator=resolved,
        damping=_checked_damping(features, damping),
        rule=rule,
        calibrate=calibrate,
        weights=weights,
        learning_rates=_rates(features, learning_rates) if resolved.name == "tracin" else None,
    )


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
