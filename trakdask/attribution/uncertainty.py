"""How far scores would differ with other seeds: bounds, and pairs that exceed the noise."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from dask.graph_manipulation import clone
from scipy import sparse

from trakdask import arrays
from trakdask.attribution.estimators import LEAST_FOLDS, EstimatorLike, resolve
from trakdask.attribution.scores import (
    Labels,
    Solver,
    labels_of_groups,
    labels_of_scores,
    operands_of,
    score_attrs,
    self_influence_forms,
    solver,
)
from trakdask.checks import require_number
from trakdask.variables import CHECKPOINT, SAMPLE, TARGET, VARIABLES, coords_along

FREEDOM = "degrees_of_freedom"
"""In the attrs of intervals: of Student's distribution, one less than the checkpoints."""

_DESCRIPTIONS = {
    "lower": "lower bound of the score over draws of checkpoints",
    "upper": "upper bound of the score over draws of checkpoints",
    "snr": "score divided by its standard error over checkpoints",
}


def intervals(
    features: xr.Dataset,
    targets: xr.Dataset | None = None,
    estimator: EstimatorLike = "auto",
    *,
    by: str | Sequence[str] | None = None,
    level: float = 0.9,
) -> xr.Dataset:
    """Return scores with bounds that say how far they would differ with other seeds.

    Parameters
    ----------
    features, targets, estimator
        As in :func:`score`. Without targets: the :func:`self_influence` of the samples.
    by
        As in :func:`group_score`: the sums of scores by group.
    level
        Which part of such intervals contains the score that infinitely many checkpoints would give.

    Returns
    -------
    Lazy Dataset with ``score``, ``lower``, ``upper``, and ``snr``, the score divided by its
    standard error, (sample, target), (``by``, target) or (sample). :func:`top_k` ranks it by any of
    them, :func:`significant` keeps what exceeds the noise, and :func:`to_parquet` writes it.

    Raises
    ------
    ValueError
        With fewer than five checkpoints, or if ``level`` is not between 0 and 1; and as
        :func:`score` and :func:`group_score` do.

    Notes
    -----
    The checkpoints have to be independent: trained with other seeds, or on other samples.
    Checkpoints of one training resemble each other, and their intervals are too narrow.

    What varies is the draw of checkpoints. That scores are a linear model of retraining is an error
    of its own, which :func:`trakdask.evaluate.cross_validate` grades. λ and the power of ``"soft"``
    are held fixed.

    The errors are a jackknife over checkpoints: a score is a product of two means over checkpoints
    for most estimators, and each checkpoint is left out of both. The bounds are quantiles of
    Student's distribution. :class:`TracIn` is a sum along a training; here its terms are taken for
    independent.

    Cost: scores cost as much as :func:`score`, 32 bytes of memory per entry of a tile more, and no
    array has all samples, targets and checkpoints. Sums by group read the features once, as
    :func:`group_score`, with one more sum for each checkpoint: C + 1 times its operations and its
    memory, groups × p × C numbers.

    References
    ----------
    Efron & Stein 1981 (jackknife). Coverage: ``tests/benchmarks/intervals.py``.

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
    from scipy.special import stdtrit  # the cost of importing

    level = require_number("level", level, low=0, high=1, remedy="try level=0.9")
    labels, tiles, attrs = estimated(features, targets, estimator, by)
    if (n := features.sizes[CHECKPOINT]) < LEAST_FOLDS:
        raise ValueError(
            f"expected {LEAST_FOLDS} or more checkpoints for intervals, which follow from how much "
            f"these differ, got {n}; try training more with other seeds, or td.score(features, "
            "targets, average=False) to see the score of each"
        )
    dims, coords = labels
    score, error = tiles["score"], tiles["error"]
    margin = error * error.dtype.type(stdtrit(n - 1, (1 + level) / 2))
    data = {
        "score": (dims, score, VARIABLES["score"].attrs),
        "lower": (dims, score - margin),
        "upper": (dims, score + margin),
        "snr": (dims, score / da.where(error > 0, error, np.nan)),
    }
    ds = xr.Dataset(data, coords=coords, attrs=attrs | {"level": level, FREEDOM: n - 1})
    for name, description in _DESCRIPTIONS.items():
        ds[name].attrs["description"] = description
    return ds


def estimated(
    features: xr.Dataset,
    targets: xr.Dataset | None,
    estimator: EstimatorLike,
    by: str | Sequence[str] | None = None,
) -> tuple[Labels, da.Array, dict[str, str]]:
    """Return labels, lazy scores with their standard errors over checkpoints, and attrs.

    The scores have dtype :func:`trakdask.arrays.score.estimate`. Errors need two checkpoints.
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
        labels, codes, n_groups = labels_of_groups(training, explained, by)
    operands = solver(training, resolve(training, estimator))
    attrs = score_attrs(training, targets, operands.attrs)
    solved = operands.vectors(explained)
    if by is None:
        of = operands.features
        tiles = arrays.score.score(
            of.feature.data, solved, operands.weight(of),
            folds=operands.fold_weights(of), pooled=operands.estimator.pooled,
        )  # fmt: skip
        return labels, tiles, attrs
    tiles = _of_groups(operands, _one_hot(codes, math.prod(n_groups)), solved)
    return labels, tiles.reshape((*n_groups, tiles.shape[1])), attrs


