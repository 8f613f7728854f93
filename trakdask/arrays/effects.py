"""Turn sums of scores into changes of outputs, by checkpoints that predict each other's outputs."""

from __future__ import annotations

import dask.array as da
import numpy as np

from trakdask.arrays.blocks import Block, Floats, blockwise
from trakdask.arrays.damping import warn_client
from trakdask.errors import warn_once

SEED, PER_PART, RELATIVE = 0.9, 3.0, 0.3
"""Part of the variance of residuals that is a training's own noise; how much variance a group adds,
relative to its part of the samples; error of an effect, relative to it."""

LEARNED, PER_PART_UNLEARNED = 1.0, 30.0
"""Mean margin below which models of half of the data have hardly learned, so that models of all
data differ from them in more than the samples of a group; :data:`PER_PART` of these."""

OF_HALVES, LEAST_OF_HALVES = 0.75, 0.3
"""What the effect of a sample on models of all data is of that on models of half of the data."""

_HARDLY = (
    "models of half of the samples have hardly learned: the mean margin of outputs is {:.2g}. A "
    "model of all samples differs from them in more than a group, so that effects can be several "
    "times too small; try longer training, or larger parts than halves."
)

COMPLETE = 0.5
"""Sums of scores that correlate less with outputs say nothing of the sizes of scores."""


def scale(
    outputs: da.Array, total: da.Array, slope: da.Array | None = None, *, margins: bool = False
) -> da.Array:
    """Return the factor of scores with which they are effects on models of all data.

    Parameters
    ----------
    outputs, total
        f of all targets, (target, checkpoint), and the sums of the scores of all samples, (target).
    slope
        Result of :func:`slope`, if it is known how much samples change models of half of the data.
    margins
        Whether outputs are margins, which say how much models have learned.

    Returns
    -------
    (), float64, lazy.

    Notes
    -----
    Scores rank effects, and their sizes differ between estimators. In a linear model scores add up
    to outputs; the half of that was closest to the effects of retraining. Where sums of scores do
    not follow the outputs, as of models that stopped early, and of estimators whose weights are the
    gradient of the loss, which vanishes at the end of training, they say nothing of sizes.

    A sample changes a model of half of the data more than one of all. By how much depends on how
    far training went. So the slope of halves bounds the factor: from :data:`LEAST_OF_HALVES` of it
    to all of it, and :data:`OF_HALVES` where sums say nothing. Without a slope that is 1. Where
    models of halves have hardly learned, the factor is the slope.

    Examples
    --------
    >>> total = da.from_array(np.array([1.0, 2.0, 3.0]))
    >>> float(scale(4 * total[:, None], total).compute())
    2.0
    """
    more = () if slope is None else (slope, "")
    return blockwise(
        _scale, "", outputs.rechunk(-1), "tc", total.rechunk(-1), "t", *more,
        margins=margins, concatenate=True, name="effect-scale", dtype=np.float64,
    )  # fmt: skip


def _scale(outputs: Block, total: Block, slope: Floats | None = None, *, margins: bool) -> Floats:
    if slope is not None and margins and (mean := np.nanmean(outputs)) < LEARNED:
        warn_once("hardly learned", _HARDLY.format(mean), warn_client)
        return np.asarray(slope)
    # Sums that do not follow outputs say nothing of sizes.
    f = outputs.mean(axis=1)
    both = np.isfinite(f) & np.isfinite(total)
    f, total = f[both], total[both]
    spread = np.std(f) * np.std(total) if len(f) > 1 else 0.0
    if spread == 0 or np.cov(f, total, ddof=0)[0, 1] / spread < COMPLETE:
        return np.asarray(1.0 if slope is None else OF_HALVES * slope)
    # Half of the factor with which sums are nearest to outputs, by least squares.
    half = f @ total / (total @ total) / 2
    return np.asarray(half if slope is None else np.clip(half, LEAST_OF_HALVES * slope, slope))


def slope(predicted: da.Array, outputs: da.Array) -> da.Array:
    """Return how much outputs of left-out checkpoints change where predictions change by 1.

    Parameters
    ----------
    predicted
        Result of :func:`trakdask.arrays.folds.predicted`, (target, checkpoint).
    outputs
        f of these targets, (target, checkpoint).

    Returns
    -------
    The slope of a line through the points of all targets and checkpoints, each target with a
    constant of its own, (), lazy, at least 0. Targets with a NaN are left out.

    Raises
    ------
    ValueError
        When computed: if predictions are the same for all checkpoints.

    Examples
    --------
    >>> p = da.from_array(np.array([[1.0, 2.0, 3.0], [0.0, 1.0, 5.0]]))
    >>> float(slope(p, 2 * p + 7).compute())
    2.0
    """
    return blockwise(
        _slope, "", predicted, "tc", outputs, "tc",
        concatenate=True, name="effect-slope", dtype=np.float64,
    )  # fmt: skip


