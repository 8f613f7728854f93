"""How λ is chosen: by a rule that asks no outputs, by outputs, and by left-out checkpoints."""

from __future__ import annotations

import dask.array as da
import numpy as np
import xarray as xr
from dask.array.utils import meta_from_array

from trakdask import arrays
from trakdask.arrays.blocks import field, where
from trakdask.arrays.graphs import plain
from trakdask.attribution.folds import differ, fold_weights, require_folds
from trakdask.attribution.gauss_newton import Trak
from trakdask.attribution.grams import GramMatrix
from trakdask.attribution.protocol import Absolute, GramEstimator, damping_prior
from trakdask.errors import warn_once
from trakdask.provenance import require_comparable
from trakdask.variables import (
    CHECKPOINT,
    SAMPLE,
    TRAINED_ON,
    WRONG_CLASSES,
    lazy_features,
    validate,
)

#: With fewer rows, a correlation three standard errors above 0 is above 0.42.
_LEAST_ROWS = 50


#: A standard error of their correlation is below 0.032, and 2 p² flops for each are less than
#: the 9 p³ of the eigendecomposition, from p of a few hundred on.
_LEFT_OUT_ROWS = 1000
_NEAR_PRIOR = 1.0
"""Within so many decades of the prior, ρ is where totals follow outputs best."""


COMPLETENESS = "completeness, "
"""The name of the rule by outputs, in front of the samples that were asked."""


Chosen = tuple[da.Array, tuple[str, ...], da.Array | None]
"""λ, the names of what may have chosen it, and how outputs chose it, as in :class:`Regularized`."""


def known_choice(choice: da.Array | None) -> da.Array:
    """Return how outputs chose λ; numbers that are NaN if they were not asked."""
    return da.from_array(arrays.damping.NO_CHOICE) if choice is None else choice


def by_rule(features: xr.Dataset, gram: GramMatrix, estimator: GramEstimator) -> Chosen:
    """Return λ by a rule that asks no outputs, and the name of the rule."""
    damping = estimator.damping
    if isinstance(damping, xr.DataArray):
        return plain(damping.variable.chunk({CHECKPOINT: 1}).data), ("given",), None
    if isinstance(damping, Absolute):
        lam = da.full(len(gram.labels), float(damping.value), chunks=1)
        return lam, ("absolute",), None
    if isinstance(damping, float):
        lam = arrays.gram.closed_form(gram.data, damping, gram.labels)
        return lam, (f"{damping:.3g} tr(K^2)/tr(K)",), None
    return *_by_trace(gram, damping_prior(features)), None


def _by_trace(gram: GramMatrix, rho: float) -> tuple[da.Array, tuple[str]]:
    lam = rho * arrays.gram.mean_trace(gram.data, gram.n_samples, gram.labels)
    return lam, ("tr(K)/n" if rho == 1 else f"{rho:.3g} tr(K)/n",)


def chosen_before(damping: xr.DataArray) -> Chosen:
    """Return the stored λ, its rule, and how it was chosen, if by outputs; warn as then."""
    lam, attrs = plain(damping.variable.chunk({CHECKPOINT: 1}).data), damping.attrs
    if "samples" in attrs:
        _warn_of_few_checkpoints(damping.size)
        arrays.damping.warn_of_choice(attrs["relative"], attrs["peak"], attrs["samples"])
    if "relative" not in attrs:
        return lam, (attrs["rule"],), None
    of_grid = (attrs.get(name, np.nan) for name in ("curve", "grade"))
    values = (attrs["relative"], attrs["peak"], attrs["threshold"], *of_grid, False)
    choice = da.from_array(np.array([values], arrays.damping.CHOICE))
    return lam, (attrs["rule"],), choice


def chosen_by_outputs(
    features: xr.Dataset,
    calibrate: xr.Dataset | None,
    gram: GramMatrix,
    chooses: GramMatrix,
    *,
    quiet: bool,
) -> Chosen:
    """Let outputs choose λ of a gram matrix, in units of tr(K)/n, under the weights of another."""
    if not quiet:
        _warn_of_few_checkpoints(len(gram.labels))
    assert chooses.spectrum is not None
    prior = damping_prior(features)
    by_trace, rules = _by_trace(gram, prior)
    if calibrate is not None:
        require_calibration(features, calibrate)
        samples, rows = arrays.damping.CALIBRATION, lazy_features(calibrate)
        totals = arrays.damping.held_out(chooses.spectrum, rows.feature.data)
        outputs = rows.output.data
    elif features.sizes[SAMPLE] >= _LEAST_ROWS:
        samples = "training rows left out"
        h, g = chooses.estimator.h(features), chooses.estimator.g(features)
        some_rows = arrays.damping.spread_rows(features.feature.data.chunks[0], _LEFT_OUT_ROWS)
        totals = arrays.damping.left_out(
            chooses.spectrum,
            _taken(features.feature.data, some_rows),
            None if h is None else _taken(h, some_rows),
            _taken(g, some_rows),
        )
        outputs = _taken(features.output.data, some_rows)
    else:
        return by_trace, rules, None
    curve, n = arrays.damping.curve(totals, outputs), chooses.n_samples
    # Without the wrong classes K is too small for totals to be as large as outputs. Rows that a
    # checkpoint was not trained on ask for a larger ρ than scores do.
    decades = _NEAR_PRIOR if WRONG_CLASSES in features and TRAINED_ON not in features else 0.0
    choice = arrays.damping.choose(
        curve, samples=samples, prior=prior, decades=decades, n_samples=n, quiet=quiet
    )
    rho = field(choice, "relative")
    lam = by_trace * where(da.isnan(rho), 1, rho / prior)
    return lam, (f"{COMPLETENESS}{samples}", *rules), choice


def chosen_by_folds(
    features: xr.Dataset,
    estimator: GramEstimator,
    calibrate: xr.Dataset | None,
    gram: GramMatrix,
    chosen: Chosen,
) -> Chosen:
    """Let checkpoints that were left out change the λ that was chosen without them.

    Checkpoints that were all trained on the same samples say nothing.
    """
    require_folds(features)
    assert gram.spectrum is not None
    lam, rules, choice = chosen
    start = (lam / arrays.gram.mean_trace(gram.data, gram.n_samples, gram.labels)).mean()
    # The norms of some estimators need λ.
    by = Trak() if estimator.norms else estimator.of_sums()
    sums = arrays.groups.weighted_sums(features.feature.data, fold_weights(features, by, None))
    if calibrate is None:
        some = arrays.damping.spread_rows(features.feature.data.chunks[0], _LEFT_OUT_ROWS)
        rows, outputs = (_taken(features[n].data, some) for n in ("feature", "output"))
    else:
        held_out = lazy_features(calibrate)
        rows, outputs = held_out.feature.data, held_out.output.data
    totals = arrays.folds.totals(gram.spectrum, sums, rows)
    folded = arrays.folds.choose(totals, outputs, known_choice(choice), start, differ(features))
    factor = where(field(folded, "by_folds"), field(folded, "relative") / start, 1)
    return lam * factor, rules, folded


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
