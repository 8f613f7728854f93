"""Features that are ready for many questions: gram matrix, eigenvectors and λ in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import xarray as xr

import trakdask as td
from trakdask import arrays
from trakdask.arrays.spectrum import component_count
from trakdask.attribution.estimators import (
    Damping,
    Estimator,
    Power,
    ResolvedEstimator,
    resolve_estimator,
)
from trakdask.attribution.grams import (
    DERIVED,
    EIGENVALUES,
    EIGENVECTORS,
    N_SAMPLES,
    stored_decomposition,
)
from trakdask.explorer.computing import computed, persist, released_if_failed
from trakdask.explorer.state import MeanTrace, View, damping_of
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, VARIABLES, lazy_features

__all__ = ["Attributions", "Ready"]

_KEPT = 4
"""How many settings are kept in memory: one factor of p² numbers per checkpoint each."""


@dataclass(frozen=True, eq=False)
class Ready:
    """Features under one setting, with options that make every question cheap.

    ``options`` are those of :func:`trakdask.score`. ``damping`` says how λ was chosen; None for
    estimators without a gram matrix.
    """

    features: xr.Dataset
    estimator: ResolvedEstimator
    options: Mapping[str, Any]
    damping: xr.Dataset | None


class Attributions:
    """Makes features ready, and keeps the last few settings."""

    def __init__(
        self,
        features: xr.Dataset,
        *,
        estimator: Estimator,
        power: Power,
        damping: Damping,
        calibrate: xr.Dataset | None,
        learning_rates: Any,
    ) -> None:
        self.features = features
        self._estimator, self._power, self._damping = estimator, power, damping
        self._calibrate, self._rates = calibrate, learning_rates
        self._decomposed = lru_cache(_KEPT)(self._decompose)
        self._made = lru_cache(_KEPT)(self._make)

    def ready(self, view: View) -> Ready:
        """Return what is needed to answer questions under the setting of a view.

        Computes the first time that a setting is asked for.
        """
        names = tuple(str(name) for name in self.features[CHECKPOINT].values)
        known = tuple(name for name in names if name in view.checkpoints)
        setting = view.estimator, view.damping, () if known == names else known
        made = self._made(*setting)
        if released_if_failed(made.features):
            self._made.cache_clear()
            self._decomposed.cache_clear()
            made = self._made(*setting)
        return made

    def _make(self, estimator_text: str, damping_text: str, checkpoints: tuple[str, ...]) -> Ready:
        estimator: Any = estimator_text or self._estimator
        damping = damping_of(damping_text) if damping_text else self._damping
        resolved = resolve_estimator(estimator, self._power, self.features)
        options: dict[str, Any] = {"estimator": resolved.name, "power": self._power}
        if resolved.name == "tracin":
            options["learning_rates"] = self._rates
        if not resolved.has_gram:
            features = _selected(self.features, checkpoints)
            return Ready(features, resolved, options, None)
        features = self._decomposed(resolved, checkpoints)
        if isinstance(damping, MeanTrace):
            damping = _of_trace(features, damping.value)
        given = self._calibrate
        calibrate = None if given is None else _selected(given, checkpoints)
        rule = damping if isinstance(damping, str) else None
        by_outputs = (resolved.damping if rule == "auto" else rule) == "completeness"
        chosen = computed(
            td.damping(
                features, damping, estimator=resolved.name, power=self._power,
                calibrate=calibrate if by_outputs else None,
            )
        )  # fmt: skip
        options["damping"] = chosen["damping"]
        return Ready(features, resolved, options, chosen)

    def _decompose(self, estimator: ResolvedEstimator, checkpoints: tuple[str, ...]) -> xr.Dataset:
        """Return the features with gram matrix and eigenvectors in memory."""
        features = lazy_features(_selected(self.features, checkpoints))
        if stored_decomposition(features, estimator.weights) is None:
            features = _with_decomposition(features, estimator)
        names = [
            name for name in (*DERIVED, "output", "out_to_loss")
            if name in features and name != "loss_gradient"
        ]  # fmt: skip
        kept = persist(*(features[name].data for name in names))
        return features.assign(
            {
                name: features[name].variable._replace(data=data)
                for name, data in zip(names, kept, strict=True)
            }
        )


def _of_trace(features: xr.Dataset, value: float) -> xr.DataArray:
    """Return λ of each checkpoint, from a number in units of tr(K)/n."""
    n = features["gram"].attrs[N_SAMPLES]
    labels = [str(name) for name in features[CHECKPOINT].values]
    data = value * arrays.damping.mean_trace(features["gram"].data, n, labels)
    return computed(xr.DataArray(data, coords={CHECKPOINT: features[CHECKPOINT]}, name="damping"))


def _selected(ds: xr.Dataset, checkpoints: tuple[str, ...]) -> xr.Dataset:
    return ds.sel({CHECKPOINT: list(checkpoints)}) if checkpoints else ds


def _with_decomposition(features: xr.Dataset, estimator: ResolvedEstimator) -> xr.Dataset:
    features = features.drop_vars(DERIVED, errors="ignore")
    weights = estimator.weights
    labels = [str(name) for name in features[CHECKPOINT].values]
    n, p = features.sizes[SAMPLE], features.sizes[PROJ_DIM]
    matrix = arrays.gram.gram(features["feature"].data, weights.gram_data(features))
    (matrix,) = persist(matrix)
    k = component_count(n, p, features["feature"].dtype)
    spectrum = arrays.spectrum.spectrum(matrix, None, n, labels, n_component=k)
    values, vectors = arrays.spectrum.eigenvectors(spectrum, p, k)
    made = {"gram": matrix, EIGENVALUES: values, EIGENVECTORS: vectors}
    attrs = weights.attrs(features)
    variables = {name: (VARIABLES[name].dims, data, attrs) for name, data in made.items()}
    return features.assign(variables)
