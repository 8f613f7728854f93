"""Features that are prepared for many questions: gram matrix, eigenvectors and λ in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import xarray as xr

import trakdask as td
from trakdask import arrays
from trakdask.arrays.solve import component_count
from trakdask.attribution import estimators, grams
from trakdask.explorer.computing import compute, persist, released_if_failed
from trakdask.explorer.view import MeanTrace, View, damping_of
from trakdask.variables import (
    CHECKPOINT,
    DERIVED,
    EIGENVALUES,
    EIGENVECTORS,
    N_SAMPLES,
    PROJ_DIM,
    SAMPLE,
    VARIABLES,
    lazy_features,
)

__all__ = ["Preparation", "Prepared"]

_KEPT = 4
"""How many settings are kept in memory: one factor of p² numbers per checkpoint each."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """Features under one setting, with options that make every question cheap.

    ``options`` are those of :func:`trakdask.score`. ``damping`` says how λ was chosen; None for
    estimators without a gram matrix.
    """

    features: xr.Dataset
    estimator: estimators.Options
    options: Mapping[str, Any]
    damping: xr.Dataset | None


@dataclass(eq=False)
class Preparation:
    """Prepares features for the settings of views, and keeps the last few.

    Its fields are arguments of :func:`trakdask.score`, which hold where a view says nothing.
    """

    features: xr.Dataset
    estimator: estimators.Estimator = estimators.DEFAULT_ESTIMATOR
    power: estimators.Power = estimators.DEFAULT_POWER
    damping: estimators.Damping = "auto"
    calibrate: xr.Dataset | None = None
    learning_rates: estimators.LearningRates | None = None

    def __post_init__(self) -> None:
        self._decomposed = lru_cache(_KEPT)(self._decompose)
        self._prepared = lru_cache(_KEPT)(self._prepare)

    def of(self, view: View) -> Prepared:
        """Return what is needed to answer questions under the setting of a view.

        Computes the first time that a setting is asked for.
        """
        names = tuple(str(name) for name in self.features[CHECKPOINT].values)
        chosen = tuple(name for name in names if name in view.checkpoints)
        setting = view.estimator, view.damping, () if chosen == names else chosen
        prepared = self._prepared(*setting)
        if released_if_failed(prepared.features):
            self._prepared.cache_clear()
            self._decomposed.cache_clear()
            prepared = self._prepared(*setting)
        return prepared

    @property
    def damping_text(self) -> str:
        """The damping λ of the explorer, as a view would write it."""
        if isinstance(self.damping, estimators.Absolute):
            return f"absolute {self.damping.value:g}"
        is_short = isinstance(self.damping, (str, int, float))
        return str(self.damping) if is_short else "one for each checkpoint"

    def estimator_of(self, text: str) -> estimators.Options:
        """Return the estimator of a view, which says ``""`` for that of the explorer."""
        estimator: Any = text or self.estimator
        rates = self.learning_rates if estimator == "tracin" else None
        return estimators.gather_options(self.features, estimator, self.power, learning_rates=rates)

    def _prepare(
        self, estimator_text: str, damping_text: str, checkpoints: tuple[str, ...]
    ) -> Prepared:
        damping = damping_of(damping_text) if damping_text else self.damping
        resolved = self.estimator_of(estimator_text)
        options: dict[str, Any] = {"estimator": resolved.estimator, "power": self.power}
        if resolved.estimator == "tracin":
            options["learning_rates"] = self.learning_rates
        if not resolved.has_gram:
            features = _selected(self.features, checkpoints)
            return Prepared(features, resolved, options, None)
        features = self._decomposed(resolved, checkpoints)
        if isinstance(damping, MeanTrace):
            damping = _of_trace(features, damping.value)
        rule = damping if isinstance(damping, str) else None
        by_outputs = (resolved.rule if rule == "auto" else rule) == "completeness"
        calibrate = self.calibrate if by_outputs else None
        lazy = td.damping(
            features, damping, estimator=resolved.estimator, power=self.power,
            calibrate=None if calibrate is None else _selected(calibrate, checkpoints),
        )  # fmt: skip
        (chosen,) = compute(lazy)
        options["damping"] = chosen["damping"]
        return Prepared(features, resolved, options, chosen)

    def _decompose(self, estimator: estimators.Options, checkpoints: tuple[str, ...]) -> xr.Dataset:
        """Return the features with gram matrix and eigenvectors in memory."""
        features = lazy_features(_selected(self.features, checkpoints))
        if grams.stored_decomposition(features, estimator.weights) is None:
            features = _with_decomposition(features, estimator)
        names = [
            name for name in (*DERIVED, "output", "out_to_loss")
            if name in features and name != "loss_gradient"
        ]  # fmt: skip
        kept = zip(names, persist(*(features[name].data for name in names)), strict=True)
        return features.assign({name: features[name].copy(data=data) for name, data in kept})


def _of_trace(features: xr.Dataset, value: float) -> xr.DataArray:
    """Return λ of each checkpoint, from a number in units of tr(K)/n."""
    n = features["gram"].attrs[N_SAMPLES]
    labels = [str(name) for name in features[CHECKPOINT].values]
    data = value * arrays.gram.mean_trace(features["gram"].data, n, labels)
    (values,) = compute(data)
    return xr.DataArray(values, coords={CHECKPOINT: features[CHECKPOINT]}, name="damping")


def _selected(ds: xr.Dataset, checkpoints: tuple[str, ...]) -> xr.Dataset:
    return ds.sel({CHECKPOINT: list(checkpoints)}) if checkpoints else ds


def _with_decomposition(features: xr.Dataset, estimator: estimators.Options) -> xr.Dataset:
    features = features.drop_vars(DERIVED, errors="ignore")
    weights = estimator.weights
    labels = [str(name) for name in features[CHECKPOINT].values]
    n, p = features.sizes[SAMPLE], features.sizes[PROJ_DIM]
    matrix = arrays.gram.gram(features["feature"].data, weights.gram_data(features))
    k = component_count(n, p, features["feature"].dtype)
    values, vectors = arrays.solve.eigenvectors(matrix, labels, k)
    derived = {"gram": matrix, EIGENVALUES: values, EIGENVECTORS: vectors}
    attrs = weights.attrs(features)
    variables = {name: (VARIABLES[name].dims, data, attrs) for name, data in derived.items()}
    return features.assign(variables)
