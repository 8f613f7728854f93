"""Scores for pages: what takes long is in memory, and what is asked for is computed at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import xarray as xr

import trakdask as td
from trakdask import arrays
from trakdask.attribution.estimators import GradDot, Trak, resolve
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


@dataclass(frozen=True, eq=False)
class Scorer:
    """Features of training samples, with an estimator that has its λ."""

    features: xr.Dataset
    estimator: Estimator

    @classmethod
    def prepared(cls, features: xr.Dataset, estimator: Estimator) -> Self:
        """Compute p² numbers per checkpoint, which stay with the features in memory, and λ."""
        if not isinstance(estimator, GramEstimator):
            return cls(features, estimator)
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
        return cls(features.assign({DAMPING: damping}), estimator.with_damping(chosen))

    def at(self, positions: Sequence[int] | np.ndarray) -> Self:
        """Return the scorer of some of the training samples."""
        return replace(self, features=self.features.isel({SAMPLE: positions}))

    def self_influence(self) -> np.ndarray:
        """Return the self-influence of the samples, under the gram matrix of all, (sample,)."""
        known = self.estimator
        if known.norms or not known.pooled:  # for these there is no self-influence
            known = Trak(known.damping) if isinstance(known, GramEstimator) else GradDot()
        (values,) = compute(td.self_influence(self.features, known).data)
        return np.asarray(values)

    def scores(self, targets: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
        """Return scores and half of their intervals, both (sample, target).

        With fewer than five checkpoints these are their standard errors, NaN for one checkpoint.
        """
        from scipy.special import stdtrit  # slow to import

        if (n := self.features.sizes[CHECKPOINT]) < 2:
            (scores,) = compute(td.score(self.features, targets, self.estimator).data)
            return scores, np.full(scores.shape, np.nan, np.float32)
        _, lazy, _ = estimated(self.features, targets, self.estimator)
        (tiles,) = compute(lazy)
        width = stdtrit(n - 1, (1 + LEVEL) / 2) if n >= LEAST_FOLDS else 1
        return tiles["score"], np.asarray(tiles["error"] * width, np.float32)

    def scores_of(self, position: int, targets: xr.Dataset) -> np.ndarray:
        """Return the scores of one training sample for many targets, (target,).

        With a gram matrix the sample's side is solved, one vector, instead of all targets'.
        """
        sample = self.at([position]).features
        if isinstance(self.estimator, GramEstimator):
            one, rows = lazy_features(sample), lazy_features(targets)["feature"].data
            solved = solver(lazy_features(self.features), resolve(self.features, self.estimator))
            products = arrays.score.score(rows, solved.vectors(one), None)[:, 0]
            lazy = products * solved.weight(one).mean(axis=1)[0]
        else:
            lazy = td.score(sample, targets, self.estimator).data[0]
        (scores,) = compute(lazy)
        return np.asarray(scores)

    def groups(self, targets: xr.Dataset, by: str, **how: Any) -> Any:
        """Return sums of scores of groups, with the options of :func:`trakdask.group_score`."""
        (found,) = compute(td.group_score(self.features, targets, self.estimator, by=by, **how))
        return found
