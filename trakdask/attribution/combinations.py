"""Targets that are linear combinations of others: sums, means and differences of outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
import xarray as xr
from scipy import sparse

from trakdask import arrays
from trakdask.attribution.groups import group_codes
from trakdask.checks import require_choice, shown
from trakdask.variables import (
    CHECKPOINT,
    SAMPLE,
    VARIABLES,
    aligned,
    lazy_features,
    validate,
)

__all__ = ["combine"]

COMBINATION = "combination"

How = Literal["mean", "sum"]
Weights = Mapping[str, Any] | xr.DataArray


def combine(
    targets: xr.Dataset,
    *,
    by: str | None = None,
    how: Literal["mean", "sum"] = "mean",
    weights: Weights | None = None,
) -> xr.Dataset:
    """Combine targets linearly before anything is solved: one target per group or contrast.

    The output of a combination is Σ_t w_t f(t), and its feature Σ_t w_t φ(t). Scores are linear in
    φ(t) (but for ``estimator="grad_cos"``), so the score of a combination is that combination of
    scores, at the price of one target.

    Parameters
    ----------
    targets
        Features of targets, from :func:`featurize`.
    by
        Name of a coord of the targets: one combination per value, sorted; missing values belong to
        none.
    how
        ``"mean"`` or ``"sum"`` of the targets of each group.
    weights
        Instead of ``by``: a mapping from the name of each combination to its weights, an array with
        one number per target, or a mapping from positions of targets to numbers, such as
        ``{"cat - dog": {0: 1, 3: -1}}``; or a DataArray (combination, sample), of which the first
        dimension may have any name.

    Returns
    -------
    Lazy Dataset (sample, ...) with ``feature`` and ``output``, one sample per combination, and
    their names as the coord ``by``, ``"combination"``, or the dimension of the DataArray. In scores
    its name begins with ``target_``. There is no ``out_to_loss``: a combination has no loss of its
    own, and scores of targets do not need it.

    Raises
    ------
    TypeError, ValueError
        If neither ``by`` nor ``weights`` is given, or both; if there is no such coord; if weights
        have another length, are not finite, or are all zero.

    Notes
    -----
    Sums are computed in float64 and rounded once. A combination with a target that failed is NaN,
    unless its weight is 0.

    Examples
    --------
    What made the model prefer the first target to the second?

    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> targets = td.testing.simulate_features(n_samples=3, proj_dim=4, seed=1)
    >>> contrast = td.combine(targets, weights={"first - second": {0: 1, 1: -1}})
    >>> td.score(features, contrast, damping=0.1).target_combination.values.tolist()
    ['first - second']
    """
    validate(targets, ["feature"], what="targets")
    if (by is None) == (weights is None):
        given = "neither" if by is None else "both"
        raise ValueError(
            f"expected either by= or weights=, got {given}; try by='label', or weights={{'first - "
            "second': {0: 1, 1: -1}}"
        )
    if weights is None:
        title, names, matrix = _grouped(targets, by, how)
    else:
        title, names, matrix = _weighted(targets, weights)
    lazy = lazy_features(targets)
    data = {
        name: (VARIABLES[name].dims, arrays.combinations.combine_rows(lazy[name].data, matrix))
        for name in ("feature", "output")
        if name in lazy
    }
    coords = {title: (SAMPLE, names), CHECKPOINT: lazy[CHECKPOINT]}
    attrs = {**targets.attrs, "combined": f"{how} by {by}" if by else f"weights of {len(names)}"}
    made = xr.Dataset(data, coords=coords, attrs=attrs)
    return made.assign({n: made[n].assign_attrs(VARIABLES[n].attrs) for n in data})


def _grouped(targets: xr.Dataset, by: object, how: How) -> tuple[str, np.ndarray, sparse.csr_array]:
    require_choice("how", how, get_args(How), remedy="try how='mean'")
    known = [str(name) for name, coord in targets.coords.items() if coord.dims == (SAMPLE,)]
    if not isinstance(by, str) or by not in known:
        raise ValueError(
            f"expected by as one of the targets' coords {known}, got {shown(by)}; try "
            "targets.assign_coords(group=('sample', values))"
        )
    codes, names = group_codes(targets[by].values)
    if not len(names):
        raise ValueError(
            f"expected at least one target with a value of {by!r}, got none; try another coord"
        )
    member = np.flatnonzero(codes >= 0)
    count = np.bincount(codes[member], minlength=len(names))
    entries = 1 / count[codes[member]] if how == "mean" else np.ones(len(member))
    shape = (len(names), len(codes))
    return by, names, sparse.csr_array((entries, (codes[member], member)), shape)


def _weighted(targets: xr.Dataset, weights: Weights) -> tuple[str, np.ndarray, sparse.csr_array]:
    if isinstance(weights, xr.DataArray):
        title, names, dense = _labelled_weights(targets, weights)
    elif isinstance(weights, Mapping) and weights:
        title, names = COMBINATION, np.array(list(weights), dtype=object)
        dense = np.stack([_row(targets, name, given) for name, given in weights.items()])
    else:
        raise TypeError(
            f"expected weights as a mapping of names to weights, or a DataArray, got "
            f"{shown(weights)}; try weights={{'first - second': {{0: 1, 1: -1}}}}"
        )
    for name, row in zip(names, dense, strict=True):
        if not np.isfinite(row).all() or not row.any():
            raise ValueError(
                f"expected finite weights of {name!r}, not all of them 0, got {shown(row.tolist())}"
                "; try 1 and -1"
            )
    return title, names, sparse.csr_array(dense)


def _labelled_weights(
    targets: xr.Dataset, weights: xr.DataArray
) -> tuple[str, np.ndarray, np.ndarray]:
    title = str(weights.dims[0]) if weights.dims else ""
    size = targets.sizes[SAMPLE]
    if weights.ndim != 2 or weights.dims[1] != SAMPLE or weights.sizes[SAMPLE] != size:
        raise ValueError(
            f"expected weights (combination, sample) of {size} targets, got {dict(weights.sizes)}; "
            "try weights.transpose(..., 'sample')"
        )
    labels = weights[title].values if title in weights.coords else np.arange(len(weights))
    unnamed = weights.drop_vars(title, errors="ignore")
    return title, labels, _numbers(aligned(unnamed, targets, what="weights").values, title)


def _row(targets: xr.Dataset, name: str, given: Any) -> np.ndarray:
    n = targets.sizes[SAMPLE]
    if not isinstance(given, Mapping):
        row = _numbers(given, name)
        if row.shape != (n,):
            raise ValueError(
                f"expected a weight for each of {n} targets in {name!r}, got shape {row.shape}; "
                "try a mapping from positions to weights"
            )
        return row
    row = np.zeros(n)
    for position, weight in given.items():
        is_integer = isinstance(position, int | np.integer) and not isinstance(position, bool)
        if not is_integer or not 0 <= position < n:
            raise ValueError(
                f"expected positions of {n} targets in the weights of {name!r}, got "
                f"{shown(position)}; try an integer from 0 to {n - 1}"
            )
        row[position] = _numbers(weight, name)
    return row


def _numbers(values: Any, name: str) -> np.ndarray:
    found = np.asarray(values)
    if found.dtype.kind not in "fiub":
        raise TypeError(
            f"expected numbers as weights of {name!r}, got {shown(values)}; try 1 and -1"
        )
    return found.astype(np.float64)
