"""Removing what the scores call important, against removing as much at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from trakdask import arrays
from trakdask.evaluate.labels import (
    BOUND,
    BOUNDS,
    coords_along,
    lazy_results,
    require_dims,
    require_fraction,
    require_positive,
)
from trakdask.evaluate.retraining import Seeds, Store, TrainFn, train_models
from trakdask.queries import top_k
from trakdask.variables import SAMPLE, TARGET

__all__ = ["brittleness", "removal_curve"]

K = "k"
FRACTION = "fraction"


def brittleness(
    train_fn: TrainFn,
    scores: xr.DataArray,
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
    """Remove the k highest-scoring samples of each target, retrain, and see what flips.

    Parameters
    ----------
    train_fn
        As in :func:`retrain`: (positions, seed) -> outputs of all targets of ``scores``.
    scores
        Scores (sample, target).
    ks
        How many samples to remove.
    seeds
        Models per removal, whose outputs are averaged.
    n_random
        Random removals of each size, to compare with; each serves all targets.
    random_seed
        Of the random removals.
    threshold
        A prediction is one thing above it and another below; 0 for the margin log p/(1-p).
    confidence
        Of the intervals.
    store, tag, progress
        As in :func:`retrain`: with a store the models are trained now, and kept.

    Returns
    -------
    Dataset, lazy unless there is a store:

    - ``output`` (target, k), ``full_output`` (target): without the k samples, and with all;
    - ``flips`` (target, k): whether they are on different sides of the threshold;
    - ``flip_fraction`` (k) with ``interval`` (bound, k); ``random_flip_fraction`` (k) with
      ``random_interval`` (bound, k): Wilson's, of as many trials as there are targets.

    Raises
    ------
    BlockError, StoreMismatchError
        As :func:`retrain`.
    ValueError
        If scores have other dimensions or ks are not between 1 and the number of samples less 1.

    Notes
    -----
    Cost: (targets × ks + n_random × ks + 1) × seeds trainings, and one pass over the scores. Select
    some dozens of targets, in ``scores`` and in ``train_fn``. With a store, what :func:`retrain` or
    another score has trained already is not trained again. A target that is on the wrong side with
    all samples is not brought over by removing what helps it: select targets that are right.

    References
    ----------
    Ilyas et al. 2022, "Datamodels", section 4.1; Park et al. 2023, section 5.

    Examples
    --------
    A target whose output is the share of its own class among what is trained on:

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
    scores = require_dims(scores, (SAMPLE, TARGET), name="scores", remedy=_SCORES)
    n, m = scores.sizes[SAMPLE], scores.sizes[TARGET]
    require_fraction(confidence, name="confidence", example="confidence=0.95")
    counts = _counts(ks, n)
    ranked = top_k(scores, max(counts)).position.data
    names = [f"all but the top {k} of target {t}" for t in range(m) for k in counts]
    models = _Models(train_fn, n, m, seeds, store, tag, progress)
    outputs = models.outputs(ranked, names, counts, n_random, random_seed)
    shape = m, len(counts)
    result = lazy_results(
        _flips, outputs, len(counts), n_random, threshold, confidence,
        variables={
            "output": ((TARGET, K), shape, "mean over seeds, without the target's top k samples"),
            "full_output": ((TARGET,), (m,), "mean over seeds, of all samples"),
            "flips": ((TARGET, K), shape, "output and full_output differ in side"),
            "flip_fraction": ((K,), shape[1:], "share of targets that flip"),
            "interval": ((BOUND, K), (2, shape[1]), "of flip_fraction"),
            "random_flip_fraction": ((K,), shape[1:], "the same, k random samples removed"),
            "random_interval": ((BOUND, K), (2, shape[1]), "of random_flip_fraction"),
        },
        dtypes={"flips": bool},
    )  # fmt: skip
    coords = {**coords_along(scores, TARGET), K: counts, BOUND: BOUNDS}
    return models.finished(result.assign_coords(coords))


