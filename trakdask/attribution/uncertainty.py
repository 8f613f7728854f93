"""How far scores would differ with other seeds: bounds, and pairs that exceed the noise."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.attribution.estimators import EstimatorLike, resolve
from trakdask.attribution.labels import (
    By,
    Labels,
    labels_of_groups,
    labels_of_scores,
    names_of_groups,
    score_attrs,
)
from trakdask.attribution.operands import (
    operands_of,
    require_sums,
    require_tiles,
    self_influence_forms,
    solver,
)
from trakdask.attribution.protocol import LEAST_FOLDS
from trakdask.checks import require_number
from trakdask.variables import CHECKPOINT, SAMPLE, VARIABLES, coords_along, require_new, validate

_DESCRIPTIONS = {
    "score": VARIABLES["score"].description,
    "lower": "lower bound of the score over draws of checkpoints",
    "upper": "upper bound of the score over draws of checkpoints",
    "snr": "score divided by its standard error over checkpoints",
}


def bounded(
    features: xr.Dataset,
    targets: xr.Dataset | None,
    estimator: EstimatorLike,
    by: By | None = None,
    *,
    level: float | None,
    q: float | None,
    average: bool = True,
) -> xr.Dataset:
    """Return scores, or the self-influence, with intervals; see :func:`score`."""
    from scipy.special import stdtrit  # the cost of importing

    # 1. The options, and the distance of the bounds in standard errors.
    if not average:
        raise ValueError(
            "expected average=True with level= or q=, since intervals are of means over "
            "checkpoints, got average=False; try leaving out either"
        )
    level = require_number("level", level, high=1, remedy="try level=0.9")
    validate(features, ["feature", "out_to_loss"], what="features")
    if by is not None and not isinstance(by, xr.DataArray):
        names_of_groups(coords_along(features, SAMPLE), by)
    if (n := features.sizes[CHECKPOINT]) < LEAST_FOLDS:
        raise ValueError(
            f"expected {LEAST_FOLDS} or more checkpoints for intervals, which follow from how much "
            f"these differ, got {n}; try training more with other seeds, or td.score(features, "
            "targets, average=False) to see the score of each"
        )
    quantile = float(stdtrit(n - 1, (1 + level) / 2))
    # 2. Scores and bounds, and which of them are significant.
    if q is not None:
        q = require_number("q", q, high=1, remedy="try q=0.1")
    labels, tiles, attrs = estimated(features, targets, estimator, by)
    attrs = {**attrs, "level": level}
    parts = arrays.jackknife.interval(tiles, quantile)
    if q is not None:
        # Under another name, since the scores would else wait in memory until all are counted.
        _, counted, _ = estimated(features, targets, estimator, by, name="counted-score")
        columns = counted[:, None] if targets is None else counted.reshape(-1, counted.shape[-1])
        *_, ratio = arrays.jackknife.interval(columns, 0)
        # Ratios are compared without their sign, so each tail has half of a level.
        edges = -stdtrit(n - 1, arrays.jackknife.LEVELS / 2)
        least = arrays.jackknife.least_significant(ratio, edges, q)
        parts = tuple(da.where(abs(parts[-1]) >= least, part, np.nan) for part in parts)
        attrs["false_discovery_rate"] = q
    dims, coords = labels
    data = {
        name: (dims, part, {"description": description})
        for (name, description), part in zip(_DESCRIPTIONS.items(), parts, strict=True)
    }
    require_new(coords, data)
    return xr.Dataset(data, coords=coords, attrs=attrs)


def estimated(
    features: xr.Dataset,
    targets: xr.Dataset | None,
    estimator: EstimatorLike,
    by: By | None = None,
    *,
    name: str = "score",
) -> tuple[Labels, da.Array, dict[str, Any]]:
    """Return labels, lazy scores with their standard errors over checkpoints, and attrs.

    The scores have dtype :func:`trakdask.arrays.score.estimate`. Errors need two checkpoints.
    ``name`` is in the names of tiles.
    """
    if targets is None:
        features, operands, forms = self_influence_forms(features, estimator)
        tiles = arrays.jackknife.self_influence(forms, operands.estimator.g(operands.features))
        coords: dict[Hashable, Any] = coords_along(features, SAMPLE)
        return ((SAMPLE,), coords), tiles, operands.attrs | VARIABLES["self_influence"].attrs
    training, explained = operands_of(features, targets)
    if by is None:
        labels = labels_of_scores(training, explained)
    else:
        labels, members, n_groups = labels_of_groups(training, explained, by)
    operands = solver(training, resolve(training, estimator))
    attrs = score_attrs(training, targets, operands.attrs)
    x, solved = operands.features.feature.data, operands.vectors(explained)
    weight, pooled = operands.weight(operands.features), operands.estimator.pooled
    without = operands.estimator.fold_weights(operands.features, operands.inverse)
    # 1. Scores of single samples.
    if by is None:
        require_tiles(x, solved, errors=True)
        tiles = arrays.score.score(x, solved, weight, folds=without, pooled=pooled, name=name)
        return labels, tiles, attrs
    # 2. Sums by group, with the weights without each checkpoint, and with all of them as the last.
    if pooled:
        all_of_them = arrays.weights.pooled(weight)[:, None]
        weights = da.concatenate([without, all_of_them], axis=1)
    else:
        folds = da.concatenate([without, da.ones_like(without[:, :1])], axis=1)
        weights = folds[:, :, None] * weight[:, None, :]
    # A sample that failed at a checkpoint has a weight without it, but none with all of them.
    weights += 0 * weights.sum(axis=1, keepdims=True)
    n = math.prod(n_groups)
    require_sums(x, n, weights.shape[1])
    sums = arrays.groups.weighted_sums(x, weights, members, n)
    tiles = arrays.jackknife.member_score(sums, solved)
    if len(n_groups) > 1:
        tiles = tiles.reshape((*n_groups, tiles.shape[1]))
    return labels, tiles, attrs
