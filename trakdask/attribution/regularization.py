"""The damping λ of gram matrices: what chose it, and what a store keeps of the choice."""

from __future__ import annotations

from typing import Any

import dask
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays.blocks import field
from trakdask.attribution.damping_rules import regularize
from trakdask.attribution.estimators import EstimatorLike, with_gram
from trakdask.attribution.gauss_newton import Soft
from trakdask.attribution.protocol import LOGIT_VARIANCE, SCORE_POWER, GramEstimator
from trakdask.variables import CHECKPOINT, VARIABLES, checkpoint_names, lazy_features, validate

_AUTOMATIC = 0.5
"""The power in the gram matrix of an estimator whose power in scores is automatic."""


def damping(
    features: xr.Dataset,
    estimator: EstimatorLike = "auto",
    *,
    calibrate: xr.Dataset | None = None,
) -> xr.Dataset:
    """Return the damping λ_c that :func:`score` adds to the gram matrix, and how it was chosen.

    Parameters
    ----------
    features
        Training features.
    estimator
        As in :func:`score`, with a gram matrix; its ``damping`` says what chooses λ, see
        :class:`Soft`.
    calibrate
        Features of 50 or more held-out samples whose outputs choose λ, instead of training samples;
        ``Soft(damping=td.damping(features, calibrate=held_out))`` has it. They may be the
        samples to explain; then scores depend on which targets are asked for together.

    Returns
    -------
    Lazy Dataset with ``damping`` (checkpoint), float64, in units of the gram matrix; ``relative``
    (), ρ; ``curve`` (relative_damping), the correlations; ``peak`` (), their largest, which says
    how well the linearised model follows the real one; ``threshold`` (), the least that suffices
    for the prior; ``grade`` (relative_damping), what left-out checkpoints say; ``rule`` (), what
    chose λ in the end. All but ``damping`` and ``rule`` are NaN where outputs were not asked;
    :func:`trakdask.plots.damping` draws them. ρ is in units of tr(K_c)/n, which a number as
    ``damping`` of an estimator is not: with ρ = 3, it is
    ``Soft(damping=chosen.damping * (3 / chosen.relative))``.

    Raises
    ------
    ValueError
        If the estimator has no gram matrix; if ``calibrate`` has fewer than 50 samples, or outputs
        do not choose λ. When computed: if a gram matrix is all 0, whose λ would be 0, too; the
        checkpoint is named.

    Warns
    -----
    UserWarning
        If there are fewer than 3 checkpoints (completeness only). When computed: if outputs do not
        follow the totals, or ρ is the end of the grid. The first and the last are shown once in a
        process, not for every query.

    Notes
    -----
    Completeness. In the linearised model the attributions of a target add up to its output, Σ_z
    score(z, t) = f(t), if λ is right. So for 21 ρ from 0.01 to 1000 these sums are correlated over
    samples with the outputs f (both as means over checkpoints), under soft weights of power ½. The
    prior is the features' ``attrs["damping_prior"]`` (1 if missing, 5.6 in the coordinates of a
    curvature), which is best for models that were trained to the end. The ρ with the largest
    correlation is chosen instead, if that is clearly larger in Fisher's z = artanh(r), as after a
    short training, where ρ has to be 10 to 300 times as large. With ``wrong_classes`` in the
    features and without ``trained_on``, C checkpoints need 0.1/√C for a larger ρ, and 0.2/√C for a
    smaller one, down to a tenth. Otherwise ρ is never smaller, and a larger one needs 0.6, or 0.2
    if the correlation at the prior is below 0.57 or there are fewer than 500 samples.

    Cross-validation, where features have ``trained_on`` and five or more checkpoints, for every
    task. Each checkpoint is left out, and the scores of the others, added up over its samples,
    predict its outputs, as in :func:`trakdask.evaluate.cross_validate`. The grade of a ρ is the
    mean of Spearman's correlations over samples. The ρ with the best grade within a decade of the
    choice without them is taken, if it is better by more than one standard error of the difference.
    It costs one more pass over the features, and 2 p k flops for each of the
    samples and checkpoints left out.

    No model is retrained and no n × m array made: one more column of the gram matrix and one
    eigendecomposition per checkpoint, about 9 p³ flops and 40 p² bytes; 21 numbers per sample and
    checkpoint. For other estimators it needs a gram matrix of these weights too, one more pass over
    the features.

    The samples are ``calibrate``, if given; else up to 1000 training samples from up to 8
    blocks, each left out of the sums exactly. So by default λ, and with it the score of a pair,
    depends on the training features alone. If the correlation is less than three standard errors
    (1/√m) above 0, λ is as by ``"trace"``.

    ρ is free of the scale of the gradients of any checkpoint. What λ loses against the best one is
    on the page "Best settings" (``tests/benchmarks/results/2026-11-28-dampings.txt``).

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> chosen = td.damping(features, td.Trak(damping=td.Absolute(2.5)))
    >>> chosen.damping.values.tolist(), str(chosen.rule.values)
    ([2.5, 2.5], 'absolute')
    """
    validate(features, ["feature"], what="features")
    features = lazy_features(features)
    _, choice = regularize(features, with_gram(features, estimator), calibrate)
    about = {
        "relative": "λ in units of tr(K)/n",
        "curve": "correlation of outputs with totals of attributions",
        "peak": "largest correlation of the curve",
        "threshold": "least correlation that suffices for the prior",
        "grade": "mean rank correlation of scores with outputs of left-out checkpoints",
        "rule": "what chose λ",
    }
    data: dict[str, Any] = {"damping": VARIABLES["damping"].holding(choice.value)}
    for name, text in about.items():
        values = field(choice.how, name)
        dims = ("relative_damping",) * values.ndim
        data[name] = dims, values, {"description": text}
    grid = "relative_damping", arrays.damping.GRID, {"description": about["relative"]}
    coords = {CHECKPOINT: features[CHECKPOINT], "relative_damping": grid}
    return xr.Dataset(data, coords=coords)


def chosen_damping(
    ds: xr.Dataset, estimator: GramEstimator, calibrate: xr.Dataset | None
) -> tuple[np.ndarray, dict[str, Any]]:
    """Choose λ, from the stored eigenvectors; return its values and attrs."""
    variance = None
    if isinstance(estimator, Soft):
        variance = arrays.weights.logit_variance(ds.out_to_loss.data)
    resolved = estimator.resolved(ds)
    _, choice = regularize(ds, resolved, calibrate, quiet=True)
    values, (how,), variance = dask.compute(choice.value, choice.how, variance)
    power = resolved.of_sums().power
    attrs: dict[str, Any] = {
        "rule": str(how["rule"]),
        "pooled_checkpoints": checkpoint_names(ds),
        SCORE_POWER: 1.0 if power is None else power,  # Trak has none
    }
    if variance is not None:
        attrs[LOGIT_VARIANCE] = variance.tolist()
        if power == _AUTOMATIC:
            attrs[SCORE_POWER] = float(arrays.weights.power_of(variance))
    if choice.rule in (arrays.damping.COMPLETENESS, arrays.damping.CROSS_VALIDATION):
        attrs |= {name: float(how[name]) for name in ("relative", "peak", "threshold")}
        of_grid = [name for name in ("curve", "grade") if np.isfinite(how[name]).any()]
        attrs |= {name: how[name].tolist() for name in of_grid}
        if how["samples"]:
            attrs["samples"] = str(how["samples"])
    return values, attrs