def removal_curve(
    train_fn: TrainFn,
    scores: xr.DataArray,
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
    """Remove the most helpful share of the samples, retrain, and see how far outputs fall.

    Parameters
    ----------
    train_fn
        As in :func:`retrain`: (positions, seed) -> outputs of all targets.
    scores
        Scores (sample, target): one ranking of the samples, by the mean over all targets.
    fractions
        Shares of the samples to remove, between 0 and 1.
    helpful
        ``False`` removes the most harmful first: the output should rise.
    seeds, n_random, random_seed
        As in :func:`brittleness`.
    confidence
        Of the intervals.
    store, tag, progress
        As in :func:`retrain`: with a store the models are trained now, and kept.

    Returns
    -------
    Dataset, lazy unless there is a store:

    - ``output`` (target, fraction), ``random_output`` (target, fraction), ``full_output``
      (target): means over seeds;
    - ``mean_output`` (fraction) with ``interval`` (bound, fraction), the same with ``random_``
      before, and ``mean_full_output``: means over targets. Intervals are Student's over targets,
      given the trained models.

    Raises
    ------
    BlockError, StoreMismatchError
        As :func:`retrain`.
    ValueError
        If scores have other dimensions, or fractions are not between 0 and 1.

    Notes
    -----
    Cost: (fractions × (1 + n_random) + 1) × seeds trainings, and one pass over the scores.
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
    scores = require_dims(scores, (SAMPLE, TARGET), name="scores", remedy=_SCORES)
    n, m = scores.sizes[SAMPLE], scores.sizes[TARGET]
    require_fraction(confidence, name="confidence", example="confidence=0.95")
    example = "fractions=[0.1, 0.2, 0.5]"
    shares = [require_fraction(f, name="a fraction", example=example) for f in fractions]
    counts = _counts([round(share * n) for share in shares], n)
    mean = scores.mean(TARGET).expand_dims(TARGET, axis=1)
    ranked = top_k(mean, max(counts), largest=helpful).position.data
    kind = "helpful" if helpful else "harmful"
    models = _Models(train_fn, n, m, seeds, store, tag, progress)
    names = [f"all but the {k} most {kind}" for k in counts]
    outputs = models.outputs(ranked, names, counts, n_random, random_seed)
    result = lazy_results(
        _curve, outputs, len(counts), n_random, confidence,
        variables=_curve_variables(m, len(counts), kind),
    )  # fmt: skip
    coords = {**coords_along(scores, TARGET), FRACTION: shares, BOUND: BOUNDS}
    return models.finished(result.assign_coords(coords))


_SCORES = "Pass what td.score returns; average an ensemble with scores.mean('checkpoint')."


def _curve_variables(m: int, n_counts: int, kind: str) -> dict[str, Any]:
    removals = ("", f"the most {kind} samples removed"), ("random_", "random samples removed")
    found: dict[str, Any] = {
        "full_output": ((TARGET,), (m,), "mean over seeds, of all samples"),
        "mean_full_output": ((), (), "mean of full_output over targets"),
    }
    for prefix, what in removals:
        found[f"{prefix}output"] = (TARGET, FRACTION), (m, n_counts), f"mean over seeds, {what}"
        found[f"mean_{prefix}output"] = (FRACTION,), (n_counts,), f"mean over targets, {what}"
        found[f"{prefix}interval"] = (BOUND, FRACTION), (2, n_counts), f"of mean_{prefix}output"
    return found


def _counts(ks: Sequence[int], n: int) -> list[int]:
    counts = [require_positive(k, name="a number of samples to remove", example="10") for k in ks]
    if not counts or max(counts) >= n:
        raise ValueError(
            f"{counts} samples are to be removed; needed numbers from 1 to {n - 1}, so that some "
            f"of the {n} samples are left. Type fewer."
        )
    return counts


@dataclass(frozen=True)
class _Models:
    """How the models of one experiment are trained."""

    train_fn: TrainFn
    n: int
    n_targets: int
    seeds: Seeds
    store: Store | None
    tag: str | None
    progress: bool

    def outputs(
        self,
        ranked: da.Array,
        names: list[str],
        counts: list[int],
        n_random: int,
        random_seed: int,
    ) -> da.Array | np.ndarray:
        """Return outputs (1 + rankings × counts + n_random × counts, seed, target).

        Models of all samples, without the first of each ranking, without random samples.
        """
        require_positive(n_random, name="n_random", example="n_random=3")
        if self.store is not None:
            ranked = da.from_array(ranked.compute())  # the scores are formed once
        random = _random_order(self.n, max(counts), n_random, random_seed)
        masks = [
            da.ones((1, self.n), dtype=bool),
            arrays.subsets.without_first(ranked, counts, self.n),
            arrays.subsets.without_first(da.from_array(random), counts, self.n),
        ]
        draws = [f"all but {k} random ones, draw {i}" for i in range(n_random) for k in counts]
        return train_models(
            self.train_fn, da.concatenate(masks), ["all samples", *names, *draws],
            self.n_targets, seeds=self.seeds, store=self.store, tag=self.tag,
            progress=self.progress,
        )  # fmt: skip

    def finished(self, result: xr.Dataset) -> xr.Dataset:
        """Return the lazy result; in memory if its models are."""
        return result if self.store is None else result.compute()


def _random_order(n: int, k: int, n_random: int, seed: int) -> NDArray[np.int64]:
    """Positions (draw, rank); a draw is a function of (seed, its index), a smaller k its prefix."""
    return np.stack([np.random.default_rng([seed, i]).permutation(n)[:k] for i in range(n_random)])


def _split(outputs: np.ndarray, n_counts: int, n_random: int) -> tuple[np.ndarray, ...]:
    """Means over seeds: all samples (target,), ranked and random removals (..., count, target)."""
    means = outputs.mean(axis=1)
    parts = means[1 : -n_random * n_counts], means[-n_random * n_counts :]
    return means[0], *(part.reshape(-1, n_counts, means.shape[1]) for part in parts)


def _flips(
    outputs: np.ndarray, n_counts: int, n_random: int, threshold: float, confidence: float
) -> dict[str, np.ndarray]:
    full, ranked, random = _split(outputs, n_counts, n_random)
    own = np.arange(len(full))
    output = ranked[own, :, own]
    side = full > threshold
    flips = (output > threshold) != side[:, None]
    fractions = flips.mean(axis=0), ((random > threshold) != side).mean(axis=(0, 2))
    interval, random_interval = (
        arrays.intervals.proportion_interval(fraction, len(full), confidence)
        for fraction in fractions
    )
    return {
        "output": output,
        "full_output": full,
        "flips": flips,
        "flip_fraction": fractions[0],
        "interval": interval,
        "random_flip_fraction": fractions[1],
        "random_interval": random_interval,
    }


def _curve(
    outputs: np.ndarray, n_counts: int, n_random: int, confidence: float
) -> dict[str, np.ndarray]:
    full, (ranked,), random = _split(outputs, n_counts, n_random)
    found = {"full_output": full, "mean_full_output": full.mean()}
    for prefix, values in (("", ranked), ("random_", random.mean(axis=0))):
        found[f"{prefix}output"] = values.T
        found[f"mean_{prefix}output"] = values.mean(axis=1)
        found[f"{prefix}interval"] = arrays.intervals.mean_interval(values, confidence)
    return found
