"""How λ is chosen: by a rule that asks no outputs, by outputs, and by left-out checkpoints.

Each rule is a function of the features and their sums, which :func:`choose` calls. A store keeps
what :func:`chosen_damping` returns of the choice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import dask
import dask.array as da
import numpy as np
import xarray as xr
from dask.array.utils import meta_from_array

from trakdask import arrays
from trakdask.arrays.blocks import field, where
from trakdask.arrays.damping import CHOICE, COMPLETENESS, CROSS_VALIDATION, made_choice
from trakdask.arrays.graphs import plain
from trakdask.attribution.estimators import EstimatorLike, Soft, Trak, choosing, with_gram
from trakdask.attribution.folds import differ, fold_weights, require_folds
from trakdask.attribution.grams import Sums, is_of_gram, stored, sums_of
from trakdask.attribution.protocol import (
    LOGIT_VARIANCE,
    SCORE_POWER,
    Absolute,
    GramEstimator,
    damping_prior,
)
from trakdask.errors import warn_once
from trakdask.provenance import pooled_checkpoints, require_comparable
from trakdask.variables import (
    CHECKPOINT,
    DAMPING,
    GRAM,
    SAMPLE,
    TRAINED_ON,
    VARIABLES,
    WRONG_CLASSES,
    checkpoint_names,
    lazy_features,
    validate,
)

_AUTOMATIC = 0.5
"""The power in the gram matrix of an estimator whose power in scores is automatic."""

#: With fewer rows, a correlation three standard errors above 0 is above 0.42.
_LEAST_ROWS = 50
#: A standard error of their correlation is below 0.032, and 2 p² flops for each are less than
#: the 9 p³ of the eigendecomposition, from p of a few hundred on.
_LEFT_OUT_ROWS = 1000


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
    prior is the features' ``attrs["damping_prior"]`` (1 if missing, 3.2 in the coordinates of a
    curvature), which is best for models that were trained to the end. The ρ with the largest
    correlation is chosen instead, if that is clearly larger in Fisher's z = artanh(r), as after a
    short training, where ρ has to be 10 to 300 times as large. With ``wrong_classes`` in the
    features and without ``trained_on``, C checkpoints need 0.2/√C for a larger ρ, and 0.4/√C for a
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


class Choice(NamedTuple):
    """λ of each checkpoint, (checkpoint,), the rule that was asked, and how λ was chosen, lazy.

    ``how`` is (1,) of dtype :data:`trakdask.arrays.damping.CHOICE`; its rule is the one that chose
    in the end, which is known when it is computed.
    """

    value: da.Array
    rule: str
    how: da.Array


def regularize(
    features: xr.Dataset,
    estimator: GramEstimator,
    calibrate: xr.Dataset | None = None,
    *,
    quiet: bool = False,
) -> tuple[Sums, Choice]:
    """Return the sums of a resolved estimator and its λ; features are chunked.

    With ``quiet``, the warnings about λ are left to the calls that will use the store.
    """
    by_folds = estimator.rule == "cross_validation"
    if calibrate is not None and not (by_folds or estimator.rule == "completeness"):
        raise ValueError(
            f"expected an estimator whose λ outputs choose with calibrate, got {estimator}; try "
            "damping='completeness', or leaving calibrate out"
        )
    # 1. A store keeps the λ of "auto", so that no query chooses it again.
    known = chosen_before(features, estimator) if calibrate is None else None
    if known is not None:
        return sums_of(features, estimator), known
    # 2. The sums. Left-out checkpoints change the λ of another rule, and outputs need r.
    rule = estimator.rule_without_folds(features) if by_folds else estimator.rule
    chooses = None
    if rule == "completeness":
        validate(features, ["output", "out_to_loss"], what="features")
        chooses = choosing(features)
    sums = sums_of(features, estimator, chooses=chooses, decomposed=by_folds)
    # 3. λ.
    return sums, choose(features, sums, estimator, calibrate, quiet)


def choose(
    features: xr.Dataset,
    sums: Sums,
    estimator: GramEstimator,
    calibrate: xr.Dataset | None,
    quiet: bool,
) -> Choice:
    """Return the λ of an estimator: the one that it has, or the one that its rule chooses."""
    damping = estimator.damping
    if isinstance(damping, xr.DataArray):
        return _unasked(plain(damping.variable.chunk({CHECKPOINT: 1}).data), "given")
    if isinstance(damping, Absolute):
        lam = da.full(len(sums.labels), float(damping.value), chunks=1)
        # The rule in attrs of scores is the number; what a store keeps of the choice is "absolute".
        return _unasked(lam, "absolute")._replace(rule=f"{damping.value}")
    if isinstance(damping, float):
        lam = damping * arrays.gram.traces(sums.gram, sums.labels)[1]
        return _unasked(lam, f"{damping:.3g} tr(K^2)/tr(K)")
    if damping == "trace":
        return by_trace(features, sums)
    if damping == "cross_validation":
        return by_folds(features, sums, estimator, calibrate, quiet)
    return by_outputs(features, sums, calibrate, quiet)


def _unasked(lam: da.Array, rule: str) -> Choice:
    return Choice(lam, rule, da.from_array(made_choice(rule)))


def by_trace(features: xr.Dataset, sums: Sums) -> Choice:
    """Return λ in units of tr(K)/n, at the prior of the features."""
    rho = damping_prior(features)
    return _unasked(rho * sums.unit, "tr(K)/n" if rho == 1 else f"{rho:.3g} tr(K)/n")


def by_outputs(
    features: xr.Dataset, sums: Sums, calibrate: xr.Dataset | None, quiet: bool
) -> Choice:
    """Let outputs choose λ in units of tr(K)/n, under weights that suit the choice."""
    if not quiet:
        _warn_of_few_checkpoints(len(sums.labels))
    # 1. K and r of those weights: of these sums, if they have them.
    by, trace = choosing(features), by_trace(features, sums)
    if sums.gradient is None:
        sums = sums_of(features, by, chooses=by, any_weights=False)
    # 2. The totals of some samples, and their outputs.
    if calibrate is not None:
        require_calibration(features, calibrate)
        samples = arrays.damping.CALIBRATION
        held_out = lazy_features(calibrate)
        totals = arrays.damping.held_out(sums.spectrum, held_out.feature.data)
        outputs = held_out.output.data
    elif features.sizes[SAMPLE] >= _LEAST_ROWS:
        samples = "training rows left out"
        some, h = _some_rows(features), by.h(features)
        totals = arrays.damping.left_out(
            sums.spectrum,
            _taken(features.feature.data, some),
            None if h is None else _taken(h, some),
            _taken(by.g(features), some),
        )
        outputs = _taken(features.output.data, some)
    else:
        return trace
    # 3. The ρ where they agree best. Without the wrong classes K is too small for totals to be as
    # large as outputs. Rows that a checkpoint was not trained on ask for a larger ρ than scores do.
    prior = damping_prior(features)
    how = arrays.damping.choose(
        totals, outputs, samples=samples, otherwise=trace.rule, prior=prior,
        is_whole=WRONG_CLASSES in features and TRAINED_ON not in features,
        n_samples=sums.n_samples, quiet=quiet,
    )  # fmt: skip
    rho = field(how, "relative")
    return Choice(trace.value * where(da.isnan(rho), 1, rho / prior), COMPLETENESS, how)


def by_folds(
    features: xr.Dataset,
    sums: Sums,
    estimator: GramEstimator,
    calibrate: xr.Dataset | None,
    quiet: bool,
) -> Choice:
    """Let checkpoints that were left out change the λ that is chosen without them.

    Checkpoints that were all trained on the same samples say nothing.
    """
    # 1. λ without them, and its ρ.
    alone = estimator.with_damping(estimator.rule_without_folds(features))
    before = choose(features, sums, alone, calibrate, quiet)
    require_folds(features)
    # ρ is one number for all checkpoints, unless the rule without folds is a number of
    # tr(K²)/tr(K): then the grid is searched around the mean.
    start = (before.value / sums.unit).mean()
    # 2. What the scores of the other checkpoints add up to, for each. The norms of some estimators
    # need λ, so that these are left to the weights of Trak.
    by = Trak() if estimator.norms else estimator.of_sums()
    of_folds = arrays.groups.weighted_sums(features.feature.data, fold_weights(features, by, None))
    if calibrate is None:
        some = _some_rows(features)
        rows, outputs = (_taken(features[n].data, some) for n in ("feature", "output"))
    else:
        held_out = lazy_features(calibrate)
        rows, outputs = held_out.feature.data, held_out.output.data
    totals = arrays.folds.totals(sums.spectrum, of_folds, rows)
    # 3. The ρ near the one before whose totals agree best with the outputs.
    how = arrays.folds.choose(totals, outputs, before.how, start, differ(features))
    has_changed = field(how, "rule") == CROSS_VALIDATION
    factor = where(has_changed, field(how, "relative") / start, 1)
    return Choice(before.value * factor, CROSS_VALIDATION, how)


def chosen_before(features: xr.Dataset, estimator: GramEstimator) -> Choice | None:
    """Return the λ that features hold beside their gram matrix, if the estimator asks for it.

    It was chosen as ``"auto"`` says, for all checkpoints together; it warns as it did then.
    """
    if isinstance(estimator.damping, Absolute | xr.DataArray):
        return None
    about = {"gram_weights": estimator.of_sums().gram_weights}
    if stored(features, GRAM, about) is None or not is_of_gram(features, DAMPING):
        return None
    attrs = features[DAMPING].attrs
    # The stored λ is the one of "auto", so that it serves any estimator that "auto" resolves to
    # here: not one with a rule or a number of its own, and not for some of the checkpoints.
    is_auto = estimator.damping == estimator.with_damping("auto").resolved(features).damping
    if not is_auto or set(pooled_checkpoints(attrs)) != set(checkpoint_names(features)):
        return None
    lam = plain(features.variables[DAMPING].chunk({CHECKPOINT: 1}).data)
    if samples := attrs.get("samples", ""):
        _warn_of_few_checkpoints(len(lam))
        arrays.damping.warn_of_choice(attrs["relative"], attrs["peak"], samples)
    if "relative" not in attrs:
        return _unasked(lam, attrs["rule"])
    how = made_choice(**{name: attrs[name] for name in CHOICE.names or () if name in attrs})
    rule = CROSS_VALIDATION if estimator.rule == "cross_validation" else COMPLETENESS
    return Choice(lam, rule, da.from_array(how))


def _some_rows(features: xr.Dataset) -> list[slice]:
    return arrays.damping.spread_rows(features.feature.data.chunks[0], _LEFT_OUT_ROWS)


def _taken(data: da.Array, rows: list[slice]) -> da.Array:
    """Return some rows; copies, since views would keep their blocks in memory until λ is known."""
    parts = [
        data[some].map_blocks(np.copy, dtype=data.dtype, meta=meta_from_array(data))
        for some in rows
    ]
    return da.concatenate(parts)


def require_calibration(features: xr.Dataset, calibrate: xr.Dataset) -> None:
    """Check that held-out samples were featurized as these features, and are enough."""
    validate(calibrate, ["feature", "output"], what="calibrate")
    require_comparable(features, calibrate, "calibration")
    if (n := calibrate.sizes[SAMPLE]) < _LEAST_ROWS:
        raise ValueError(
            f"expected {_LEAST_ROWS} or more held-out samples to choose λ by, got {n}; try "
            "featurizing more of them, or leaving them out"
        )


def _warn_of_few_checkpoints(n: int) -> None:
    if n < 3:
        warn_once(
            "few checkpoints",
            f"scores are made from {n} checkpoint{'s' * (n > 1)}; 3 or more are worth their cost: "
            "from 1 to 3 to 10 the linear datamodeling score rose from 0.58 to 0.62 to 0.65 and "
            "from 0.43 to 0.51 to 0.55, measured on two small models. Train the model again with "
            "other seeds, or set the estimator's damping= yourself to silence this.",
        )
