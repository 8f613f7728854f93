"""How far scores would differ with other seeds: bounds, and pairs that exceed the noise."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from scipy import sparse

from trakdask import arrays
from trakdask.attribution.estimators import EstimatorLike, resolve
from trakdask.attribution.groups import combine
from trakdask.attribution.labels import (
    Labels,
    labels_of_groups,
    labels_of_scores,
    names_of_groups,
    score_attrs,
    with_rest,
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
from trakdask.variables import CHECKPOINT, SAMPLE, TARGET, VARIABLES, coords_along, validate

By = str | Sequence[str] | xr.DataArray

_DESCRIPTIONS = {
    "score": VARIABLES["score"].description,
    "lower": "lower bound of the score over draws of checkpoints",
    "upper": "upper bound of the score over draws of checkpoints",
    "snr": "score divided by its standard error over checkpoints",
}


def intervals(
    features: xr.Dataset,
    targets: xr.Dataset | None = None,
    estimator: EstimatorLike = "auto",
    *,
    by: By | None = None,
    level: float = 0.9,
    q: float | None = None,
) -> xr.Dataset:
    """Return scores with bounds that say how far they would differ with other seeds.

    Parameters
    ----------
    features, targets, estimator
        As in :func:`score`. Without targets: the :func:`self_influence` of the samples.
    by
        As in :func:`group_score`: the sums of scores by group. Or a DataArray (sample, group) with
        the part of each sample that belongs to each group, such as its authors'.
    level
        Which part of such intervals contains the score that infinitely many checkpoints would give.
    q
        Keep only the scores that differ from 0, at this false discovery rate: the expected share of
        the kept scores of a target that are 0 in truth. The others are NaN, which :func:`top_k`
        never ranks.

    Returns
    -------
    Lazy Dataset with ``score``, ``lower``, ``upper``, and ``snr``, the score divided by its
    standard error, (sample, target), (``by``, target) or (sample). :func:`top_k` ranks it by any of
    them, and :func:`to_parquet` and :func:`to_zarr` write it.

    Raises
    ------
    ValueError
        With fewer than five checkpoints, or if ``level`` or ``q`` is not between 0 and 1; and as
        :func:`score` and :func:`group_score` do.

    Notes
    -----
    The checkpoints have to be independent: trained with other seeds, or on other samples.
    Checkpoints of one training resemble each other, and their intervals are too narrow.

    Only the draw of checkpoints varies; λ and the power of ``"soft"`` are held fixed. Scores are a
    linear model of retraining, whose error :func:`trakdask.evaluate.cross_validate` grades.

    The errors are a jackknife over checkpoints: a score is a product of two means over checkpoints
    for most estimators, and each checkpoint is left out of both. The bounds are quantiles of
    Student's distribution. :class:`TracIn` is a sum along a training; here its terms are taken for
    independent.

    Cost: scores cost as much as :func:`score`, 76 bytes of memory per entry of a tile more, and no
    array has all samples, targets and checkpoints. Sums by group read the features once, as
    :func:`group_score`, with one more sum for each checkpoint: C + 1 times its operations and its
    memory, groups × p × C numbers.

    With ``q``, all samples, or groups, of a target are one family of two-sided tests, by the
    procedure of Benjamini and Hochberg. P-values are rounded up by at most 3 %. The scores are
    computed once more to count them, and not kept.

    References
    ----------
    Efron & Stein 1981 (jackknife); Benjamini & Hochberg 1995. Coverage:
    ``2026-11-24-intervals.txt``.

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4, n_checkpoints=5)
    >>> found = td.intervals(features, features.isel(sample=[0, 1]), level=0.5)
    >>> bool(((found.lower < found.score) & (found.score < found.upper)).all())
    True
    >>> td.top_k(found, 3, rank_by="lower").compute().upper.dims
    ('target', 'rank')
    """
    quantile = _quantile(features, level, by)
    if q is not None:
        q = require_number("q", q, low=0, high=1, remedy="try q=0.1")
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
    return _labelled(labels, parts, attrs)


def estimated(
    features: xr.Dataset,
    targets: xr.Dataset | None,
    estimator: EstimatorLike,
    by: By | None = None,
    *,
    name: str = "score",
    relative: bool = False,
) -> tuple[Labels, da.Array, dict[str, Any]]:
    """Return labels, lazy scores with their standard errors over checkpoints, and attrs.

    The scores have dtype :func:`trakdask.arrays.score.estimate`. Errors need two checkpoints.
    ``name`` is in the names of tiles. Sums by group may be of all targets, and ``relative`` to the
    sum of all samples.
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
    solved = operands.vectors(explained)
    if by is None:
        of = operands.features
        require_tiles(of.feature.data, solved, errors=True)
        tiles = arrays.score.score(
            of.feature.data, solved, operands.weight(of),
            folds=operands.fold_weights(of), pooled=operands.estimator.pooled, name=name,
        )  # fmt: skip
        return labels, tiles, attrs
    if relative:
        solved = solved.sum(axis=0, keepdims=True, dtype=np.float64).astype(solved.dtype)
        names = labels[0][: len(n_groups)]
        labels = names, {name: labels[1][name] for name in names}
    tiles = _of_groups(operands, members, math.prod(n_groups), solved, relative=relative)
    if len(n_groups) > 1:
        tiles = tiles.reshape((*n_groups, tiles.shape[1]))
    return labels, tiles, attrs


