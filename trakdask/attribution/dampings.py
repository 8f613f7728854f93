"""The damping λ of the gram matrix: a number, a spectral rule, or by the outputs of the model."""

from __future__ import annotations

from dataclasses import dataclass

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays.damping import CLOSED_FORM
from trakdask.attribution import grams
from trakdask.attribution.estimators import (
    DEFAULT_ESTIMATOR,
    DEFAULT_POWER,
    Absolute,
    Damping,
    Estimator,
    Options,
    Power,
    gather_options,
)
from trakdask.errors import warn_once
from trakdask.provenance import require_comparable
from trakdask.variables import CHECKPOINT, SAMPLE, VARIABLES, lazy_features, validate

#: How much larger λ is for features in the coordinates of the curvature, whose gram matrix is
#: flatter; and the least ρ. What scores are with it, tests/benchmarks/curvature.py measures.
CURVED = 10**0.5
#: Of 50 rows without any correlation, one set in 500 reaches the 0.4 that chooses λ.
_LEAST_ROWS = 50
#: Half a standard error of their correlation is below 0.016, and 2 p² flops for each are less than
#: the 9 p³ of the eigendecomposition, from p of a few hundred on.
_LEFT_OUT_ROWS = 1000
_NO_CHOICE = np.array([(np.nan, -1, np.nan, np.nan, np.nan)], arrays.damping.CHOICE)


@dataclass(frozen=True)
class Regularized:
    """A gram matrix and its λ (checkpoint), and how λ was chosen.

    ``features`` are those to multiply with, which are checked if their gram matrix is stored.
    ``choice`` is that of :func:`trakdask.arrays.damping.choose`, None where outputs were not asked.
    ``rules`` are names of what may have chosen λ: of the candidates of ``choice``, and of what
    decides if none of them does.
    """

    features: xr.Dataset
    gram: grams.GramMatrix
    damping: da.Array
    rules: tuple[str, ...]
    choice: da.Array | None = None

    def solve(self, target: da.Array) -> da.Array:
        """Return (K_c + λ_c I)⁻¹ φ_c(t), (target, proj_dim, checkpoint)."""
        return arrays.solve.solve(self._inverse(), target)

    def leverage(self, feature: da.Array) -> da.Array:
        """Return φ_c(z)ᵀ (K_c + λ_c I)⁻¹ φ_c(z), (sample, checkpoint)."""
        return arrays.solve.leverage(self._inverse(), feature)

    def _inverse(self) -> da.Array:
        if self.gram.spectrum is not None:
            return arrays.solve.inverse(self.gram.spectrum, self.damping)
        return arrays.solve.cholesky(self.gram.data, self.damping, self.gram.labels)


