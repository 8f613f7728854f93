"""What groups changed, in units of the output, with intervals by checkpoints of known halves."""

from __future__ import annotations

import math
import warnings

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr
from scipy import sparse

from trakdask import arrays
from trakdask.arrays.blocks import where
from trakdask.attribution.folds import fold_weights, require_folds
from trakdask.attribution.groups import group_codes
from trakdask.attribution.labels import (
    By,
    Labels,
    labels_of_groups,
    labels_without_targets,
    with_rest,
)
from trakdask.attribution.metrics import COMBINATION, Measure
from trakdask.attribution.operands import Solver
from trakdask.checks import shown
from trakdask.variables import CHECKPOINT, SAMPLE, TARGET, TARGET_PREFIX, coords_along

_LEAST_TARGETS = 20
"""Targets from which on their common slope is known."""

_LARGEST_PART = 0.3
"""The part of the samples of the largest groups whose coverage was measured."""

DESCRIPTIONS = {
    "effect": "value of models of all samples, less the value of models without the group",
    "lower": "lower bound, for one retraining",
    "upper": "upper bound, for one retraining",
    "mean_lower": "lower bound, for the mean of many retrainings",
    "mean_upper": "upper bound, for the mean of many retrainings",
}
BOUNDS = [*DESCRIPTIONS][1:]


def left_out(operands: Solver, vectors: da.Array) -> da.Array:
    """Return Σ_z (m_zj - mean_c m_zc) s_j(z, t), with the scores s_j of all checkpoints but j.

    Parameters
    ----------
    operands
        Of features of all training samples, with ``trained_on``, m. K and λ stay as they are,
        whichever checkpoint is left out.
    vectors
        Those of the targets.

    Returns
    -------
    (target, checkpoint) float64, lazy.

    Raises
    ------
    ValueError
        If ``trained_on`` is missing, there are too few checkpoints, or samples were selected.
    """
    require_folds(operands.features)
    weights = fold_weights(operands.features, operands.estimator, operands.inverse)
    sums = arrays.groups.weighted_sums(operands.features.feature.data, weights)
    return arrays.folds.predicted(sums, vectors)


def group_effects(
    operands: Solver,
    targets: xr.Dataset,
    by: By,
    measure: Measure | None,
    *,
    effect: bool,
    level: float | None,
) -> tuple[Labels, dict[str, da.Array]]:
    """Return what groups changed: labels, and values by name, with bounds if there is a level.

    See :func:`trakdask.group_score`. Without ``effect``, the size of effects on a metric is a
    guess.
    """
    # 1. Sums of the scores of groups, and of the samples that have none.
    labels, members, n_groups = labels_of_groups(operands.features, targets, by)
    n = math.prod(n_groups)
    members = with_rest(members, n)
    sums = operands.sums(operands.features, members, n + 1)
    solved = operands.vectors(targets)
    # (group + rest, target): the last row are samples of no group, which no one asks for, but whose
    # scores belong to the total.
    data = arrays.score.score(sums, solved, None)
    known = ~da.isnan(data).all(0)  # a group may have failed, or a target
    total, data = where(known, da.nansum(data, 0), np.nan), data[:n]
    # 2. Their unit, and errors, by checkpoints that were left out.
    output = targets.output.transpose(SAMPLE, CHECKPOINT).data.rechunk(-1)
    margins = str(targets.attrs.get("loss_kind")).endswith("cross-entropy")
    left = None
    if effect:
        if (n_targets := len(output)) < _LEAST_TARGETS:
            raise ValueError(
                f"expected {_LEAST_TARGETS} or more targets, whose outputs tell the size of "
                f"effects, got {n_targets}; try all targets at once, and .isel(target=...) of the "
                "result"
            )
        predicted = left_out(operands, solved).rechunk(-1)
        left = predicted, output, arrays.effects.slope(predicted, output)
    scale = arrays.effects.scale(output, total, left and left[-1], margins=margins)
    value = data * scale
    if measure is not None:
        # A metric is no sum: outputs less the effects of a group are measured again.
        value = measure.raised_by(data, total, output.T, scale)[:, None]
    found = {"effect": value}
    parts = _parts(operands.features, members, n) if effect else np.empty(0)
    if left is not None and level is not None:
        from scipy.special import stdtrit  # the cost of importing

        quantile = float(stdtrit(output.shape[1] - 1, (1 + level) / 2))
        error = (measure.error if measure else arrays.effects.errors)(*left)
        variance = arrays.effects.per_part(output, margins=margins) * parts
        bounds = arrays.effects.bounds(value, error, variance, quantile)
        found |= dict(zip(BOUNDS, bounds, strict=True))
    # 3. Their labels.
    if measure is not None:
        names, coords = labels_without_targets(labels, len(n_groups))
        coord = (TARGET,), np.array([measure.name], object)
        labels = (*names, TARGET), coords | {f"{TARGET_PREFIX}{COMBINATION}": coord}
    return labels, {key: x.reshape((*n_groups, x.shape[-1])) for key, x in found.items()}


def _parts(
    features: xr.Dataset, members: np.ndarray | sparse.csr_array, n_groups: int
) -> npt.NDArray[np.float64]:
    """Return the part of all samples that each group has, (group,); warn of what is untested."""
    n, along = features.sizes[SAMPLE], coords_along(features, SAMPLE)
    # 1. How many samples of each class, and of none, each group has.
    codes, names = np.broadcast_to(-1, n), np.empty(0)
    if (label := features.attrs.get("label")) in along:
        codes, names = group_codes(along[label].values)
    classes, shape = with_rest(codes, len(names)), (len(names) + 1, n_groups + 1)
    pairs, part = (classes, members), np.broadcast_to(np.float64(1), n)
    if isinstance(members, sparse.csr_array):
        rows, groups = members.tocoo().coords
        pairs, part = (classes[rows], groups), members.data
    # (class, group), with a row of samples without a class, and a column of those without a group.
    shared = sparse.coo_array((part, pairs), shape).tocsr()
    parts: npt.NDArray[np.float64] = shared.sum(axis=0)[:-1] / n
    if large := int((parts > _LARGEST_PART).sum()):
        warnings.warn(
            f"{large} of {n_groups} groups have more than {_LARGEST_PART:.0%} of the samples. "
            "Effects were tested for smaller groups, and those of large ones are often off.",
            stacklevel=4,
        )
    # 2. Classes that a group has all samples of: models without it would not know them.
    # A class is gone if one group has all of it; parts of samples add up to all only up to
    # rounding.
    known = shared[:-1, :-1].tocoo()
    gone = known.coords[0][known.data >= shared.sum(axis=1)[known.coords[0]] - 1e-6]
    if len(gone):
        warnings.warn(
            f"all samples of {shown(names[np.unique(gone)].tolist())} are in one group, and "
            "models without it would not know them. Effects were not tested there, and are "
            "mostly too small; try groups that share classes.",
            stacklevel=4,
        )
    return parts
