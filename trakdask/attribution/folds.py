"""What checkpoints predict of one that was left out, where it is known what it was trained on."""

from __future__ import annotations

import dask.array as da
import xarray as xr

from trakdask import arrays
from trakdask.attribution.estimators import EstimatorLike, resolve
from trakdask.variables import CHECKPOINT, GRAM, N_SAMPLES, SAMPLE, TRAINED_ON, validate

LEAST_CHECKPOINTS = 4
"""Without one of them, three are left, the least for a correlation whose bias is known."""


def require_folds(features: xr.Dataset) -> None:
    """Check that features say what their checkpoints were trained on, and of all samples."""
    if TRAINED_ON not in features:
        raise ValueError(
            f"expected {TRAINED_ON!r} in the features, which says what each checkpoint was trained "
            f"on, got {sorted(map(str, features.data_vars))}; try featurizing "
            "samples.assign_coords(trained_on=masks), or td.assign_coords(store, "
            "{'trained_on': masks}), with masks (checkpoint, sample)"
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


def differ(features: xr.Dataset) -> da.Array:
    """Return whether any sample was seen by some checkpoints and not by others, (), lazy bool."""
    knows = features[TRAINED_ON].transpose(SAMPLE, CHECKPOINT).data
    found: da.Array = (knows.any(axis=1) & ~knows.all(axis=1)).any()
    return found


def fold_weights(
    features: xr.Dataset, estimator: EstimatorLike, inverse: da.Array | None
) -> da.Array:
    """Return what samples are multiplied by where checkpoint j is left out, 0 if j lacks them.

    (sample, fold) for an estimator that pools its weights, else (sample, fold, checkpoint).
    """
    whole = resolve(features, estimator).of_scores(features)
    knows = features[TRAINED_ON].data
    if whole.pooled and not whole.norms:
        return arrays.folds.means_of_others(whole.weight(features, inverse), knows)
    n, columns = features.sizes[CHECKPOINT], []
    for j in range(n):
        # The weights of these depend on all checkpoints that are there.
        others = [c for c in range(n) if c != j]
        rest = features.isel({CHECKPOINT: others})
        of_rest = resolve(rest, estimator).of_scores(rest)
        weight = of_rest.weight(rest, None if inverse is None else inverse.blocks[others])
        if whole.pooled:
            columns.append(da.where(knows[:, j], arrays.weights.pooled(weight), 0))
            continue
        zero = da.zeros_like(weight[:, :1])
        with_own = da.concatenate([weight[:, :j], zero, weight[:, j:]], axis=1)
        columns.append(da.where(knows[:, j : j + 1], with_own, 0))
    stacked: da.Array = da.stack(columns, axis=1)
    return stacked