def damping(
    features: xr.Dataset,
    damping: Damping = "auto",
    *,
    estimator: Estimator = DEFAULT_ESTIMATOR,
    power: Power = DEFAULT_POWER,
    calibrate: xr.Dataset | None = None,
    weights: xr.DataArray | None = None,
) -> xr.Dataset:
    """Return the damping λ_c that :func:`score` adds to the gram matrix, and how it was chosen.

    Parameters
    ----------
    features
        Training features.
    damping
        ``"auto"``: ``"completeness"`` for classification into one of several classes, or by
        several labels, and for ``estimator="soft"``, ``"trace"`` for regression and causal language
        models, as was measured to be best, else ``"closed_form"``.
        ``"completeness"``: one ρ for all checkpoints, λ_c = ρ tr(K_c)/n, chosen by the outputs;
        see Notes. ``"trace"``: tr(K_c)/n, so ρ = 1; n counts samples that failed, too.
        ``"closed_form"``: 0.03 tr(K_c²)/tr(K_c); a number replaces 0.03.
        ``Absolute(x)`` is x itself. What this function returned before is taken as it is. Where
        :func:`save` or :func:`calibrate` stored λ and ``"auto"`` or the rule that chose it is asked
        for, it is the stored one, as long as the features are those of the store.
    estimator, power, weights
        As in :func:`score`.
    calibrate
        Features of 50 or more held-out samples whose outputs choose λ, instead of those of training
        samples. They may be the samples to explain (``calibrate=targets``); then scores depend on
        which targets are asked for together.

    Returns
    -------
    Lazy Dataset with ``damping`` (checkpoint), float64, in units of the gram matrix; ``relative``
    (), ρ; ``curve`` (relative_damping), the correlations; ``peak`` (), their largest, which says
    how well the linearised model follows the real one; ``threshold`` (), the least that might be
    chosen; ``rule`` (), what chose λ in the end. All but ``damping`` and ``rule`` are NaN where
    outputs were not asked; :func:`trakdask.plots.damping` draws them.

    Raises
    ------
    ValueError
        If an option does not make sense, or ``calibrate`` has fewer than 50 samples. When computed:
        if a gram matrix is all 0, whose λ would be 0, too; the checkpoint is named.

    Warns
    -----
    UserWarning
        If there are fewer than 3 checkpoints (completeness only). When computed: if outputs do not
        follow the totals, or ρ is an end of the grid. The first and the last are shown once in a
        process, not for every query.

    Notes
    -----
    Completeness. In the linearised model the attributions of a target add up to its output, Σ_z
    score(z, t) = f(t), if λ is right. So for 17 ρ from 0.01 to 100 these sums are correlated over
    samples with the outputs f (both as means over checkpoints), under soft weights of power ½, and
    ρ is the largest at most half a standard error below the best, ½(1 - max²)/√m. Above 1 it also
    has to be clearly better than 1, by 0.25 in Fisher's z = artanh(r); or else ρ is 1. With one
    checkpoint it is at least 1. For features in the coordinates of the curvature it is at least
    √10, and the other rules give a λ √10 times as large. No model is retrained and no n × m array
    made: one more column of the gram matrix and one eigendecomposition per checkpoint, about 9 p³
    flops and 32 p² bytes; 17 numbers per sample and checkpoint. For other estimators it needs a
    gram matrix of these weights too, one more pass over the features.

    The samples are those of ``calibrate``, if given; else up to 1000 training samples from up to 8
    blocks, each left out of the sums exactly. So by default λ, and with it the score of a pair,
    depends on the training features alone. If the correlation stays below 0.4, the next rule
    decides: training samples after ``calibrate``, and the closed form last.

    ρ is free of the scale of the gradients of any checkpoint. Measured by
    ``tests/benchmarks/quality.py`` on seven small classification tasks: completeness lost 0.007 of
    the linear datamodeling score on average against the best λ, 0.035 in the worst of 56 settings
    (chosen by the targets 0.007, and 0.038 in the worst); the closed form 0.037 with TRAK's
    weights, 0.051 with soft ones. Nineteen further tasks, regression and language models are on the
    page "Quality".

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> chosen = td.damping(features, damping=td.Absolute(2.5))
    >>> chosen.damping.values.tolist(), str(chosen.rule.values)
    ([2.5, 2.5], 'absolute')
    """
    validate(features, ["feature"], what="features")
    allowed = ("auto", "trak", "soft", "relatif")
    options = gather_options(
        features, estimator, power, damping, calibrate, weights, allowed=allowed
    )
    features = lazy_features(features)
    return describe_damping(features, regularize(features, options))


def describe_damping(features: xr.Dataset, regularized: Regularized) -> xr.Dataset:
    """Return λ and how it was chosen, as :func:`damping` does."""
    choice, variable = regularized.choice, VARIABLES["damping"]
    if choice is None:
        choice = da.from_array(_NO_CHOICE)
    rule = da.map_blocks(
        _rule, choice, regularized.rules, drop_axis=0, dtype=object, meta=np.empty((), object)
    )
    numbers = {
        "relative": "λ in units of tr(K)/n",
        "peak": "largest correlation of the curve",
        "threshold": "least correlation that might be chosen",
    }
    curve = {"description": "correlation of outputs with totals of attributions"}
    return xr.Dataset(
        {
            "damping": (variable.dims, regularized.damping, variable.attrs),
            "curve": ("relative_damping", choice["correlation"][0], curve),
            "rule": ((), rule, {"description": "what chose λ"}),
            **{n: ((), choice[n][0], {"description": text}) for n, text in numbers.items()},
        },
        coords={CHECKPOINT: features[CHECKPOINT], "relative_damping": arrays.damping.GRID},
    )


def _rule(choice: np.ndarray, rules: tuple[str, ...]) -> np.ndarray:
    return np.array(rules[int(choice["candidate"][0])], dtype=object)


def regularize(features: xr.Dataset, options: Options, *, quiet: bool = False) -> Regularized:
    """Return the gram matrix of an estimator and its λ; features are chunked already.

    ``quiet`` leaves warnings of how λ is chosen to those who will use what is stored.
    """
    estimator, stored = options.estimator, grams.stored_damping(features, options)
    h = None if options.weights is None else grams.weight_data(features, options.weights)
    by_outputs = options.is_damped_by_outputs and stored is None
    if by_outputs:
        validate(features, ["output", "out_to_loss"], what="features")
    is_same = estimator.choosing == estimator.weights
    gram = grams.gram_matrix(features, estimator.weights, h, chooses_damping=by_outputs and is_same)
    chooses = gram
    if by_outputs and not is_same:
        chooses = grams.gram_matrix(features, estimator.choosing, chooses_damping=True)
    if gram.is_stored or chooses.is_stored:
        features = grams.compared_with_norms(features)
    if by_outputs:
        return _chosen_by_outputs(features, options.calibrate, gram, chooses, quiet=quiet)
    if stored is not None:
        return Regularized(features, gram, *_stored(stored))
    return Regularized(features, gram, *_by_rule(gram, options, _unit(features)))


