"""What the options of scores stand for: estimators with their weights of samples, and λ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.html_tables import HtmlTable
from trakdask.variables import CHECKPOINT, SAMPLE

__all__ = [
    "DEFAULT_ESTIMATOR",
    "DEFAULT_POWER",
    "Absolute",
    "Damping",
    "Estimator",
    "LearningRates",
    "Options",
    "Power",
    "ResolvedEstimator",
    "Rule",
    "Weights",
    "brief",
    "gather_options",
    "is_positive",
    "resolve_estimator",
]

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
class Weights(HtmlTable):
    """Weights of the gram matrix (h) and of the scores (g) as names, and where they come from.

    The names are formulas in q = out_to_loss. They are recorded in the
    ``attrs`` of stored matrices, which are used for the same name and no other.
    """

    gram: str = "1"
    loss: str = "Q"
    power: float | None = None

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
class ResolvedEstimator(HtmlTable):
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


def _require_power(power: object, quadratic_task: object) -> None:
    is_number = isinstance(power, (int, float, np.number)) and not isinstance(power, bool)
    if not is_number or not 0 <= power <= 1:  # type: ignore[operator]
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
        if not is_positive(self.value):
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

    All are as given, but for the estimator, which is resolved. ``rule`` is what chooses λ, with
    ``"auto"`` resolved; None if λ is a number, or given.
    """

    estimator: ResolvedEstimator
    damping: Damping
    rule: str | None
    calibrate: xr.Dataset | None
    weights: xr.DataArray | None
    learning_rates: LearningRates | None

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
        If the estimator is not one of those allowed, if its power is out of range, or if an option
        is given that has no effect with this estimator and damping.
    """
    resolved = resolve_estimator(estimator, power, features, allowed=allowed)
    if learning_rates is not None and estimator != "tracin":
        raise ValueError(
            f"expected estimator='tracin', the only one with learning_rates, got {estimator!r}; "
            "try estimator='tracin', or leave learning_rates out"
        )
    asked = damping if isinstance(damping, str) else None
    rule = resolved.damping if asked == "auto" else asked
    options = Options(resolved, damping, rule, calibrate, weights, learning_rates)
    if not resolved.has_gram:
        _require_no_gram_options(options)
    elif calibrate is not None and not options.is_damped_by_outputs:
        raise ValueError(
            "expected damping='completeness' with calibrate, the rule that looks at outputs, got "
            f"damping={brief(damping)} and estimator={resolved.name!r}; try "
            "damping='completeness', or leave calibrate out"
        )
    return options


def _require_no_gram_options(options: Options) -> None:
    """Reject options of the gram matrix for an estimator that has none."""
    is_auto = isinstance(options.damping, str) and options.damping == "auto"
    is_given = {"damping": not is_auto, "calibrate": options.calibrate is not None}
    is_given["weights"] = options.weights is not None
    if given := [name for name, value in is_given.items() if value]:
        raise ValueError(
            "expected neither damping, calibrate nor weights with estimator="
            f"{options.estimator.name!r}, which has no gram matrix, got {', '.join(given)}; try "
            "leaving them out, or estimator='trak'"
        )


def is_positive(value: Any) -> bool:
    """Return whether a value is a finite number of at least 0."""
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    return bool(is_number and 0 <= value < np.inf)


def brief(value: Any) -> str:
    """Return a damping as an error shows it."""
    return repr(value) if isinstance(value, (str, int, float, Absolute)) else type(value).__name__
