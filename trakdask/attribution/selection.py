"""Which training data to take for a set of targets."""

from __future__ import annotations

from math import ceil
from typing import Literal, get_args

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.attribution.groups import group_codes
from trakdask.attribution.ranking import require_scores
from trakdask.checks import require_choice, require_number, shown
from trakdask.variables import SAMPLE, TARGET, coords_along

__all__ = ["top_fraction"]

How = Literal["max", "mean"]


def top_fraction(
    scores: xr.DataArray,
    fraction: float,
    *,
    by: str | None = None,
    how: Literal["max", "mean"] = "max",
) -> xr.Dataset:
    """Select the share of the training samples that helps a set of targets most.

    Parameters
    ----------
    scores
        Scores (sample, target) of :func:`score`.
    fraction
        Share of the samples to take, in (0, 1]. The number is rounded up.
    by
        Take this share of each group: the name of a coord of the samples. Samples whose value is
        missing belong to no group, and are not taken.
    how
        What counts of a sample: its ``"max"``, the score of the target that it helps most, or its
        ``"mean"`` over targets.

    Returns
    -------
    Lazy Dataset (sample) with the samples' coords: ``score``, float32, that maximum or mean, and
    ``selected``, bool. ``train.isel(sample=selection.selected)`` is the selected data. Of equal
    scores the first are taken, as by :func:`top_k`. A sample whose score is NaN for some target is
    never taken.

    Raises
    ------
    TypeError, ValueError
        If scores have other dimensions, ``fraction`` is not in (0, 1], or there is no such coord.

    Notes
    -----
    One pass over the scores, whose n × m never exist at once. The choice is exact and does not
    depend on chunks; means are computed in float64 and rounded once.
    Targets of tasks with different numbers of examples are best averaged first,
    ``td.combine(targets, by="task")``, so that the maximum is over tasks, as LESS has it.

    References
    ----------
    Xia et al. 2024, "LESS: Selecting Influential Data for Targeted Instruction Tuning", section
    4.2.

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=20, proj_dim=4)
    >>> scores = td.score(features, features.isel(sample=slice(3)), damping=0.1)
    >>> selection = td.top_fraction(scores, 0.2, by="label")
    >>> selection.selected.groupby("label").sum().values.tolist()
    [2, 2]
    """
    require_scores(scores)
    remedy = "try 0.05"
    if require_number("fraction", fraction, low=0, remedy=remedy) > 1:
        raise ValueError(f"expected fraction in (0, 1], got {fraction}; {remedy}")
    require_choice("how", how, get_args(How), remedy="try how='max'")
    if not isinstance(scores.data, da.Array):
        scores = scores.copy(data=scores.variable.chunk().data)
    # Not nanmax: a target without a score would count as one that the sample does not help.
    wide = scores.variable.astype(np.float64)  # so that the order of a sum does not matter
    best = (wide.max if how == "max" else wide.mean)(TARGET, skipna=False).data
    best = best.astype(np.float32)
    codes, counts = _groups(scores, fraction, by)
    selected = arrays.top_fraction.among_best(best, codes, counts)
    data = {"score": (SAMPLE, best), "selected": (SAMPLE, selected)}
    attrs = {**scores.attrs, "fraction": float(fraction), "over_targets": how, "by": by or ""}
    return xr.Dataset(data, coords=coords_along(scores, SAMPLE), attrs=attrs)


def _groups(scores: xr.DataArray, fraction: float, by: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the group of each sample, and how many samples to take of each group."""
    known = {str(name): values for name, values in coords_along(scores, SAMPLE).items()}
    if by is None:
        codes, n_groups = np.zeros(scores.sizes[SAMPLE], np.int64), 1
    elif isinstance(by, str) and by in known:
        codes, names = group_codes(known[by].values)
        n_groups = len(names)
        if not n_groups:
            raise ValueError(
                f"expected samples with a value of {by!r}, got none; try leaving by out"
            )
    else:
        raise ValueError(
            f"expected by as one of the samples' coords {sorted(known)}, got {shown(by)}; try "
            "scores.assign_coords(group=('sample', values))"
        )
    sizes = np.bincount(codes[codes >= 0], minlength=n_groups)
    # 0.07 * 100 is 7.000000000000001, of which nobody expects 8.
    counts = [ceil(round(fraction * int(size), 9)) for size in sizes]
    return codes, np.array(counts, np.int64)
