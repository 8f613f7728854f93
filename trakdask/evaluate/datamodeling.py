"""The linear datamodeling score: how well sums of scores rank models of random subsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.evaluate.labels import (
    BOUND,
    DRAW,
    SEED,
    SUBSET,
    checked_masks,
    lazy_data,
    lazy_results,
    require_bootstrap,
)
from trakdask.variables import SAMPLE, TARGET


def lds(
    scores: xr.DataArray,
    masks: xr.DataArray,
    outputs: xr.DataArray,
    *,
    resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> xr.Dataset:
    """Correlate what scores predict for subsets with the outputs of models trained on them.

    For each target the Spearman correlation, over subsets S, of Σ_{z in S} τ(z, t) with the mean
    output of the models of S.

    Parameters
    ----------
    scores
        Scores (sample, target) of :func:`trakdask.score`, with any further dimensions, such as an
        estimator or a checkpoint. Every entry along these is evaluated, on the same resamples.
    masks
        Samples that the models were trained on, bool (subset, sample), as from :func:`subsets`. At
        least two subsets.
    outputs
        Outputs of these models, (subset[, seed], target), as from :func:`retrain`.
    resamples
        Number of bootstrap samples.
    seed
        Seed of the bootstrap.
    confidence
        Level of the intervals.

    Returns
    -------
    Lazy Dataset of float64 variables. Further dimensions of ``scores`` follow those named here:

    - ``lds`` (target), and ``lds_mean``, its mean over targets with ``interval`` (bound);
    - ``ceiling`` (target): the correlation that a perfect prediction of the expected output would
      have, by the Spearman-Brown formula from the seeds, NaN with a single seed; ``ceiling_mean``
      and ``ceiling_interval`` (bound);
    - ``draws`` (draw): ``lds_mean`` of each resample, minus the bias. Draws of one call are paired,
      so the interval of a difference is that of the difference of draws::

          (result.draws.sel(estimator="soft") - result.draws.sel(estimator="trak")).quantile(
              [0.025, 0.975], "draw"
          )

    Raises
    ------
    ValueError
        If samples, subsets or targets do not agree, masks are not bool, or an option is out of
        range; when computed, if the correlation is undefined for every target.

    Notes
    -----
    Equal values share their mean rank. A target with a NaN among its scores or outputs, or with
    constant predictions or outputs, has the correlation NaN and is left out of the means.

    Cost: one pass over the scores, tile by tile; then predictions (subset, target) in memory on one
    worker. Exactness: float64 sums; a different chunking can change their last bits.

    The intervals account for the choice of subsets and of targets: they are percentiles of a
    bootstrap over subsets, corrected for its bias, with a Student draw for how targets differ
    beyond their noise. ``tests/evaluate/test_datamodeling.py`` measures their coverage: with about
    20 targets they are too narrow, most of all that of the ceiling. They do not account for the
    choice of checkpoints or projections. ``lds`` and ``ceiling`` are plain estimates, which are
    biased towards 0 if there are few subsets; ``ceiling_mean`` is corrected for the bias that the
    bootstrap shows.

    References
    ----------
    Ilyas et al. 2022, "Datamodels"; Park et al. 2023, section 4; Owen 2007, "The pigeonhole
    bootstrap".

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=40, proj_dim=8)
    >>> scores = td.score(features, features.isel(sample=slice(5)))
    >>> masks = td.evaluate.subsets(features, 30)
    >>> outputs = xr.dot(masks, scores, dim="sample")  # as if models were linear
    >>> result = td.evaluate.lds(scores, masks, outputs, resamples=20)
    >>> float(result.lds_mean)
    1.0
    """
    scores, masks = scores.transpose(SAMPLE, TARGET, ...), checked_masks(masks)
    if SEED not in outputs.dims:
        outputs = outputs.expand_dims(SEED)
    outputs = outputs.transpose(SUBSET, SEED, TARGET)
    more = scores.dims[2:]
    xr.align(scores, masks, outputs, join="exact", copy=False, exclude={SEED, *more})
    options = require_bootstrap(resamples, seed, confidence)
    prediction = arrays.subsets.subset_sums(lazy_data(masks), lazy_data(scores))
    result = lazy_results(
        _evaluate, prediction, lazy_data(outputs), options, of=scores,
        variables={
            "lds": ((TARGET, *more), "Spearman of predicted and retrained outputs"),
            "lds_mean": (more, "mean of lds over targets"),
            "interval": ((BOUND, *more), "of lds_mean"),
            "ceiling": ((TARGET,), "Spearman of a perfect prediction, given the noise of seeds"),
            "ceiling_mean": ((), "mean of ceiling over targets, minus the bias"),
            "ceiling_interval": ((BOUND,), "of ceiling_mean"),
            "draws": ((DRAW, *more), "lds_mean of each bootstrap sample, minus the bias"),
        },
        sizes={DRAW: resamples},
    )  # fmt: skip
    return result.assign_attrs(options)


def _evaluate(
    prediction: np.ndarray, outputs: np.ndarray, options: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Compute all results of predictions (subset, target, ...), outputs (subset, seed, target)."""
    more = prediction.shape[2:]
    flat = prediction.reshape(*prediction.shape[:2], -1)
    predicted = [arrays.ranks.Ranking.of(flat[:, :, i]) for i in range(flat.shape[2])]
    seeds = [arrays.ranks.Ranking.of(outputs[:, k]) for k in range(outputs.shape[1])]
    truth = arrays.ranks.Ranking.of(outputs.mean(axis=1))
    _require_defined(prediction, outputs)
    rows, means, draws = arrays.ranks.bootstrap(
        truth, predicted, seeds, repeats=options["resamples"], seed=options["seed"]
    )
    intervals = arrays.ranks.percentiles(draws, options["confidence"])
    return {
        "lds": rows[:-1].T.reshape(-1, *more),
        "lds_mean": means[:-1].reshape(more),
        "interval": intervals[:, :-1].reshape(2, *more),
        "ceiling": rows[-1],
        "ceiling_mean": means[-1],
        "ceiling_interval": intervals[:, -1],
        "draws": draws[:-1].T.reshape(-1, *more),
    }


def _require_defined(prediction: np.ndarray, outputs: np.ndarray) -> None:
    """Reject data for which the correlation of every target is undefined, and say why."""
    for name, values in (("outputs", outputs.mean(axis=1)), ("scores", prediction)):
        if (np.isnan(values).any(axis=0) | (values == values[:1]).all(axis=0)).all():
            raise ValueError(
                f"expected {name} that differ between subsets and are not NaN for at least one "
                f"target, got equal values or NaN for all of {values.shape[1]} targets and "
                f"{len(values)} subsets; try other subsets, or features without failed samples"
            )
