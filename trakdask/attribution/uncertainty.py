"""How far scores would differ with other seeds: bounds, and pairs that exceed the noise."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from scipy import sparse

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
    Solver,
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
) -> xr.Dataset:
    """Return scores, or the self-influence, with intervals; see :func:`score`."""
    quantile = _quantile(features, level, by)
    if q is not None:
        q = require_number("q", q, high=1, remedy="try q=0.1")
    labels, tiles, attrs = estimated(features, targets, estimator, by)
    attrs = {**attrs, "level": level}
    parts = arrays.jackknife.interval(tiles, quantile)
    if q is not None:
        from scipy.special import stdtrit  # the cost of importing

        # Under another name, since the scores would else wait in memory until all are counted.
        _, counted, _ = estimated(features, targets, estimator, by, name="counted-score")
        columns = counted[:, None] if targets is None else counted.reshape(-1, counted.shape[-1])
        *_, ratio = arrays.jackknife.interval(columns, 0)
        edges = -stdtrit(features.sizes[CHECKPOINT] - 1, arrays.jackknife.LEVELS / 2)
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
    if by is None:
        of, solved = operands.features, operands.vectors(explained)
        require_tiles(of.feature.data, solved, errors=True)
        tiles = arrays.score.score(
            of.feature.data, solved, operands.weight(of),
            folds=operands.fold_weights(of), pooled=operands.estimator.pooled, name=name,
        )  # fmt: skip
        return labels, tiles, attrs
    tiles = _of_groups(operands, members, math.prod(n_groups), operands.vectors(explained))
    if len(n_groups) > 1:
        tiles = tiles.reshape((*n_groups, tiles.shape[1]))
    return labels, tiles, attrs


def _of_groups(
    operands: Solver,
    members: np.ndarray | sparse.csr_array,
    n_groups: int,
    solved: da.Array,
) -> da.Array:
    """Return the scores of groups with their errors, (group, target)."""
    of = operands.features
    weight, without = operands.weight(of), operands.fold_weights(of)
    if operands.estimator.pooled:
        all_of_them = arrays.weights.pooled(weight)[:, None]
        weights = da.concatenate([without, all_of_them], axis=1)
    else:
        folds = da.concatenate([without, da.ones_like(without[:, :1])], axis=1)
        weights = folds[:, :, None] * weight[:, None, :]
    # A sample that failed at a checkpoint has a weight without it, but none with all of them.
    weights += 0 * weights.sum(axis=1, keepdims=True)
    require_sums(of.feature.data, n_groups, weights.shape[1])
    sums = arrays.groups.weighted_sums(of.feature.data, weights, members, n_groups)
    return arrays.jackknife.member_score(sums, solved)


def _quantile(features: xr.Dataset, level: float | None, by: By | None) -> float:
    """Return the distance of the bounds in standard errors."""
    from scipy.special import stdtrit  # the cost of importing

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
    return float(stdtrit(n - 1, (1 + level) / 2))
