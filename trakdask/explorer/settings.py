"""How scores are made: an estimator, with gram matrix and eigenvectors in memory."""

from __future__ import annotations

from dataclasses import dataclass

import xarray as xr

import trakdask as td
from trakdask.attribution.grams import with_decomposition
from trakdask.attribution.protocol import Estimator, GramEstimator
from trakdask.explorer.computing import compute, persist
from trakdask.variables import DERIVED, LOSS_GRADIENT, lazy_features


@dataclass(frozen=True, eq=False)
class Setting:
    """How scores are made, and features with their gram matrix and eigenvectors in memory."""

    features: xr.Dataset
    estimator: Estimator


def prepared(features: xr.Dataset, estimator: Estimator) -> Setting:
    """Return the setting of an estimator: p² numbers per checkpoint are computed, and λ."""
    if not isinstance(estimator, GramEstimator):
        return Setting(features, estimator)
    features = lazy_features(features)
    features = with_decomposition(features, estimator.resolved(features).of_sums())
    wanted = {*DERIVED, "output", "out_to_loss"} - {LOSS_GRADIENT}
    names = [name for name in features if name in wanted]
    kept = zip(names, persist(*(features[name].data for name in names)), strict=True)
    features = features.assign({name: features[name].copy(data=data) for name, data in kept})
    (chosen,) = compute(td.damping(features, estimator))
    return Setting(features, estimator.with_damping(chosen))