def _unit(features: xr.Dataset) -> float:
    """Return what λ is multiplied by where outputs are not asked."""
    return CURVED if "curvature" in features.attrs else 1.0


def _by_rule(gram: grams.GramMatrix, options: Options, unit: float) -> tuple[da.Array, tuple[str]]:
    """Return λ by a rule that asks no outputs, and the name of the rule."""
    damping = options.damping
    if isinstance(damping, xr.DataArray):
        return damping.variable.chunk({CHECKPOINT: 1}).data, ("given",)
    if isinstance(damping, Absolute):
        return da.full(len(gram.labels), float(damping.value), chunks=1), ("absolute",)
    if options.rule == "trace":
        return unit * gram.mean_trace(), ("tr(K)/n" if unit == 1 else f"{unit:.3g} tr(K)/n",)
    factor = unit * CLOSED_FORM if options.rule == "closed_form" else float(damping)
    return gram.closed_form(factor), (_closed_form_name(factor),)


def _closed_form_name(factor: float) -> str:
    return f"{factor:.3g} tr(K^2)/tr(K)"


def _stored(damping: xr.DataArray) -> tuple[da.Array, tuple[str], da.Array | None]:
    """Return the stored λ, its rule, and how it was chosen, if by outputs; warn as then."""
    lam, attrs = damping.variable.chunk({CHECKPOINT: 1}).data, damping.attrs
    if attrs["asked"] != "completeness":
        return lam, (attrs["rule"],), None
    _warn_of_few_checkpoints(damping.size)
    if not attrs["tried"]:
        return lam, (attrs["rule"],), None
    relative, peak = attrs["relative"], attrs["peak"]
    arrays.damping.warn_of_choice(relative, peak, attrs["tried"][-1])
    values = [(relative, 0, peak, attrs["threshold"], attrs["curve"])]
    return lam, (attrs["rule"],), da.from_array(np.array(values, arrays.damping.CHOICE))


def _chosen_by_outputs(
    features: xr.Dataset,
    calibrate: xr.Dataset | None,
    gram: grams.GramMatrix,
    chooses: grams.GramMatrix,
    *,
    quiet: bool,
) -> Regularized:
    """Let outputs choose λ of a gram matrix, in units of tr(K)/n, under the weights of another."""
    if not quiet:
        _warn_of_few_checkpoints(len(gram.labels))
    assert chooses.spectrum is not None
    curves: dict[str, da.Array] = {}
    if calibrate is not None:
        require_calibration(features, calibrate)
        rows = lazy_features(calibrate)
        totals = arrays.damping.held_out(chooses.spectrum, rows.feature.data)
        curves["calibration set"] = arrays.damping.curve(totals, rows.output.data)
    if features.sizes[SAMPLE] >= _LEAST_ROWS:
        unless = list(curves.values())
        curves["training rows left out"] = _curve_left_out(features, chooses, unless)
    unit = _unit(features)
    fallback = gram.closed_form(unit * CLOSED_FORM)
    names = [f"completeness, {name}" for name in curves]
    rules = (*names, _closed_form_name(unit * CLOSED_FORM))
    if not curves:
        return Regularized(features, gram, fallback, rules)
    # Below tr(K)/n, sums of one model follow its outputs a little better, but scores predict worse.
    least = unit if unit == CURVED or len(gram.labels) == 1 else 0.0
    choice = arrays.damping.choose(curves, least=least, quiet=quiet)
    rho = choice["relative"][0]
    lam = da.where(da.isnan(rho), fallback, rho * gram.mean_trace())
    return Regularized(features, gram, lam, rules, choice)


def _curve_left_out(
    features: xr.Dataset, gram: grams.GramMatrix, unless: list[da.Array]
) -> da.Array:
    """Return the curve of training rows, each of which is left out of the sums, exactly."""
    assert gram.spectrum is not None
    assert gram.g is not None
    rows = arrays.damping.spread_rows(features.feature.data.chunks[0], _LEFT_OUT_ROWS)
    totals = arrays.damping.left_out(
        gram.spectrum,
        _taken(features.feature.data, rows),
        None if gram.h is None else _taken(gram.h, rows),
        _taken(gram.g, rows),
        unless=unless,
    )
    return arrays.damping.curve(totals, _taken(features.output.data, rows))


def _taken(data: da.Array, rows: list[slice]) -> da.Array:
    """Return some rows; copies, since views would keep their blocks in memory until λ is known."""
    parts = [data[some].map_blocks(np.copy, dtype=data.dtype, meta=data._meta) for some in rows]
    taken: da.Array = da.concatenate(parts)
    return taken


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
            "other seeds, or set damping= yourself to silence this.",
        )
