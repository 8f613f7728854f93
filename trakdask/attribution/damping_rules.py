"""How λ is chosen: by a rule that asks no outputs, by outputs, and by left-out checkpoints.

Each rule is a function of the features and their sums, which :func:`choose` calls.
"""

from __future__ import annotations

from typing import NamedTuple

import dask.array as da
import numpy as np
import xarray as xr
from dask.array.utils import meta_from_array

from trakdask import arrays
from trakdask.arrays.blocks import field, where
from trakdask.arrays.damping import CHOICE, COMPLETENESS, CROSS_VALIDATION, made_choice
from trakdask.arrays.graphs import plain
from trakdask.attribution.estimators import choosing
from trakdask.attribution.folds import differ, fold_weights, require_folds
from trakdask.attribution.gauss_newton import Trak
from trakdask.attribution.grams import Sums, is_of_gram, stored, sums_of
from trakdask.attribution.protocol import Absolute, GramEstimator, damping_prior
from trakdask.errors import warn_once
from trakdask.provenance import pooled_checkpoints, require_comparable
from trakdask.variables import (
    CHECKPOINT,
    DAMPING,
    GRAM,
    SAMPLE,
    TRAINED_ON,
    WRONG_CLASSES,
    checkpoint_names,
    lazy_features,
    validate,
)

#: With fewer rows, a correlation three standard errors above 0 is above 0.42.
_LEAST_ROWS = 50


#: A standard error of their correlation is below 0.032, and 2 p² flops for each are less than
#: the 9 p³ of the eigendecomposition, from p of a few hundred on.
_LEFT_OUT_ROWS = 1000


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
        return _unasked(_of_variable(damping), "given")
    if isinstance(damping, Absolute):
        lam = da.full(len(sums.labels), float(damping.value), chunks=1)
        return _unasked(lam, "absolute")._replace(rule=f"{damping.value}")
    if isinstance(damping, float):
        lam = arrays.gram.closed_form(sums.gram, damping, sums.labels)
        return _unasked(lam, f"{damping:.3g} tr(K^2)/tr(K)")
    if damping == "trace":
        return by_trace(features, sums)
    if damping == "cross_validation":
        return by_folds(features, sums, estimator, calibrate, quiet)
    return by_outputs(features, sums, calibrate, quiet)


def _unasked(lam: da.Array, rule: str) -> Choice:
    return Choice(lam, rule, da.from_array(made_choice(rule)))


def _of_variable(damping: xr.DataArray) -> da.Array:
    return plain(damping.variable.chunk({CHECKPOINT: 1}).data)


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
    is_auto = estimator.damping == estimator.with_damping("auto").resolved(features).damping
    if not is_auto or set(pooled_checkpoints(attrs)) != set(checkpoint_names(features)):
        return None
    lam, samples = _of_variable(features[DAMPING]), attrs.get("samples", "")
    if samples:
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