def _of_groups(
    operands: Solver,
    members: np.ndarray | sparse.csr_array,
    n_groups: int,
    solved: da.Array,
    *,
    relative: bool,
) -> da.Array:
    """Return the scores of groups with their errors, (group, target)."""
    if relative:
        members, n_groups = with_rest(members, n_groups), n_groups + 1
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
    return arrays.jackknife.member_score(sums, solved, relative=relative)


def credit(
    features: xr.Dataset,
    targets: xr.Dataset,
    estimator: EstimatorLike = "auto",
    *,
    by: By,
    level: float = 0.9,
) -> xr.Dataset:
    """Return which share of the scores of some targets each group of training samples has.

    The share of a group is Σ_t Σ_z m(z) score(z, t) / Σ_t Σ_z score(z, t), over the targets t, with
    the part m of the sample z that belongs to the group, and all samples in the denominator.

    Parameters
    ----------
    features, targets, estimator
        As in :func:`score`.
    by
        As in :func:`intervals`: a coord such as the author or the licence, or a DataArray (sample,
        group) of parts, for samples with several authors.
    level
        As in :func:`intervals`.

    Returns
    -------
    Lazy Dataset (``by``) with ``share``; its bounds ``lower`` and ``upper``; ``snr``, the share
    divided by its standard error; ``is_certain``, false where the share cannot be told from 0; and
    ``samples``, how many the group has. Groups that harmed the targets have negative shares. If
    each sample belongs to groups entirely, shares add up to 1.

    Raises
    ------
    ValueError
        As :func:`intervals`.

    Notes
    -----
    The jackknife leaves a checkpoint out of the scores of the group and of the sum of all scores.
    If that sum is near 0, shares say little, and their bounds are wide. They cover the draw of the
    checkpoints, and not the error of the method: show the grade of
    :func:`trakdask.evaluate.cross_validate` beside a statement. Leave out targets that failed.

    Cost: one pass over the features, whatever the number of targets, which are added up first; for
    ``"grad_cos"``, after each of them was divided by its length.

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4, n_checkpoints=5)
    >>> author = features.assign_coords(author=("sample", ["Ada", "Bo"] * 4))
    >>> found = td.credit(author, features, by="author")
    >>> round(float(found.share.sum()), 3)
    1.0
    """
    quantile = _quantile(features, level, by)
    if TARGET not in resolve(features, estimator).norms:
        targets = combine(targets, weights={"all": np.ones(targets.sizes[SAMPLE])})
    labels, tiles, attrs = estimated(features, targets, estimator, by, relative=True)
    parts = [part[..., 0] for part in arrays.jackknife.interval(tiles, quantile)]
    found = _labelled(labels, parts, {**attrs, "level": level}).rename(score="share")
    found["share"].attrs = {"description": "share of the sum of all scores"}
    _, members, sizes = labels_of_groups(features, targets, by)
    if isinstance(members, np.ndarray):
        count = np.bincount(members[members >= 0], minlength=math.prod(sizes))
    else:
        count = members.sum(axis=0)
    is_certain = (found.lower > 0) | (found.upper < 0)
    return found.assign(
        is_certain=is_certain, samples=(found.share.dims, da.asarray(count.reshape(sizes)))
    )


def _quantile(features: xr.Dataset, level: float, by: By | None) -> float:
    """Return the distance of the bounds in standard errors."""
    from scipy.special import stdtrit  # the cost of importing

    level = require_number("level", level, low=0, high=1, remedy="try level=0.9")
    validate(features, ["feature", "out_to_loss"], what="features")
    if by is not None and not isinstance(by, xr.DataArray):
        names_of_groups(features, by)
    if (n := features.sizes[CHECKPOINT]) < LEAST_FOLDS:
        raise ValueError(
            f"expected {LEAST_FOLDS} or more checkpoints for intervals, which follow from how much "
            f"these differ, got {n}; try training more with other seeds, or td.score(features, "
            "targets, average=False) to see the score of each"
        )
    return float(stdtrit(n - 1, (1 + level) / 2))


def _labelled(labels: Labels, parts: Iterable[da.Array], attrs: dict[str, Any]) -> xr.Dataset:
    dims, coords = labels
    data = {
        name: (dims, part, {"description": description})
        for (name, description), part in zip(_DESCRIPTIONS.items(), parts, strict=True)
    }
    return xr.Dataset(data, coords=coords, attrs=attrs)
