"""How far rankings of independently trained models agree, and those of random models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.evaluate.labels import (
    BOUND,
    lazy_data,
    lazy_results,
    require_bootstrap,
    require_some,
)
from trakdask.variables import CHECKPOINT, SAMPLE, TARGET, coords_along

N_MODELS = "n_models"
_NEEDED = "that differ between samples and are not NaN"


def randomization_check(
    scores: xr.DataArray,
    randomized: xr.DataArray,
    *,
    resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> xr.Dataset:
    """Correlate scores of the trained model with those of a model whose weights are random.

    Parameters
    ----------
    scores
        Scores (sample, target) of the trained model.
    randomized
        Scores of the same samples and targets from features of a model that was not trained,
        ``td.Model(build, [build().state_dict()])``: (sample, target), or with one further
        dimension, such as several random models.
    resamples, seed, confidence
        Of the bootstrap over targets that makes the interval.

    Returns
    -------
    Lazy Dataset of float64 variables, which keep the further dimension of ``randomized``:

    - ``correlation`` (target): Spearman's, over samples;
    - ``correlation_mean`` with ``interval`` (bound): over targets.

    Raises
    ------
    ValueError
        If samples or targets do not agree, or an option is out of range; when computed, if the
        correlation is undefined for every target.

    Notes
    -----
    Scores that explain what the model has learnt must change when it forgets: the correlation
    should be near 0. A high one says that the scores depend on the inputs or labels alone. That is
    so by construction in linear models, whose gradients are their inputs, and to some extent in any
    network, as similar inputs have similar gradients. What labels add can be taken out:
    ``scores.where(scores.label == scores.target_label)`` ranks samples of the same class only.

    A sample with a NaN in one of the arrays is left out for that target. Cost: one pass over each
    array and a sort per target and model. Memory: all scores of one chunk of targets at a time.

    References
    ----------
    Adebayo et al. 2018, "Sanity checks for saliency maps"; Hanawa et al. 2021, the model
    randomization test for similarities.

    Examples
    --------
    >>> import trakdask as td
    >>> scores = xr.DataArray([[1.0], [2.0], [3.0]], dims=("sample", "target"))
    >>> result = td.evaluate.randomization_check(scores, -scores)
    >>> float(result.correlation_mean)
    -1.0
    """
    scores, randomized = scores.transpose(SAMPLE, TARGET), randomized.transpose(SAMPLE, TARGET, ...)
    more = randomized.dims[2:]
    xr.align(scores, randomized, join="exact", copy=False, exclude=more)
    stacked = lazy_data(randomized) if more else lazy_data(randomized)[:, :, None]
    both = da.concatenate([lazy_data(scores)[:, :, None], stacked], axis=2)
    options = require_bootstrap(resamples, seed, confidence)
    sizes = tuple(randomized.sizes[dim] for dim in more)
    result = lazy_results(
        _randomized, arrays.detection.rank_correlations(both), sizes, options, of=randomized,
        variables={
            "correlation": ((TARGET, *more), "Spearman, trained and random model"),
            "correlation_mean": (more, "mean of correlation over targets"),
            "interval": ((BOUND, *more), "of correlation_mean"),
        },
    )  # fmt: skip
    return result.assign_coords(coords_along(scores, TARGET))


def seed_agreement(
    scores: xr.DataArray,
    dim: str = CHECKPOINT,
    *,
    n_models: Sequence[int] = (1, 2, 3, 5, 10, 20),
    resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> xr.Dataset:
    """Correlate scores of independently trained models, and tell how many models are enough.

    Parameters
    ----------
    scores
        Scores (sample, target, checkpoint), as from ``td.score(..., average=False)``, or of several
        runs along a dimension of another name.
    dim
        Name of the dimension along which models differ; at least two.
    n_models
        Numbers of models whose mean score would be used.
    resamples, seed, confidence
        Of the bootstrap over targets that makes the intervals.

    Returns
    -------
    Lazy Dataset of float64 variables:

    - ``agreement`` (target): mean over pairs of models of Spearman's correlation over samples;
    - ``agreement_mean`` with ``interval`` (bound): over targets;
    - ``reliability`` (n_models) with ``reliability_interval`` (bound, n_models): the correlation
      to be expected between the mean score of so many models and that of as many other ones;
    - ``pairs`` (model, model_1): the mean over targets for every pair, in which one odd model
      shows. The dimensions are ``dim`` and ``dim`` + ``_1``.

    Raises
    ------
    ValueError
        If the dimensions are others, there are fewer than two models, or an option is out of
        range; when computed, if the agreement is undefined for every target.

    Notes
    -----
    The reliability follows from ``agreement_mean`` by the Spearman-Brown formula k r / (1 +
    (k - 1) r), which assumes that models differ by independent noise of equal size. Checkpoints of
    one run are not independent: they agree more than models of other seeds do. Agreement is not
    truth: scores that only look at the labels agree perfectly.

    NaN, cost and memory as :func:`randomization_check`.

    References
    ----------
    Spearman 1910; Brown 1910. Park et al. 2023, section 3: scores of several models are averaged
    because training is random.

    Examples
    --------
    >>> import trakdask as td
    >>> scores = xr.DataArray(
    ...     [[[1.0, 1.0]], [[2.0, 3.0]], [[3.0, 2.0]]], dims=("sample", "target", "checkpoint")
    ... )
    >>> result = td.evaluate.seed_agreement(scores, n_models=[1, 2])
    >>> result.reliability.values.round(3).tolist()
    [0.5, 0.667]
    """
    scores = scores.transpose(SAMPLE, TARGET, dim)
    if scores.sizes[dim] < 2:
        raise ValueError(
            f"expected at least 2 models along {dim!r}, got {scores.sizes[dim]}; try "
            "td.score(features, targets, average=False)"
        )
    counts = list(n_models)
    options = require_bootstrap(resamples, seed, confidence)
    result = lazy_results(
        _agreed, arrays.detection.rank_correlations(lazy_data(scores)), counts, options, of=scores,
        variables={
            "agreement": ((TARGET,), "mean Spearman over pairs of models"),
            "agreement_mean": ((), "mean of agreement over targets"),
            "interval": ((BOUND,), "of agreement_mean"),
            "reliability": ((N_MODELS,), "correlation of the mean of so many models"),
            "reliability_interval": ((BOUND, N_MODELS), "of reliability"),
            "pairs": ((dim, f"{dim}_1"), "Spearman of two models, mean over targets"),
        },
        labels={N_MODELS: counts}, sizes={f"{dim}_1": scores.sizes[dim]},
    )  # fmt: skip
    others = {f"{n}_1": (f"{dim}_1", c.values) for n, c in coords_along(scores, dim).items()}
    return result.assign_coords(others)


def _randomized(
    correlations: np.ndarray, sizes: tuple[int, ...], options: dict[str, Any]
) -> dict[str, np.ndarray]:
    own = correlations[:, 0, 1:].reshape(-1, *sizes)
    require_some(own, _NEEDED)
    mean, interval = arrays.intervals.bootstrap_mean(own, **options)
    return {"correlation": own, "correlation_mean": mean, "interval": interval}


def _agreed(
    correlations: np.ndarray, counts: list[int], options: dict[str, Any]
) -> dict[str, np.ndarray]:
    agreement = arrays.detection.mean_of_pairs(correlations)
    require_some(agreement, _NEEDED)
    mean, interval = arrays.intervals.bootstrap_mean(agreement, **options)
    pairs = np.moveaxis(correlations, 0, -1)
    reliability = arrays.ranks.reliability
    return {
        "agreement": agreement,
        "agreement_mean": mean,
        "interval": interval,
        "reliability": reliability(mean, np.array(counts)),
        "reliability_interval": reliability(interval[:, None], np.array(counts)),
        "pairs": arrays.ranks.mean_of_known(pairs),
    }
