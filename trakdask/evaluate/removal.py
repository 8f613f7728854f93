"""Remove the samples that scores rank as important, and compare with random removal."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import dask
import dask.array as da
import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from trakdask import arrays
from trakdask.checks import require_flags, require_integer
from trakdask.evaluate.results import (
    as_array,
    lazy_data,
    lazy_results,
    require_fraction,
    require_fractions,
)
from trakdask.evaluate.retraining import train_models
from trakdask.variables import SAMPLE, TARGET


def removal_curve(
    train_fn: Callable[[NDArray[np.int64], int], ArrayLike],
    scores: xr.DataArray | Mapping[str, xr.DataArray],
    fractions: Sequence[float],
    *,
    helpful: bool = True,
    seeds: int | Sequence[int] = 1,
    n_random: int = 3,
    random_seed: int = 0,
    confidence: float = 0.95,
    store: str | os.PathLike[str] | None = None,
    tag: str | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """Remove the most helpful samples, retrain, and measure how much the outputs decrease.

    Parameters
    ----------
    train_fn
        As in :func:`retrain`: (positions, seed) -> outputs of all targets.
    scores
        Scores (sample, target), with any further dimensions, or a mapping from names to scores, as
        in :func:`lds`. Each entry along the further dimensions is one ranking of the samples, by
        their mean score over all targets. Samples whose mean is NaN are removed last.
    fractions
        Shares of the samples to remove, between 0 and 1.
    helpful
        ``False`` removes the most harmful samples first, so that outputs should increase.
    seeds
        Models per removal, whose outputs are averaged.
    n_random
        Random removals of each size, with which all rankings are compared.
    random_seed
        Seed of the random removals.
    confidence
        Level of the intervals.
    store, tag, progress
        As in :func:`retrain`: with a store the models are trained at once, and stored.

    Returns
    -------
    Dataset, lazy unless there is a store. ``output``, ``mean_output`` and ``interval`` also have
    the further dimensions of ``scores``, as their last ones:

    - ``output`` (target, fraction), ``random_output`` (target, fraction), ``full_output``
      (target): means over seeds;
    - ``mean_output`` (fraction) with ``interval`` (bound, fraction), ``mean_random_output`` with
      ``random_interval``, and ``mean_full_output``: means over targets. Intervals are Student's
      over targets, given the trained models.

    Raises
    ------
    BlockError, StoreMismatchError
        As :func:`retrain`.
    ValueError
        If fractions are not between 0 and 1; when computed, if all scores of a ranking are NaN.

    Notes
    -----
    Cost: (fractions × (estimators + n_random) + 1) × seeds trainings, and one pass over the scores.
    With a store, models that :func:`retrain` or an evaluation of other scores has already trained
    are not trained again.

    References
    ----------
    Ilyas et al. 2022, "Datamodels", section 4.1; Park et al. 2023, section 5.

    Examples
    --------
    >>> import numpy as np
    >>> import trakdask as td
    >>> effect = np.array([4.0, 3.0, 2.0, 1.0])
    >>> def train(positions, seed):
    ...     return effect[positions].sum(keepdims=True)
    >>> scores = xr.DataArray(effect[:, None], dims=("sample", "target"))
    >>> curve = td.evaluate.removal_curve(train, scores, [0.25, 0.5])
    >>> curve.mean_output.values.tolist()
    [6.0, 3.0]
    """
    require_flags(helpful=helpful)
    scores = as_array(scores, SAMPLE, TARGET)
    n, m, *sizes = scores.shape
    more = scores.dims[2:]
    confidence = require_fraction("confidence", confidence)
    n_random = require_integer("n_random", n_random, 1, remedy="try n_random=3")
    shares = require_fractions(fractions)
    counts = [round(share * n) for share in shares]
    if not counts or min(counts) < 1 or max(counts) >= n:
        raise ValueError(
            f"expected to remove 1 to {n - 1} of the {n} samples, got the numbers {counts}; try "
            "other fractions"
        )
    # In ascending order the helpful come first, or the harmful, and NaN last in either case.
    mean = lazy_data(scores.mean(TARGET) * (-1 if helpful else 1))
    if store is not None:  # its masks are made twice, but from scores that are computed once
        mean = mean.compute()
    masks = da.from_delayed(
        dask.delayed(_removals, pure=True)(mean, counts, n_random, random_seed),
        (1 + (int(np.prod(sizes)) + n_random) * len(counts), n), bool,
    )  # fmt: skip
    outputs = train_models(train_fn, masks, m, seeds=seeds, store=store, tag=tag, progress=progress)
    result = lazy_results(
        _curve, outputs, sizes, len(counts), n_random, confidence, of=scores,
        variables={
            "full_output": ((TARGET,), "mean over seeds, trained on all samples"),
            "mean_full_output": ((), "mean of full_output over targets"),
            "output": ((TARGET, "fraction", *more), "mean over seeds, first samples removed"),
            "mean_output": (("fraction", *more), "mean of output over targets"),
            "interval": (("bound", "fraction", *more), "of mean_output"),
            "random_output": ((TARGET, "fraction"), "mean over seeds, random samples removed"),
            "mean_random_output": (("fraction",), "mean of random_output over targets"),
            "random_interval": (("bound", "fraction"), "of mean_random_output"),
        },
        labels={"fraction": shares},
    )  # fmt: skip
    return result if store is None else result.compute()


def _removals(values: np.ndarray, counts: list[int], n_random: int, random_seed: int) -> np.ndarray:
    """Return masks (1 + (rankings + n_random) × counts, sample) of values (sample, ranking, ...).

    The first mask has all samples. Then come the masks without the lowest values of each ranking,
    then the masks without random samples.
    """
    n = len(values)
    columns = values.reshape(n, -1)
    if np.isnan(columns).all(axis=0).any():
        raise ValueError("expected scores to rank samples by, got only NaN; try other targets")
    # Each random order depends on (seed, its index), not on the counts.
    random = [np.random.default_rng([random_seed, draw]).permutation(n) for draw in range(n_random)]
    orders = [*np.argsort(columns, axis=0, kind="stable").T, *random]
    masks = np.ones((len(orders), len(counts), n), bool)
    for of_order, order in zip(masks, orders, strict=True):
        for mask, k in zip(of_order, counts, strict=True):
            mask[order[:k]] = False
    return np.concatenate([np.ones((1, n), bool), masks.reshape(-1, n)])


def _curve(
    outputs: np.ndarray, sizes: list[int], n_counts: int, n_random: int, confidence: float
) -> dict[str, np.ndarray]:
    """Compute all results of the outputs (mask, seed, target) of the models of all removals."""
    full, *removed = outputs.mean(axis=1)
    removals = np.stack(removed).reshape(-1, n_counts, len(full))
    # In the order of _removals: rankings, then random orders, each with all counts.
    ranked = removals[:-n_random].reshape(*sizes, n_counts, -1)
    random = removals[-n_random:].mean(axis=0)
    results = {"full_output": full, "mean_full_output": full.mean()}
    for prefix, values in (("", ranked), ("random_", random)):
        output = np.moveaxis(values, (-1, -2), (0, 1))  # (target, count, ...)
        results[f"{prefix}output"] = output
        results[f"mean_{prefix}output"] = output.mean(axis=0)
        interval = arrays.evaluation.mean_interval(np.moveaxis(output, 0, -1), confidence)
        results[f"{prefix}interval"] = interval
    return results
