"""The options of a score: checked together, and gathered once into one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import xarray as xr

from trakdask.attribution.dampings import Damping, brief
from trakdask.attribution.estimators import (
    Estimator,
    Power,
    ResolvedEstimator,
    resolve_estimator,
)

__all__ = ["LearningRates", "Options", "gather_options"]

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
    estimator: Estimator,
    power: Power,
    damping: Damping,
    calibrate: xr.Dataset | None,
    weights: xr.DataArray | None,
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