def _one_hot(codes: np.ndarray, n_groups: int) -> sparse.csr_array:
    """Return which group each sample belongs to, (sample, group)."""
    is_member = codes >= 0
    starts = np.concatenate([[0], np.cumsum(is_member)])
    ones = np.ones(starts[-1], np.float32)
    return sparse.csr_array((ones, codes[is_member], starts), (len(codes), n_groups))


def _of_groups(operands: Solver, members: sparse.csr_array, solved: da.Array) -> da.Array:
    """Return the scores of groups with their errors, (group, target)."""
    of = operands.features
    weight, without = operands.weight(of), operands.fold_weights(of)
    if operands.estimator.pooled:
        all_of_them = arrays.weights.pooled(weight)[:, None]
        weights = da.concatenate([without, all_of_them], axis=1)
    else:
        folds = da.concatenate([without, da.ones_like(without[:, :1])], axis=1)
        weights = folds[:, :, None] * weight[:, None, :]
    sums = arrays.jackknife.member_sums(of.feature.data, weights, members)
    return arrays.jackknife.member_score(sums, solved)


def significant(found: xr.Dataset, q: float = 0.1) -> xr.Dataset:
    """Keep the scores that differ from 0 at a false discovery rate; the others become NaN.

    Parameters
    ----------
    found
        Dataset of :func:`intervals`.
    q
        The expected share of the kept scores of a target that are 0 in truth.

    Returns
    -------
    Lazy Dataset of the same variables. :func:`top_k` never ranks NaN, so that ``td.top_k(
    td.significant(found), 20)`` has at most 20 samples of each target, which all differ from 0.

    Raises
    ------
    ValueError
        If ``found`` is no Dataset of :func:`intervals`, or was ranked already: how many scores were
        compared matters. If ``q`` is not between 0 and 1.

    Notes
    -----
    All samples, or groups, of a target are one family of two-sided tests, by the procedure of
    Benjamini and Hochberg. P-values are rounded up by at most 3 %. Cost: one more pass over the
    scores, which are computed again and not kept.

    References
    ----------
    Benjamini & Hochberg 1995.

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=40, proj_dim=4, n_checkpoints=5)
    >>> found = td.intervals(features, features.isel(sample=[0, 1]), "grad_dot")
    >>> kept = td.significant(found, q=0.2).score.notnull()
    >>> bool((abs(found.snr).where(kept).min() > abs(found.snr).where(~kept).max()))
    True
    """
    from scipy.special import stdtrit  # the cost of importing

    q = require_number("q", q, low=0, high=1, remedy="try q=0.1")
    if not isinstance(found, xr.Dataset) or FREEDOM not in found.attrs or "position" in found:
        got = list(found) if isinstance(found, xr.Dataset) else type(found).__name__
        raise ValueError(
            f"expected the Dataset of td.intervals, of all samples, got {got}; try "
            "td.top_k(td.significant(td.intervals(features, targets)), 10)"
        )
    freedom = found.attrs[FREEDOM]
    edges = -stdtrit(freedom, arrays.jackknife.LEVELS / 2)
    dims = [dim for dim in found.snr.dims if dim != TARGET]
    # A copy of the graph, so that scores need not wait in memory until they have been counted.
    snr = found.snr.copy(data=clone(found.snr.data) if found.snr.chunks else found.snr.data)
    flat = snr.stack({"test": dims}, create_index=False).transpose("test", ...).variable.chunk()
    columns = flat.data if flat.ndim == 2 else flat.data[:, None]
    least = arrays.jackknife.least_significant(columns, edges, q)
    at = xr.Variable((TARGET,), least) if TARGET in found.snr.dims else xr.Variable((), least[0])
    return found.where(abs(found.snr.variable) >= at)
