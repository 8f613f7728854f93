"""Questions to all training samples at once."""

from __future__ import annotations

import dask.array as da
import numpy as np
import xarray as xr

import trakdask as td
from trakdask import arrays
from trakdask.attribution.groups import group_codes
from trakdask.explorer.attributions import Ready
from trakdask.explorer.computing import compute
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, lazy_features

__all__ = ["mean_targets", "self_influence", "self_influences"]

_OWN_ESTIMATOR = {"relatif": "trak", "grad_cos": "grad_dot", "tracin": "grad_dot"}
"""Estimators without a self-influence of their own, and whose is taken."""

MOST_TARGETS = 25
"""How many targets are columns where they have no groups."""


def self_influence(ready: Ready, features: xr.Dataset) -> xr.DataArray:
    """Return the lazy self-influence of some samples, under the gram matrix of all."""
    name = _OWN_ESTIMATOR.get(ready.estimator.name, ready.estimator.name)
    options = {name: value for name, value in ready.options.items() if name != "learning_rates"}
    return td.self_influence(features, **{**options, "estimator": name})


def self_influences(ready: Ready) -> np.ndarray:
    """Return the self-influence of every training sample, (sample,)."""
    (values,) = compute(self_influence(ready, ready.features).data)
    return np.asarray(values)


def mean_targets(targets: xr.Dataset, across: str) -> tuple[xr.Dataset, np.ndarray]:
    """Return the mean features of groups of targets, as targets, and the names of the groups.

    Scores are linear in the features of the target, so the score of the mean is the mean of the
    scores. Without a coord to group by, they are the first targets themselves.
    """
    if not across:
        first = targets.isel({SAMPLE: slice(MOST_TARGETS)})
        return first, np.arange(first.sizes[SAMPLE])
    codes, groups = group_codes(targets[across].values)
    counts = np.bincount(codes[codes >= 0], minlength=len(groups))
    feature = lazy_features(targets)["feature"].data
    weight = da.from_array(
        np.repeat((1 / counts[codes])[:, None], feature.shape[2], axis=1),
        chunks=(feature.chunks[0], 1),
    )
    means = arrays.groups.group_sum(feature, weight, codes, len(groups), pooled=False)
    (values,) = compute(means)
    one = targets[["feature"]].drop_vars([n for n, c in targets.coords.items() if SAMPLE in c.dims])
    dims = (SAMPLE, PROJ_DIM, CHECKPOINT)
    data = da.from_array(values.astype(feature.dtype), chunks=(-1, -1, 1))
    return one.drop_vars("feature").assign(feature=(dims, data)), groups
