"""Checkpoints predict the outputs of one that was left out, if its training samples are known."""

from __future__ import annotations

import dask.array as da
import numpy as np
import xarray as xr

from trakdask.arrays.blocks import where
from trakdask.attribution.protocol import Estimator
from trakdask.variables import CHECKPOINT, GRAM, N_SAMPLES, SAMPLE, TRAINED_ON, validate

LEAST_CHECKPOINTS = 4
"""Without one of them, three are left, the least for a correlation whose bias is known."""


def require_folds(features: xr.Dataset) -> None:
    """Check that features say what their checkpoints were trained on, and of all samples."""
    if TRAINED_ON not in features:
        raise ValueError(
            f"expected {TRAINED_ON!r} in the features, which says what each checkpoint was trained "
            f"on, got {sorted(map(str, features.data_vars))}; try td.evaluate.train_on_halves, or "
            "td.assign_coords(store, {'trained_on': masks}), with masks (checkpoint, sample)"
        )
    validate(features, [TRAINED_ON], what="features")
    if (n := features.sizes[CHECKPOINT]) < LEAST_CHECKPOINTS:
        raise ValueError(
            f"expected {LEAST_CHECKPOINTS} or more checkpoints to leave one out, got {n}; try "
            "training more, on other halves of the samples"
        )
    require_all_samples(features)


def require_all_samples(features: xr.Dataset) -> None:
    """Check that no samples were selected."""
    total = features[GRAM].attrs[N_SAMPLES] if GRAM in features else features.sizes[SAMPLE]
    if features.sizes[SAMPLE] < total:
        raise ValueError(
            f"expected all {total} training samples, since predicted outputs are sums "
            f"over them, got {features.sizes[SAMPLE]}; try the features as td.open returns them"
        )


def _knows(features: xr.Dataset) -> da.Array:
    """Return what each checkpoint was trained on, one chunk of checkpoints: a task costs more."""
    return features[TRAINED_ON].transpose(SAMPLE, CHECKPOINT).data.rechunk({1: -1})


def differ(features: xr.Dataset) -> da.Array:
    """Return whether any sample was seen by some checkpoints and not by others, (), lazy bool."""
    knows = _knows(features)
    return (knows.any(axis=1) & ~knows.all(axis=1)).any()


def fold_weights(features: xr.Dataset, estimator: Estimator, inverse: da.Array | None) -> da.Array:
    """Return the factor of samples where checkpoint j is left out.

    Whether j saw the sample, less the part of all checkpoints that did, times the weight in a score
    without j. The estimator is as in scores. (sample, fold) for one that pools its weights, else
    (sample, fold, checkpoint).
    """
    # Scores without j have another level for every j: without a checkpoint of large scores it is
    # low. Sums over all that j saw would rank the levels, too, and these follow the outputs.
    knows = _knows(features).astype(np.float64)
    differs = knows - knows.mean(axis=1, keepdims=True)
    without: da.Array = differs * estimator.fold_weights(features, inverse)
    if estimator.pooled:
        return without
    is_left_out = np.eye(features.sizes[CHECKPOINT], dtype=bool)
    # The product of checkpoint j has no place in a score without j, whose weights are not pooled.
    apart = where(is_left_out, 0, estimator.weight(features, inverse)[:, None, :])
    return without[:, :, None] * apart
