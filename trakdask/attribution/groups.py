"""Groups of samples: their numbers, also of very many; and targets that are combined by group."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Literal

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
from scipy import sparse

from trakdask import arrays
from trakdask.attribution.metrics import COMBINATION, MetricLike, measure_of
from trakdask.checks import nearest, require_choice, require_integer, shown
from trakdask.variables import (
    CHECKPOINT,
    SAMPLE,
    VARIABLES,
    aligned,
    coords_along,
    data_in_order,
    lazy_features,
    validate,
)

# pandas makes an object of each text that it factorizes. So it gets a million at a time, and the
# texts that differ together.
_ROWS_AT_ONCE = 2**20


def combine(
    targets: xr.Dataset,
    *,
    by: str | None = None,
    how: Literal["mean", "sum"] = "mean",
    weights: Mapping[str, Any] | xr.DataArray | None = None,
    metric: MetricLike | None = None,
) -> xr.Dataset:
    """Combine targets before anything is solved: one target per group or contrast, or a metric.

    The output of a combination is Σ_t w_t f(t), and its feature Σ_t w_t φ(t). Scores are linear in
    φ(t), so the score of a combination is that combination of scores, at the price of one target.
    ``"grad_cos"`` gives the cosine with the combined gradient instead, as LESS has it.

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
        ``{"cat - dog": {0: 1, 3: -1}}``; or a DataArray (combination, sample), whose first
        dimension may have any name.
    metric
        Instead of ``by`` or ``weights``: a metric M of all outputs, as
        :func:`trakdask.evaluate.metric` takes it. Its score is Σ_t ∂M/∂f_t · score(z, t), and its
        output is M itself. There is no such score by ``"grad_cos"``.

    Returns
    -------
    Lazy Dataset (sample, ...) with ``feature``, ``output`` and ``out_to_loss``, one sample per
    combination, and their names as the coord ``by``, ``"combination"``, or the dimension of the
    DataArray. In scores its name begins with ``target_``. :func:`save` stores it like any other
    targets. A combination has no loss of its own: its ``out_to_loss`` is Σ_t w_t Q(t), the mean of
    1 - p for a group of a classification.

    Raises
    ------
    TypeError, ValueError
        If not exactly one of ``by``, ``weights`` and ``metric`` is given; if there is no such
        coord; if weights have another length, are not finite, or are all zero; as
        :func:`trakdask.evaluate.metric` does. When computed: if a metric has no derivative.

    Notes
    -----
    Sums are computed in float64 and rounded once. A combination with a target that failed is NaN,
    unless its weight is 0; a metric leaves such targets out.

    ∂M/∂f_t is the mean over checkpoints of the derivative at ¾ of their outputs, or at the outputs
    themselves if the loss is a squared error. At the outputs of a model that is sure of everything,
    accuracy hardly changes, and models of less data are less sure. At ¾ of the outputs, derivatives
    ranked models of random halves better in the median, and seldom worse, if checkpoints were
    trained on all data, and as well if they were trained on halves
    (``tests/benchmarks/results/2026-11-24-metrics.txt``). The outputs of all targets are read in
    one task.

    Examples
    --------
    What made the model prefer the first target to the second?

    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> targets = td.testing.simulate_features(n_samples=3, proj_dim=4, seed=1)
    >>> contrast = td.combine(targets, weights={"first - second": {0: 1, 1: -1}})
    >>> td.score(features, contrast).target_combination.values.tolist()
    ['first - second']
    """
    validate(targets, ["feature"], what="targets")
    options = {"by": by, "weights": weights, "metric": metric}
    if len(chosen := [name for name, value in options.items() if value is not None]) != 1:
        raise ValueError(
            f"expected one of by=, weights= and metric=, got {chosen or 'none'}; try by='label', "
            "weights={'first - second': {0: 1, 1: -1}}, or metric='accuracy'"
        )
    lazy = lazy_features(targets)
    output: da.Array | None = None
    matrix: sparse.csr_array | da.Array
    if metric is not None:
        measure, outputs = measure_of(metric, lazy), lazy.output.data.T.rechunk(-1)
        outputs += 0 * outputs.sum(0)  # a target that failed at one checkpoint has no score
        output = measure.values(outputs).astype(lazy.output.dtype)[None].rechunk((1, 1))
        title, names, matrix = (
            COMBINATION,
            np.array([measure.name], object),
            measure.weights(outputs),
        )
        combined = f"metric {measure.name}"
    elif by is not None:
        title, names, matrix = _grouped(targets, by, how)
        combined = f"{how} by {by}"
    else:
        title, names, matrix = _weighted(targets, weights)
        combined = f"weights of {len(names)}"
    data = {
        name: arrays.groups.combine_rows(lazy[name].data, matrix)
        for name in ("feature", "output", "out_to_loss")
        if name in lazy
    }
    if output is not None:
        data["output"] = output
    return xr.Dataset(
        {name: VARIABLES[name].holding(array) for name, array in data.items()},
        {title: (SAMPLE, names), CHECKPOINT: lazy[CHECKPOINT]},
        {**targets.attrs, "combined": combined},
    )


def _grouped(targets: xr.Dataset, by: str, how: str) -> tuple[str, np.ndarray, sparse.csr_array]:
    require_choice("how", how, ["mean", "sum"], remedy="try how='mean'")
    require_group_coord(by, coords_along(targets, SAMPLE))
    codes, names = group_codes(targets[by].values)
    if not len(names):
        raise ValueError(
            f"expected at least one target with a value of {by!r}, got none; try another coord"
        )
    member = np.flatnonzero(codes >= 0)
    count = np.bincount(codes[member], minlength=len(names))
    # (combination, target), a number for each target that has a value.
    entries = 1 / count[codes[member]] if how == "mean" else np.ones(len(member))
    shape = (len(names), len(codes))
    return by, names, sparse.csr_array((entries, (codes[member], member)), shape)


def _weighted(targets: xr.Dataset, weights: Any) -> tuple[str, np.ndarray, sparse.csr_array]:
    # 1. The names and the weights of the combinations.
    n = targets.sizes[SAMPLE]
    rows: Iterable[Any]
    if isinstance(weights, Mapping) and weights:
        title, names, rows = COMBINATION, np.array(list(weights), dtype=object), weights.values()
    elif isinstance(weights, xr.DataArray) and weights.sizes.get(SAMPLE) == n and weights.ndim == 2:
        weights = weights.transpose(..., SAMPLE)
        title = str(weights.dims[0])
        names, unnamed = weights[title].values, weights.drop_vars(title, errors="ignore")
        rows = aligned(unnamed, targets, what="weights").values
    else:
        raise ValueError(
            f"expected weights as a mapping of names to weights, or as a DataArray (combination, "
            f"sample) of {n} targets, got {shown(weights)}; try weights={{'first - second': {{0: 1,"
            " 1: -1}}"
        )
    # 2. The weight of each target in each combination.
    dense = []
    for name, given in zip(names, rows, strict=True):
        if isinstance(given, Mapping):
            row, what = np.zeros(n), f"the position of each target in {name!r}"
            for position, weight in given.items():
                row[require_integer(what, position, 0, n, remedy="try {0: 1, 1: -1}")] = weight
        else:
            values = data_in_order(given, targets, SAMPLE, what=f"weights of {name!r}")
            row = np.asarray(values, np.float64)
        if row.shape != (n,) or not np.isfinite(row).all() or not row.any():
            raise ValueError(
                f"expected finite weights of {n} targets in {name!r}, not all of them 0, got "
                f"{shown(row.tolist())} of shape {row.shape}; try a mapping from positions to "
                "weights, such as {0: 1, 1: -1}"
            )
        dense.append(row)
    return title, names, sparse.csr_array(np.stack(dense))


def require_group_coord(
    by: object, coords: Iterable[Hashable], of_targets: Iterable[Hashable] = ()
) -> None:
    """Check that ``by`` is the name of a coord of samples, and not of one of targets.

    Raises
    ------
    ValueError
        If it is not.
    """
    names, taken = list(map(str, coords)), set(of_targets)
    if not isinstance(by, str) or by not in names or by in taken:
        near = nearest(by, [name for name in names if name not in taken])
        remedy = f"try {near!r}, or " if near else "try "
        raise ValueError(
            f"expected by as the name of a coord of the samples, one of {names}, each once, and "
            f"not of a coord of the targets, got {shown(by)}; {remedy}"
            "assign_coords(group=('sample', values)), and by='group'"
        )


def group_codes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of each value's group, -1 where it is missing, and the groups, sorted.

    As ``pandas.factorize(values, sort=True)``, which of text would make 80 bytes per sample.

    Examples
    --------
    >>> codes, groups = group_codes(np.array([3.0, np.nan, 1.0, 3.0]))
    >>> codes.tolist(), groups.tolist()
    ([1, -1, 0, 1], [1.0, 3.0])
    """
    # 1. The codes of each part, by its own names: (codes, names).
    starts = range(0, max(len(values), 1), _ROWS_AT_ONCE)
    parts = [pd.factorize(values[start : start + _ROWS_AT_ONCE]) for start in starts]
    # 2. The names of all parts, and the number of each in the sorted names. One bit more than they
    # need is for -1.
    numbers, groups = pd.factorize(np.concatenate([names for _, names in parts]), sort=True)
    numbers = numbers.astype(np.min_scalar_type(-max(len(groups), 1)))
    # 3. The codes of each part, by all names.
    ends = np.cumsum([len(names) for _, names in parts])
    codes = [
        np.append(of_part, of_part.dtype.type(-1))[part]  # the last stands for missing values, -1
        for of_part, (part, _) in zip(np.split(numbers, ends[:-1]), parts, strict=True)
    ]
    return np.concatenate(codes), np.asarray(groups)
