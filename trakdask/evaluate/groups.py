"""Train models without each group, and compare the changes with the predictions of scores."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from trakdask.attribution.groups import group_codes
from trakdask.checks import shown
from trakdask.evaluate.datamodeling import described_lds, rank_correlations
from trakdask.evaluate.results import as_array, lazy_data, lazy_results, require_bootstrap
from trakdask.evaluate.retraining import train_models
from trakdask.variables import SAMPLE, TARGET

_OF_ALL = -2
"""In place of the group that is left out; no sample has it."""


def leave_group_out(
    train_fn: Callable[[NDArray[np.int64], int], ArrayLike],
    sums: xr.DataArray | Mapping[str, xr.DataArray] | xr.Dataset,
    groups: xr.DataArray,
    *,
    seeds: int | Sequence[int] = 3,
    resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
    store: str | os.PathLike[str] | None = None,
    tag: str | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """Train without each group of samples, and compare outputs with the predictions of scores.

    The effect of a group on a target is its output by models of all samples, minus its output by
    models without the group. The sum of the group's scores predicts it.

    Parameters
    ----------
    train_fn
        As in :func:`retrain`: (positions, seed) -> outputs of all targets.
    sums
        Predictions of the effects: sums of scores (group, target) of :func:`trakdask.group_score`,
        or a mapping from names to such sums; or a Dataset of it with ``level=``, whose bounds are
        compared, too: of effects, those for the mean of many retrainings. Groups that these lack
        are not left out.
    groups
        The group of each training sample, (sample), such as ``features.source``, with the name that
        the sums have as a dimension.
    seeds
        Models per group, and of all samples, whose outputs are averaged. Two or more reveal how
        much of an effect is noise.
    resamples, seed, confidence
        As in :func:`lds`; groups are resampled.
    store, tag, progress
        As in :func:`retrain`: with a store the models are trained at once, and stored.

    Returns
    -------
    Dataset of float64 variables, lazy unless there is a store:

    - ``effect`` (group, target), and ``effect_error``, its standard error by the seeds, NaN with a
      single one;
    - all that :func:`lds` returns for the subsets that lack one group. ``lds`` is the Spearman
      correlation, over groups, of the sums with the effects, and :func:`trakdask.plots.lds` draws
      it;
    - ``scale`` (): the number by which the sums have to be multiplied to be nearest to the effects,
      by least squares;
    - ``coverage`` (target), if there are bounds: the share of the groups whose effect lies between
      the bounds, times ``scale`` if they have no units, and ``coverage_mean`` ().

    Raises
    ------
    BlockError, StoreMismatchError
        As :func:`retrain`.
    ValueError
        If there are sums of fewer than two groups, or of groups that no sample has; when computed,
        if the correlation is undefined for every target.

    Notes
    -----
    Cost: (groups + 1) × seeds trainings. With a store, models that other evaluations have trained
    are not trained again.

    Bounds of sums cover the draw of the checkpoints that scores are made of. Effects differ from
    scores for two further reasons: scores are a linear model of retraining, and a few seeds measure
    effects with the error ``effect_error``. So the coverage is lower than the level of the bounds,
    mostly by far (``tests/benchmarks/results/2026-11-24-credit.txt``). Bounds of effects, by
    ``effect=True``, cover the error of the linear model, too.

    References
    ----------
    Koh et al. 2019, "On the accuracy of influence functions for measuring group effects".

    Examples
    --------
    >>> import numpy as np
    >>> import trakdask as td
    >>> worth, source = np.arange(6.0), np.array(["a", "b", "b", "c", "c", "c"])
    >>> def train(positions, seed):
    ...     return worth[positions].sum(keepdims=True)
    >>> sums = xr.DataArray(
    ...     [[0.1], [2.9], [8.0]], {"source": ["a", "b", "c"]}, ("source", "target")
    ... )
    >>> groups = xr.DataArray(source, dims="sample", name="source")
    >>> result = td.evaluate.leave_group_out(train, sums, groups, resamples=10)
    >>> result.effect.values[:, 0].tolist(), float(result.lds_mean)
    ([0.0, 3.0, 12.0], 1.0)
    """
    options = require_bootstrap(resamples, seed, confidence)
    name, bounds, has_units = str(as_array(groups, SAMPLE).name), [], False
    if isinstance(sums, xr.Dataset):
        has_units = "effect" in sums
        # Effects here are means over seeds, which the bounds of one retraining are too wide for.
        kinds = ("mean_lower", "mean_upper") if has_units else ("lower", "upper")
        bounds = [lazy_data(sums[bound].transpose(name, TARGET)) for bound in kinds]
        sums = sums["effect" if has_units else "score"]
    sums = as_array(sums, name, TARGET)
    codes, names = group_codes(groups.values)
    left_out = pd.Index(names).get_indexer(sums[name].values)
    if len(left_out) < 2 or (left_out < 0).any():
        raise ValueError(
            f"expected sums of two or more of the groups {shown(names.tolist())} of {name!r}, got "
            f"{shown(sums[name].values.tolist())}; try td.group_score(features, targets, "
            f"by={name!r}) of these samples"
        )
    # (1 + group, sample): all samples first, then without each group.
    masks = da.from_array(np.append(_OF_ALL, left_out)[:, None], chunks=1) != codes
    outputs = train_models(
        train_fn, masks, sums.sizes[TARGET], seeds=seeds, store=store, tag=tag, progress=progress
    )
    more = sums.dims[2:]
    variables: dict[str, Any] = {
        "effect": ((name, TARGET), "output of all samples minus output without the group"),
        "effect_error": ((name, TARGET), "standard error of effect by the seeds"),
        **described_lds(more),
        "scale": (more, "by which sums are nearest to effects, by least squares"),
    }
    if bounds:
        variables["coverage"] = (TARGET,), "share of groups with their effect in the bounds"
        variables["coverage_mean"] = (), "mean of coverage over targets"
    result = lazy_results(
        _compared, lazy_data(sums), bounds, has_units, outputs, options,
        of=sums, variables=variables, labels={name: sums[name].values}, sizes={"draw": resamples},
    )  # fmt: skip
    result = result.assign_attrs(options)
    return result if store is None else result.compute()


def _compared(
    sums: np.ndarray,
    bounds: list[np.ndarray],
    has_units: bool,
    outputs: np.ndarray,
    options: dict[str, Any],
) -> dict[str, np.ndarray]:
    """Compute all results of sums (group, target, ...) and outputs (1 + group, seed, target)."""
    mean, n = outputs.mean(axis=1), outputs.shape[1]
    effect = mean[0] - mean[1:]
    with np.errstate(invalid="ignore"):  # one seed has no variance
        variance = ((outputs - mean[:, None]) ** 2).sum(axis=1) / np.float64(n * (n - 1))
    flat = sums.reshape(*sums.shape[:2], -1).astype(np.float64)
    # Least squares through 0: Σ effect · sum / Σ sum².
    products = (np.nansum(x * flat, axis=(0, 1)) for x in (effect[..., None], flat))
    # Without a group with a large sum the output is low.
    results = rank_correlations(-sums, outputs[1:], options)
    results |= {
        "effect": effect,
        # Trainings are independent, so variances add up.
        "effect_error": np.sqrt(variance[0] + variance[1:]),
        "scale": np.divide(*products).reshape(sums.shape[2:]),
    }
    if bounds:
        # Sorted, since a negative scale turns bounds round.
        low, high = np.sort(np.stack(bounds) * (1 if has_units else results["scale"]), axis=0)
        covered = np.where(np.isnan(low), np.nan, (low <= effect) & (effect <= high)).mean(axis=0)
        results |= {"coverage": covered, "coverage_mean": np.nanmean(covered)}
    return results
