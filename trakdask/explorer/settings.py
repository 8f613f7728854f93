"""Settings: an estimator, its λ and checkpoints, with gram matrix and eigenvectors in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import xarray as xr

import trakdask as td
from trakdask.attribution.estimators import EstimatorLike, named
from trakdask.attribution.grams import with_decomposition
from trakdask.attribution.protocol import Estimator, GramEstimator, damping_prior
from trakdask.explorer.computing import compute, persist, released_if_failed
from trakdask.explorer.view import MeanTrace, View, damping_of
from trakdask.variables import CHECKPOINT, DERIVED, LOSS_GRADIENT, checkpoint_names, lazy_features

_KEPT = 4
"""How many settings are kept in memory: one factor of p² numbers per checkpoint each."""


@dataclass(frozen=True, eq=False)
class Setting:
    """How scores are made, and features with their gram matrix and eigenvectors in memory.

    ``damping`` says how λ was chosen; it is None for estimators without a gram matrix.
    """

    features: xr.Dataset
    estimator: Estimator
    damping: xr.Dataset | None

    @property
    def checkpoints(self) -> np.ndarray:
        """The names of the checkpoints that scores are averaged over."""
        return np.asarray(self.features[CHECKPOINT].values)


class Settings:
    """Makes the settings that views ask for, and keeps the last few.

    The arguments mean the same as in :func:`trakdask.score`, and hold where a view says nothing.
    """

    def __init__(self, features: xr.Dataset, estimator: EstimatorLike = "auto") -> None:
        self.features = features
        if not isinstance(estimator, Estimator):
            estimator = named(features, estimator)
        self.opened = estimator
        self._decomposed = lru_cache(_KEPT)(self._decompose)
        self._prepared = lru_cache(_KEPT)(self._prepare)

    def of(self, view: View) -> Setting:
        """Return the setting of a view; it is computed the first time that it is asked for."""
        names = checkpoint_names(self.features)
        chosen = tuple(name for name in names if name in view.checkpoints)
        key = view.estimator, view.damping, () if len(chosen) == len(names) else chosen
        if released_if_failed(self._prepared(*key).features):
            self._prepared.cache_clear()
            self._decomposed.cache_clear()
        return self._prepared(*key)

    def estimator(self, name: str) -> Estimator:
        """Return the estimator of a view, which says ``""`` for the one of the explorer."""
        if name in ("", self.opened.name):
            return self.opened
        other = named(self.features, name)
        return self.opened if type(other) is type(self.opened) else other

    def _prepare(self, name: str, damping_text: str, checkpoints: tuple[str, ...]) -> Setting:
        estimator, features = self.estimator(name), _selected(self.features, checkpoints)
        if not isinstance(estimator, GramEstimator):
            return Setting(features, estimator, None)
        features = self._decomposed(estimator.resolved(self.features).of_sums(), checkpoints)
        damping: Any = getattr(self.opened, "damping", "auto")
        if damping_text:
            damping = damping_of(damping_text)
        if isinstance(damping, MeanTrace):
            by_trace = td.damping(features, estimator.with_damping("trace"))["damping"]
            damping = by_trace * (damping.value / damping_prior(features))
        (chosen,) = compute(td.damping(features, estimator.with_damping(damping)))
        return Setting(features, estimator.with_damping(chosen), chosen)

    def _decompose(self, estimator: GramEstimator, checkpoints: tuple[str, ...]) -> xr.Dataset:
        """Return the features with gram matrix and eigenvectors in memory."""
        features = lazy_features(_selected(self.features, checkpoints))
        features = with_decomposition(features, estimator)
        wanted = {*DERIVED, "output", "out_to_loss"} - {LOSS_GRADIENT}
        names = [name for name in features if name in wanted]
        kept = zip(names, persist(*(features[name].data for name in names)), strict=True)
        return features.assign({name: features[name].copy(data=data) for name, data in kept})


def _selected(features: xr.Dataset, checkpoints: tuple[str, ...]) -> xr.Dataset:
    return features.sel({CHECKPOINT: list(checkpoints)}) if checkpoints else features
