"""Remove the samples that scores rank as important, and compare with random removal."""

from __future__ import annotations

from collections.abc import Sequence

import dask.array as da
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from trakdask import arrays
from trakdask.attribution.ranking import top_k
from trakdask.checks import require_integer, require_number
from trakdask.evaluate.results import Scores, as_array, lazy_data, lazy_results, require_fraction
from trakdask.evaluate.retraining import Seeds, Store, TrainFn, train_models
from trakdask.variables import SAMPLE, TARGET


def brittleness(
    train_fn: TrainFn,
    scores: Scores,
    ks: Sequence[int],
    *,
    seeds: Seeds = 1,
    n_random: int = 3,
    random_seed: int = 0,
    threshold: float = 0.0,
    confidence: float = 0.95,
    store: Store | None = None,
    tag: str | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """Remove the k highest-scoring samples of each target, retrain, and count flipped predictions.

    Parameters
    ----------
    train_fn
        As in :func:`retrain`: (positions, seed) -> outputs of all targets of ``scores``.
    scores
        Scores (sample, target), with any further dimensions, or a mapping from names to scores, as
        in :func:`lds`: models are trained for every entry along these, and compared with the same
        random removals.
    ks
        Numbers of samples to remove.
    seeds
        Models per removal, whose outputs are averaged.
    n_random
        Random removals of each size, for comparison; each serves all targets.
    random_seed
        Seed of the random removals.
    threshold
        Value of the output at which a prediction flips; 0 for the margin log p/(1-p).
    confidence
        Level of the intervals.
    store, tag, progress
        As in :func:`retrain`: with a store the models are trained at once, and stored.

    Returns
    -------
    Dataset, lazy unless there is a store. Further dimensions of ``scores`` follow those of
    ``output``, ``flips``, ``flip_fraction`` and ``interval``:

    - ``output`` (target, k), ``full_output`` (target): trained without the k samples, and with all;
    - ``flips`` (target, k): whether these two are on different sides of the threshold;
    - ``flip_fraction`` (k) with ``interval`` (bound, k); ``random_flip_fraction`` (k) with
      ``random_interval`` (bound, k): Wilson's, of as many trials as there are targets.

    Raises
    ------
    BlockError, StoreMismatchError
        As :func:`retrain`.
    ValueError
        If ks are not between 1 and the number of samples minus 1; when computed, if fewer than k
        scores of a target are not NaN.

    Notes
    -----
    Cost: (targets × ks + n_random × ks + 1) × seeds trainings, and one pass over the scores; the
    first term once for each estimator. Select a few dozen targets, in ``scores`` and in
    ``train_fn``. With a store, models that :func:`retrain` or an evaluation of other scores has
    already trained are not trained again. If a target is misclassified with all samples, removing
    helpful samples cannot flip it, so select targets that are classified correctly.

    References
    ----------
    Ilyas et al. 2022, "Datamodels", section 4.1; Park et al. 2023, section 5.

    Examples
    --------
    A target whose output is the share of its own class among the training samples:

    >>> import numpy as np
    >>> import trakdask as td
    >>> label = np.array([1, 1, 1, -1, -1])
    >>> def train(positions, seed):
    ...     return label[positions].mean(keepdims=True)
    >>> scores = xr.DataArray(label[:, None] / 5, dims=("sample", "target"))
    >>> result = td.evaluate.brittleness(train, scores, [1, 2])
    >>> result.output.values.tolist()
    [[0.0, -0.33]]
    >>> result.flips.values.tolist()
    [[True, True]]
    """
    scores = as_array(scores, SAMPLE, TARGET)
    n, m, *sizes = scores.shape
    more = scores.dims[2:]
    confidence = require_fraction("confidence", confidence)
    threshold = require_number("threshold", threshold, remedy="try threshold=0.0")
    counts = _counts([require_integer("k", k, 1, remedy="try ks=[10]") for k in ks], n)
    masks = _removals(lazy_data(scores), counts, n_random, random_seed, store)
    outputs = train_models(train_fn, masks, m, seeds=seeds, store=store, tag=tag, progress=progress)
    result = lazy_results(
        _flips, outputs, [m, *sizes, len(counts)], n_random, threshold, confidence, of=scores,
        variables={
            "output": ((TARGET, "k", *more), "mean over seeds, without the target's top k samples"),
            "full_output": ((TARGET,), "mean over seeds, trained on all samples"),
            "flips": ((TARGET, "k", *more), "output and full_output are on different sides"),
            "flip_fraction": (("k", *more), "share of targets that flip"),
            "interval": (("bound", "k", *more), "of flip_fraction"),
            "random_flip_fraction": (("k",), "the same, k random samples removed"),
            "random_interval": (("bound", "k"), "of random_flip_fraction"),
        },
        labels={"k": counts},
    )  # fmt: skip
    result = result.assign(flips=result.flips.astype(bool))
    return result if store is None else result.compute()


def removal_curve(
    train_fn: TrainFn,
    scores: Scores,
    fractions: Sequence[float],
    *,
    helpful: bool = True,
    seeds: Seeds = 1,
    n_random: int = 3,
    random_seed: int = 0,
    confidence: float = 0.95,
    store: Store | None = None,
    tag: str | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """Remove the most helpful samples, retrain, and measure how much the outputs decrease.

    Parameters
    ----------
    train_fn
        As in :func:`retrain`: (positions, seed) -> outputs of all targets.
    scores
        As in :func:`brittleness`; one ranking of the samples for each entry along the further
        dimensions, by the mean over all targets.
    fractions
        Shares of the samples to remove, between 0 and 1.
    helpful
        ``False`` removes the most harmful samples first, so that outputs should increase.
    seeds, n_random, random_seed
        As in :func:`brittleness`.
    confidence
        Level of the intervals.
    store, tag, progress
        As in :func:`retrain`: with a store the models are trained at once, and stored.

    Returns
    -------
    Dataset, lazy unless there is a store. Further dimensions of ``scores`` follow those of
    ``output``, ``mean_output`` and ``interval``:

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
        If fractions are not between 0 and 1; when computed, if too many scores are NaN.

    Notes
    -----
    Cost: (fractions × (estimators + n_random) + 1) × seeds trainings, and one pass over the scores.
    :func:`trakdask.plots.removal_curve` draws it.

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
    scores = as_array(scores, SAMPLE, TARGET)
    n, m, *sizes = scores.shape
    more = scores.dims[2:]
    confidence = require_fraction("confidence", confidence)
    shares = [require_fraction("every fraction", share) for share in fractions]
    counts = _counts([round(share * n) for share in shares], n)
    mean = lazy_data(scores.mean(TARGET))
    masks = _removals(mean, counts, n_random, random_seed, store, largest=helpful)
    outputs = train_models(train_fn, masks, m, seeds=seeds, store=store, tag=tag, progress=progress)
    result = lazy_results(
        _curve, outputs, [*sizes, len(counts)], n_random, confidence, of=scores,
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


def _counts(counts: list[int], n: int) -> list[int]:
    if not counts or min(counts) < 1 or max(counts) >= n:
        raise ValueError(
            f"expected to remove 1 to {n - 1} samples, so that some of the {n} samples are left, "
            f"got the numbers {counts}; try {min(10, n - 1)}"
        )
    return counts


def _require_ranked(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Reject rankings that NaN scores leave incomplete, so that fewer than k would be removed."""
    n_ranked = (positions >= 0).sum(axis=1)
    if len(n_ranked) and n_ranked.min() < (k := positions.shape[1]):
        raise ValueError(
            f"expected at least {k} scores that are not NaN for every target, got "
            f"{n_ranked.min()} for the target at position {n_ranked.argmin()} of its block; try "
            "fewer samples to remove, or scores without failed targets"
        )
    return positions


def _removals(
    scores: da.Array,
    counts: list[int],
    n_random: int,
    random_seed: int,
    store: Store | None,
    *,
    largest: bool = True,
) -> da.Array:
    """Return masks (1 + rankings × counts + n_random × counts, sample) of scores (sample, ...).

    First that of all samples, then those without the first of each ranking, then those without
    random samples.
    """
    n, most = len(scores), max(counts)
    n_random = require_integer("n_random", n_random, 1, remedy="try n_random=3")
    columns = xr.DataArray(scores.reshape(n, -1), dims=(SAMPLE, TARGET))
    ranked = top_k(columns, most, largest=largest).position.data
    ranked = da.map_blocks(_require_ranked, ranked, dtype=np.int64, meta=np.empty((0, 0), np.int64))
    if store is not None:  # all masks are then made twice, from scores that are computed once
        ranked = da.from_array(ranked.compute())
    # Each draw depends on (seed, its index), not on the counts.
    orders = (np.random.default_rng([random_seed, draw]).permutation(n) for draw in range(n_random))
    random = da.from_array(np.stack([order[:most] for order in orders]))
    masks = [arrays.subsets.without_first(order, counts, n) for order in (ranked, random)]
    all_masks: da.Array = da.concatenate([da.ones((1, n), dtype=bool), *masks])
    return all_masks


def _split(outputs: np.ndarray, shape: list[int], n_random: int) -> tuple[np.ndarray, ...]:
    """Return means over seeds: of all samples (target,), and of ranked and of random removals.

    The latter two are (*shape, target) and (draw, count, target), where a shape ends with counts.
    """
    means, n_counts = outputs.mean(axis=1), shape[-1]
    ranked, random = means[1 : -n_random * n_counts], means[-n_random * n_counts :]
    return means[0], ranked.reshape(*shape, -1), random.reshape(-1, n_counts, means.shape[1])


def _targets_first(values: np.ndarray) -> np.ndarray:
    """Return (..., count, target) as (target, count, ...)."""
    return np.moveaxis(values, (-1, -2), (0, 1))


def _flips(
    outputs: np.ndarray, shape: list[int], n_random: int, threshold: float, confidence: float
) -> dict[str, np.ndarray]:
    full, ranked, random = _split(outputs, shape, n_random)
    output, is_above = np.diagonal(ranked, axis1=0, axis2=-1), full > threshold
    flips = _targets_first((output > threshold) != is_above).astype(np.float64)
    random_flips = ((random > threshold) != is_above).mean(axis=(0, 2))
    results = {"output": _targets_first(output), "full_output": full, "flips": flips}
    for prefix, fraction in (("", flips.mean(axis=0)), ("random_", random_flips)):
        results[f"{prefix}flip_fraction"] = fraction
        interval = arrays.evaluation.proportion_interval(fraction, len(full), confidence)
        results[f"{prefix}interval"] = interval
    return results


def _curve(
    outputs: np.ndarray, shape: list[int], n_random: int, confidence: float
) -> dict[str, np.ndarray]:
    full, ranked, random = _split(outputs, shape, n_random)
    results = {"full_output": full, "mean_full_output": full.mean()}
    for prefix, values in (("", ranked), ("random_", random.mean(axis=0))):
        output = results[f"{prefix}output"] = _targets_first(values)
        results[f"mean_{prefix}output"] = output.mean(axis=0)
        interval = arrays.evaluation.mean_interval(np.moveaxis(output, 0, -1), confidence)
        results[f"{prefix}interval"] = interval
    return results