def _slope(predicted: Floats, outputs: Block) -> Floats:
    p, f = _centred(predicted, outputs)
    if not (square := np.nansum(p * p)) > 0:
        raise ValueError(
            "expected checkpoints that were trained on different samples, got predictions that are "
            "the same for all; try td.evaluate.train_on_halves"
        )
    return np.asarray(max(np.nansum(p * f) / square, 0.0))


def errors(predicted: da.Array, outputs: da.Array, slope: da.Array) -> da.Array:
    """Return how far the outputs of one more model are from predictions, of each target.

    Parameters
    ----------
    predicted, outputs, slope
        As in, and from, :func:`slope`.

    Returns
    -------
    (target,) float64, lazy: the root of the mean of two variances of residuals of the line, those
    of the target and those of all targets. Few checkpoints tell little of a target's own.

    Examples
    --------
    >>> p = da.from_array(np.array([[1.0, 2.0, 3.0], [0.0, 1.0, 2.0]]))
    >>> f = p + np.array([[1.0, -2.0, 1.0], [0, 0, 0]])
    >>> np.square(errors(p, f, slope(p, f)).compute()).round(3).tolist()
    [2.25, 0.75]
    """
    return blockwise(
        _errors, "t", predicted.rechunk(-1), "tc", outputs.rechunk(-1), "tc", slope, "",
        concatenate=True, name="effect-errors", dtype=np.float64,
    )  # fmt: skip


def _errors(predicted: Floats, outputs: Block, slope: Floats) -> Floats:
    p, f = _centred(predicted, outputs)
    # The mean of a target takes one degree of freedom of its residuals; the slope, of all targets
    # together, takes hardly any.
    own = np.square(f - slope * p).sum(axis=1) / (p.shape[1] - 1)
    return np.asarray(np.sqrt((own + np.nanmean(own)) / 2))


def _centred(predicted: Floats, outputs: Block) -> tuple[Floats, Floats]:
    """Return both less their means over checkpoints; NaN where either is for some checkpoint."""
    missing = 0 * (predicted + outputs).sum(axis=1, keepdims=True, dtype=np.float64)
    p, f = (x.astype(np.float64) + missing for x in (predicted, outputs))
    return p - p.mean(axis=1, keepdims=True), f - f.mean(axis=1, keepdims=True)


def per_part(outputs: da.Array, *, margins: bool) -> da.Array:
    """Return how much variance a group adds, relative to its part of the samples, (), lazy.

    Parameters are those of :func:`scale`.

    Examples
    --------
    >>> sure = da.full((2, 3), 4.0)
    >>> [per_part(f, margins=True).compute().item() for f in (sure, -sure)]
    [3.0, 30.0]
    """
    return blockwise(
        _per_part, "", outputs.rechunk(-1), "tc", margins=margins, concatenate=True,
        name="effect-per-part", dtype=np.float64,
    )  # fmt: skip


def _per_part(outputs: Block, *, margins: bool) -> Floats:
    return np.asarray(PER_PART_UNLEARNED if margins and np.nanmean(outputs) < LEARNED else PER_PART)


def bounds(
    effect: da.Array, error: da.Array, variance: da.Array, quantile: float
) -> tuple[da.Array, ...]:
    """Return the bounds of effects in one retraining, and in the mean of many.

    Parameters
    ----------
    effect
        Effects of groups on targets, (group, target).
    error
        Result of :func:`errors`.
    variance
        The variance that each group adds, relative to that of residuals, (group,): its part of all
        samples, times :func:`per_part`.
    quantile
        The distance of the bounds in standard deviations.

    Returns
    -------
    The lower and upper bounds in one retraining, and the two of the mean, (group, target), lazy:
    variances are σ² (1 + ``variance``) and σ² (1 - :data:`SEED` + ``variance``), with the error σ,
    and both have (:data:`RELATIVE` ``effect``)² added.

    Examples
    --------
    >>> one = da.ones((1, 1)), da.ones(1), da.zeros(1)
    >>> [float(bound.compute().round(2)[0, 0]) for bound in bounds(*one, 1)]
    [-0.04, 2.04, 0.56, 1.44]
    """
    relative, added = (RELATIVE * effect) ** 2, variance[:, None]
    variances = (error**2 * (own + added) + relative for own in (1, 1 - SEED))
    halves = [quantile * squared**0.5 for squared in variances]
    return tuple(bound for half in halves for bound in (effect - half, effect + half))
