"""Features and estimators that are prepared for many scores: what takes long is in memory."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

import trakdask as td
from trakdask import arrays
from trakdask.attribution.estimators import GradDot, resolve
from trakdask.attribution.gauss_newton import Trak
from trakdask.attribution.grams import with_decomposition
from trakdask.attribution.operands import solver
from trakdask.attribution.protocol import LEAST_FOLDS, LOGIT_VARIANCE, Estimator, GramEstimator
from trakdask.attribution.uncertainty import estimated
from trakdask.explorer.computing import compute, persist
from trakdask.variables import (
    CHECKPOINT,
    DAMPING,
    DERIVED,
    LOSS_GRADIENT,
    N_SAMPLES,
    SAMPLE,
    checkpoint_names,
    lazy_features,
)

LEVEL = 0.9
"""The part of the intervals that contains the score, as a rule."""


def prepared(features: xr.Dataset, estimator: Estimator) -> tuple[xr.Dataset, Estimator]:
    """Compute p² numbers per checkpoint, which stay with the features in memory, and λ."""
    if not isinstance(estimator, GramEstimator):
        return features, estimator
    features = lazy_features(features)
    features = with_decomposition(features, estimator.resolved(features).of_sums())
    wanted = {*DERIVED, "output", "out_to_loss"} - {LOSS_GRADIENT}
    names = [name for name in features if name in wanted]
    kept = zip(names, persist(*(features[name].data for name in names)), strict=True)
    features = features.assign({name: features[name].copy(data=data) for name, data in kept})
    variance = arrays.weights.logit_variance(features.out_to_loss.data)
    chosen, variance = compute(td.damping(features, estimator), variance)
    # As in stores, so that one sample has the power of Q that all have.
    about = {
        LOGIT_VARIANCE: variance.tolist(), N_SAMPLES: features.sizes[SAMPLE],
        "pooled_checkpoints": checkpoint_names(features),
    }  # fmt: skip
    damping = CHECKPOINT, chosen["damping"].values, about
    return features.assign({DAMPING: damping}), estimator.with_damping(chosen)


def self_influence(features: xr.Dataset, estimator: Estimator) -> xr.DataArray:
    """Return the lazy self-influence of some samples, under the gram matrix of all."""
    if estimator.norms or not estimator.pooled:  # for these there is no self-influence
        estimator = Trak(estimator.damping) if isinstance(estimator, GramEstimator) else GradDot()
    return td.self_influence(features, estimator)


def with_spread(
    features: xr.Dataset, targets: xr.Dataset, estimator: Estimator
) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and half of their intervals, both (sample, target).

    With fewer than five checkpoints these are their standard errors, NaN for one checkpoint.
    """
    from scipy.special import stdtrit  # slow to import

    if (n := features.sizes[CHECKPOINT]) < 2:
        (scores,) = compute(td.score(features, targets, estimator).data)
        return scores, np.full(scores.shape, np.nan, np.float32)
    _, lazy, _ = estimated(features, targets, estimator)
    (tiles,) = compute(lazy)
    width = stdtrit(n - 1, (1 + LEVEL) / 2) if n >= LEAST_FOLDS else 1
    return tiles["score"], np.asarray(tiles["error"] * width, np.float32)


def bounded(
    features: xr.Dataset, targets: xr.Dataset, estimator: Estimator, by: str, **how: Any
) -> xr.Dataset:
    """Return sums of scores of groups, or their effects, and the upper end of their intervals."""
    lazy = td.group_score(features, targets, estimator, by=by, level=LEVEL, **how)
    found: xr.Dataset
    (found,) = compute(lazy)  # all of it: of a part of the Dataset, dask loses a key
    return found[["effect" if "effect" in found else "score", "upper"]]


def scores_of_sample(
    features: xr.Dataset, targets: xr.Dataset, estimator: Estimator, position: int
) -> da.Array:
    """Return the scores of one training sample for all targets, (target,).

    With a gram matrix the sample's side is solved, one vector, instead of all targets'.
    """
    sample = features.isel({SAMPLE: [position]})
    if not isinstance(estimator, GramEstimator):
        return td.score(sample, targets, estimator).data[0]
    one = lazy_features(sample)
    solved = solver(lazy_features(features), resolve(features, estimator))
    rows = lazy_features(targets)["feature"].data
    products = arrays.score.score(rows, solved.vectors(one), None)[:, 0]
    return products * solved.weight(one).mean(axis=1)[0]
