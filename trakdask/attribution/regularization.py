"""The damping λ of gram matrices, and their damped inverses.

λ is a number, a rule that looks at the gram matrix alone, or chosen by the outputs of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays.blocks import field
from trakdask.attribution.damping_rules import (
    COMPLETENESS,
    by_rule,
    chosen_before,
    chosen_by_folds,
    chosen_by_outputs,
    known_choice,
)
from trakdask.attribution.estimators import EstimatorLike, choosing, with_gram
from trakdask.attribution.gauss_newton import Soft
from trakdask.attribution.grams import gram_matrix, is_of_gram, of_gram, stored_matrix
from trakdask.attribution.protocol import LOGIT_VARIANCE, SCORE_POWER, Absolute, GramEstimator
from trakdask.variables import (
    CHECKPOINT,
    DAMPING,
    GRAM,
    NORM,
    VARIABLES,
    checkpoint_names,
    lazy_features,
    validate,
)

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
    curvature), which is best for models that were trained to the end. A larger ρ, where the
    correlation is largest, is chosen if it is clearly larger than at the prior: by 0.6 in
    Fisher's z = artanh(r), or by 0.2 if that at the prior is below 0.57 or there are fewer than 500
    samples, as after a short training, where ρ has to be 10 to 300 times as large. Otherwise, with
    ``wrong_classes`` in the features and without ``trained_on``, it is where the correlation is
    largest within a decade of the prior.

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

    ρ is free of the scale of the gradients of any checkpoint. What λ loses against the best one was
    measured (``tests/benchmarks/results/2026-11-24-halves.txt``) and is on the page "Estimator and
    λ".

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
    return describe_damping(regularize(features, with_gram(features, estimator), calibrate))


def describe_damping(regularized: Regularized) -> xr.Dataset:
    """Return λ and how it was chosen, as :func:`damping` does."""
    choice = known_choice(regularized.choice)
    rule = da.map_blocks(
        _rule, choice, regularized.rules, drop_axis=0, dtype=object, meta=np.empty((), object)
    )
    numbers = {
        "relative": "λ in units of tr(K)/n",
        "peak": "largest correlation of the curve",
        "threshold": "least correlation that suffices for the prior",
    }
    curve = {"description": "correlation of outputs with totals of attributions"}
    grade = {"description": "mean rank correlation of scores with outputs of left-out checkpoints"}
    return xr.Dataset(
        {
            "damping": VARIABLES["damping"].holding(regularized.damping),
            "curve": ("relative_damping", field(choice, "correlation"), curve),
            "grade": ("relative_damping", field(choice, "grade"), grade),
            "rule": ((), rule, {"description": "what chose λ"}),
            **{n: ((), field(choice, n), {"description": text}) for n, text in numbers.items()},
        },
        coords={
            CHECKPOINT: regularized.features[CHECKPOINT],
            "relative_damping": (
                "relative_damping",
                arrays.damping.GRID,
                {"description": "λ in units of tr(K)/n"},
            ),
        },
    )


def _rule(choice: np.ndarray, rules: tuple[str, ...]) -> np.ndarray:
    by_outputs = rules[-1 if np.isnan(choice["relative"][0]) else 0]
    return np.array("cross-validation" if choice["by_folds"][0] else by_outputs, dtype=object)


@dataclass(frozen=True)
class Regularized:
    """The inverse of a gram matrix with its λ (checkpoint), and how λ was chosen.

    ``features`` are to be multiplied with; they are checked if their gram matrix is stored.
    ``inverse`` is for :func:`trakdask.arrays.solve.solve`. ``choice`` is the result of
    :func:`trakdask.arrays.damping.choose`, None where outputs were not asked. ``rules`` are names
    of what may have chosen λ: outputs, if they were asked, and last what decides if they do not.
    """

    features: xr.Dataset
    inverse: da.Array
    gram_weights: str
    damping: da.Array
    rules: tuple[str, ...]
    choice: da.Array | None


def regularize(
    features: xr.Dataset,
    estimator: GramEstimator,
    calibrate: xr.Dataset | None = None,
    *,
    quiet: bool = False,
) -> Regularized:
    """Return the inverse of the gram matrix of an estimator and its λ; features are chunked.

    With ``quiet``, the warnings about λ are left to the calls that will use the store.
    """
    if calibrate is not None and estimator.rule not in ("completeness", "cross_validation"):
        raise ValueError(
            f"expected an estimator whose λ outputs choose with calibrate, got {estimator}; try "
            "damping='completeness', or leaving calibrate out"
        )
    in_sums = of_gram(features, estimator)
    stored = stored_damping(features, estimator, in_sums) if calibrate is None else None
    by_folds = estimator.rule == "cross_validation" and stored is None
    if by_folds:
        estimator = estimator.with_damping(estimator.rule_without_folds(features))
    by_outputs = estimator.rule == "completeness" and stored is None
    if by_outputs:
        validate(features, ["output", "out_to_loss"], what="features")
    by = choosing(features)
    chooses_itself = by_outputs and by.gram_weights == in_sums.gram_weights
    gram = chooses = gram_matrix(
        features, in_sums, chooses_damping=chooses_itself, decomposed=by_folds
    )
    if by_outputs and not chooses_itself:
        chooses = gram_matrix(features, by, chooses_damping=True)
    # Stored rows have checksums; others may have been changed since K was reduced from them.
    if NORM in features and (gram.is_stored or chooses.is_stored):
        q = features["out_to_loss"]
        checked = arrays.score.checked(features["feature"].data, features[NORM].data, q.data)
        features = features.assign(out_to_loss=q.copy(data=checked))
    if by_outputs:
        chosen = chosen_by_outputs(features, calibrate, gram, chooses, quiet=quiet)
    else:
        chosen = by_rule(features, gram, estimator) if stored is None else chosen_before(stored)
    if by_folds:
        chosen = chosen_by_folds(features, estimator, calibrate, gram, chosen)
    if gram.spectrum is None:
        inverse = arrays.solve.cholesky(gram.data, chosen[0], gram.labels)
    else:
        inverse = arrays.spectra.inverse(gram.spectrum, chosen[0])
    return Regularized(features, inverse, in_sums.gram_weights, *chosen)


def stored_damping(
    features: xr.Dataset, estimator: GramEstimator, in_sums: GramEstimator
) -> xr.DataArray | None:
    """Return the λ that features hold beside the gram matrix, if the estimator asks for it.

    It was chosen as ``"auto"`` says, for all checkpoints together.
    """
    if isinstance(estimator.damping, Absolute | xr.DataArray):
        return None
    if stored_matrix(features, GRAM, in_sums) is None or not is_of_gram(features, DAMPING):
        return None
    is_auto = estimator.damping == estimator.with_damping("auto").resolved(features).damping
    pooled = features[DAMPING].attrs["pooled_checkpoints"]
    return features[DAMPING] if is_auto and set(pooled) == set(checkpoint_names(features)) else None


def chosen_damping(
    ds: xr.Dataset, estimator: GramEstimator, calibrate: xr.Dataset | None
) -> tuple[np.ndarray, dict[str, Any]]:
    """Choose λ, from the stored eigenvectors; return its values and attrs."""
    features, variance = lazy_features(ds), None
    if isinstance(estimator, Soft):
        variance = arrays.weights.logit_variance(features.out_to_loss.data)
    resolved = estimator.resolved(ds)
    regularized = regularize(features, resolved, calibrate, quiet=True)
    chosen, variance = dask.compute(describe_damping(regularized), variance)
    attrs: dict[str, Any] = {
        "rule": str(chosen.rule.values),
        "pooled_checkpoints": checkpoint_names(ds),
    }
    power = resolved.of_sums().power
    attrs[SCORE_POWER] = 1.0 if power is None else power  # Trak has none
    if variance is not None:
        attrs[LOGIT_VARIANCE] = variance.tolist()
        if power == _AUTOMATIC:
            attrs[SCORE_POWER] = float(arrays.weights.power_of(variance))
    if regularized.choice is not None:
        attrs |= {name: float(chosen[name]) for name in ("relative", "peak", "threshold")}
        of_grid = {name: chosen[name].values for name in ("curve", "grade")}
        attrs |= {name: x.tolist() for name, x in of_grid.items() if np.isfinite(x).any()}
        if regularized.rules[0].startswith(COMPLETENESS):
            attrs["samples"] = regularized.rules[0].removeprefix(COMPLETENESS)
    return chosen.damping.values, attrs
