"""Features that are prepared for many questions: gram matrix, eigenvectors and λ in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import xarray as xr

import trakdask as td
from trakdask import arrays
from trakdask.arrays.solve import component_count
from trakdask.attribution.estimators import (
    GIVEN,
    Absolute,
    Damping,
    Estimator,
    EstimatorLike,
    GramEstimator,
    named,
)
from trakdask.attribution.grams import stored_decomposition
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
    checkpoint_names,
    lazy_features,
)

__all__ = ["Preparation", "Prepared"]

_KEPT = 4
"""How many settings are kept in memory: one factor of p² numbers per checkpoint each."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """Features under one setting, with an estimator that makes every question cheap.

    ``damping`` says how its λ was chosen; None for estimators without a gram matrix.
    """

    features: xr.Dataset
    estimator: Estimator
    damping: xr.Dataset | None


@dataclass(eq=False)
class Preparation:
    """Prepares features for the settings of views, and keeps the last few.

    Its fields are arguments of :func:`trakdask.score`, which hold where a view says nothing.
    """

    features: xr.Dataset
    estimator: EstimatorLike = "auto"

    def __post_init__(self) -> None:
        given = self.estimator
        self.opened = given if isinstance(given, Estimator) else named(self.features, given)
        self._decomposed = lru_cache(_KEPT)(self._decompose)
        self._prepared = lru_cache(_KEPT)(self._prepare)

    def of(self, view: View) -> Prepared:
        """Return what is needed to answer questions under the setting of a view.

        Computes the first time that a setting is asked for.
        """
        names = tuple(checkpoint_names(self.features))
        chosen = tuple(name for name in names if name in view.checkpoints)
        setting = view.estimator, view.damping, () if chosen == names else chosen
        prepared = self._prepared(*setting)
        if released_if_failed(prepared.features):
            self._prepared.cache_clear()
            self._decomposed.cache_clear()
            prepared = self._prepared(*setting)
        return prepared

    @property
    def damping(self) -> Damping:
        """The damping λ of the explorer."""
        return self.opened.damping if isinstance(self.opened, GramEstimator) else "auto"

    @property
    def damping_text(self) -> str:
        """The damping λ of the explorer, as a view would write it."""
        damping = self.damping
        if isinstance(damping, Absolute):
            return f"absolute {damping.value:g}"
        return str(damping) if isinstance(damping, str | float) else "one for each checkpoint"

    def chosen(self, text: str) -> Estimator:
        """Return the estimator of a view, which says ``""`` for that of the explorer."""
        if text in ("", self.opened.name):
            return self.opened
        other = named(self.features, text)
        return self.opened if type(other) is type(self.opened) else other

    def _prepare(
        self, estimator_text: str, damping_text: str, checkpoints: tuple[str, ...]
    ) -> Prepared:
        damping = damping_of(damping_text) if damping_text else self.damping
        estimator = self.chosen(estimator_text)
        if not isinstance(estimator, GramEstimator):
            return Prepared(_selected(self.features, checkpoints), estimator, None)
        if "gram" in self.features and self.features["gram"].attrs.get("gram_weights") == GIVEN:
            features = lazy_features(_selected(self.features, checkpoints))
        else:
            features = self._decomposed(estimator.resolved(self.features).of_sums(), checkpoints)
        if isinstance(damping, MeanTrace):
            damping = _of_trace(features, damping.value)
        (chosen,) = compute(td.damping(features, estimator.with_damping(damping)))
        return Prepared(features, estimator.with_damping(chosen), chosen)

    def _decompose(self, estimator: GramEstimator, checkpoints: tuple[str, ...]) -> xr.Dataset:
        """Return the features with gram matrix and eigenvectors in memory."""
        features = lazy_features(_selected(self.features, checkpoints))
        if stored_decomposition(features, estimator) is None:
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
    labels = checkpoint_names(features)
    data = value * arrays.gram.mean_trace(features["gram"].data, n, labels)
    (values,) = compute(data)
    return xr.DataArray(values, coords={CHECKPOINT: features[CHECKPOINT]}, name="damping")


def _selected(ds: xr.Dataset, checkpoints: tuple[str, ...]) -> xr.Dataset:
    return ds.sel({CHECKPOINT: list(checkpoints)}) if checkpoints else ds


def _with_decomposition(features: xr.Dataset, estimator: GramEstimator) -> xr.Dataset:
    features = features.drop_vars(DERIVED, errors="ignore")
    labels = checkpoint_names(features)
    n, p = features.sizes[SAMPLE], features.sizes[PROJ_DIM]
    matrix = arrays.gram.gram(features["feature"].data, estimator.h(features))
    k = component_count(n, p, features["feature"].dtype)
    values, vectors = arrays.solve.eigenvectors(matrix, labels, k)
    derived = {"gram": matrix, EIGENVALUES: values, EIGENVECTORS: vectors}
    attrs = estimator.attrs(features)
    variables = {name: (VARIABLES[name].dims, data, attrs) for name, data in derived.items()}
    return features.assign(variables)
