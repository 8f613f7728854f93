"""The damping λ of the gram matrix: a number, a spectral rule, or by the outputs of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays.decomposition import component_count
from trakdask.arrays.solve import CLOSED_FORM
from trakdask.attribution.estimators import (
    DEFAULT_ESTIMATOR,
    DEFAULT_POWER,
    Absolute,
    Damping,
    Estimator,
    Options,
    Power,
    brief,
    gather_options,
    is_positive,
)
from trakdask.attribution.grams import ChoosingMatrices, Matrices, matrices
from trakdask.errors import warn_once
from trakdask.provenance import require_comparable
from trakdask.variables import (
    CHECKPOINT,
    PROJ_DIM,
    SAMPLE,
    VARIABLES,
    aligned,
    lazy_features,
    validate,
)

__all__ = [
    "Regularized",
    "damping",
    "describe_damping",
    "regularize",
    "require_calibration",
]

#: Of 50 rows without any correlation, one set in 500 reaches the 0.4 that chooses λ.
_LEAST_ROWS = 50
#: Half a standard error of their correlation is below 0.016, and 2 p² flops for each are less than
#: the 9 p³ of the eigendecomposition, from p of a few hundred on.
_LEFT_OUT_ROWS = 1000
_LEFT_OUT = "training rows left out"
_NO_CHOICE = np.array([(np.nan, -1, np.nan, np.nan, np.nan)], arrays.damping.CHOICE)


@dataclass(frozen=True)
class Regularized:
    """A gram matrix, its λ (checkpoint), and how λ was chosen where the outputs chose it.

    ``features`` are those to multiply with, which are checked if their gram matrix is stored.
    ``choice`` is that of :func:`trakdask.arrays.damping.choose`; ``spectrum`` is that of the
    gram matrix, where it is stored or choosing λ has computed it. ``labels`` are the names of the
    checkpoints, for errors.
    """

    features: xr.Dataset
    gram: da.Array
    damping: da.Array
    rules: tuple[str, ...]
    labels: list[str]
    choice: da.Array | None = None
    spectrum: da.Array | None = None

    def solve(self, target: da.Array) -> da.Array:
        """Return (K_c + λ_c I)⁻¹ φ_c(t), (target, proj_dim, checkpoint)."""
        return arrays.spectrum.solve(self._inverse(), target)

    def leverage(self, feature: da.Array) -> da.Array:
        """Return φ_c(z)ᵀ (K_c + λ_c I)⁻¹ φ_c(z), (sample, checkpoint)."""
        return arrays.spectrum.leverage(self._inverse(), feature)

    def _inverse(self) -> da.Array:
        if self.spectrum is not None:
            return arrays.spectrum.inverse(self.spectrum, self.damping)
        return arrays.solve.cholesky(self.gram, self.damping, self.labels)


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
    has to be clearly better than 1, by 0.25 in Fisher's z = artanh(r); or else ρ is 1. No model is
    retrained and no n × m array made: one more column of the gram matrix and one eigendecomposition
    per checkpoint, about 9 p³ flops and 32 p² bytes; 17 numbers per sample and checkpoint. For
    other estimators it needs a gram matrix of these weights too, one more pass over the features.

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
    choice = regularized.choice
    if choice is None:
        choice = da.from_array(_NO_CHOICE)
        rule = da.full((), regularized.rules[0], dtype=object)
    else:
        rule = da.map_blocks(
            _rule, choice, regularized.rules, drop_axis=0, dtype=object, meta=np.empty((), object)
        )
    variable = VARIABLES["damping"]
    return xr.Dataset(
        {
            "damping": (variable.dims, regularized.damping, variable.attrs),
            "relative": ((), choice["relative"][0], {"description": "λ in units of tr(K)/n"}),
            "curve": (
                "relative_damping",
                choice["correlation"][0],
                {"description": "correlation of outputs with totals of attributions"},
            ),
            "peak": ((), choice["peak"][0], {"description": "largest correlation of the curve"}),
            "threshold": (
                (),
                choice["threshold"][0],
                {"description": "least correlation that might be chosen"},
            ),
            "rule": ((), rule, {"description": "what chose λ"}),
        },
        coords={
            CHECKPOINT: features[CHECKPOINT],
            "relative_damping": arrays.damping.GRID,
        },
    )


def _rule(choice: np.ndarray, rules: tuple[str, ...]) -> np.ndarray:
    return np.array(rules[int(choice["candidate"][0])], dtype=object)


def regularize(features: xr.Dataset, options: Options, *, quiet: bool = False) -> Regularized:
    """Return the gram matrix of an estimator and its λ; features are chunked already.

    ``quiet`` leaves warnings of how λ is chosen to those who will use what is stored.
    """
    needed, labels = matrices(features, options), _labels(features)
    spectrum = None
    if needed.decomposition is not None:
        values, vectors = needed.decomposition
        spectrum = arrays.spectrum.from_eigenvectors(
            values, vectors, None, needed.n_samples, labels
        )
    if needed.choosing is not None:
        return _complete(options.calibrate, needed, needed.choosing, spectrum, quiet=quiet)
    damping, choice = options.damping, None
    if needed.damping is not None:
        lam, rule, choice = _stored(needed.damping, labels)
    elif isinstance(damping, (xr.Dataset, xr.DataArray)):
        lam, rule = given_damping(features, damping), "given"
    elif isinstance(damping, Absolute):
        lam, rule = da.full(len(labels), float(damping.value), chunks=1), "absolute"
    elif options.rule == "trace":
        lam = arrays.spectrum.mean_trace(needed.gram, needed.n_samples, labels)
        rule = "tr(K)/n"
    else:
        factor = CLOSED_FORM if options.rule == "closed_form" else relative_damping(damping)
        lam, rule = _closed_form(needed.gram, factor, labels, spectrum), _closed_form_name(factor)
    return Regularized(needed.features, needed.gram, lam, (rule,), labels, choice, spectrum)


def _stored(damping: xr.DataArray, labels: list[str]) -> tuple[da.Array, str, da.Array | None]:
    """Return the stored λ, its rule, and how it was chosen, if by completeness; warn as then."""
    lam: da.Array = damping.variable.chunk({CHECKPOINT: 1}).data
    attrs = damping.attrs
    if attrs["asked"] != "completeness":
        return lam, attrs["rule"], None
    _warn_of_few_checkpoints(len(labels))
    if not attrs["tried"]:
        return lam, attrs["rule"], None
    relative, peak = attrs["relative"], attrs["peak"]
    arrays.damping.warn_of_choice(relative, peak, attrs["tried"][-1])
    values = [(relative, 0, peak, attrs["threshold"], attrs["curve"])]
    return lam, attrs["rule"], da.from_array(np.array(values, arrays.damping.CHOICE))


def _closed_form(
    gram: da.Array, factor: float, labels: list[str], spectrum: da.Array | None
) -> da.Array:
    if spectrum is not None:
        return arrays.spectrum.closed_form_damping(spectrum, factor)
    return arrays.solve.closed_form_damping(gram, factor, labels)


def _closed_form_name(factor: float) -> str:
    return f"{factor} tr(K^2)/tr(K)"


def _complete(
    calibrate: xr.Dataset | None,
    needed: Matrices,
    choosing: ChoosingMatrices,
    spectrum: da.Array | None,
    *,
    quiet: bool,
) -> Regularized:
    """Let outputs choose λ, under the weights that the estimator has for this.

    ``spectrum`` is that of the estimator's own gram matrix, if it is known.
    """
    features, labels = needed.features, _labels(needed.features)
    n, loss_gradient = choosing.n_samples, choosing.loss_gradient
    if choosing.decomposition is None:
        n_component = component_count(n, features.sizes[PROJ_DIM], features.feature.dtype)
        choosing_spectrum = arrays.spectrum.spectrum(
            choosing.gram, loss_gradient, n, labels, n_component=n_component
        )
    else:
        values, vectors = choosing.decomposition
        choosing_spectrum = arrays.spectrum.from_eigenvectors(
            values, vectors, loss_gradient, n, labels
        )
    if needed.gram.name == choosing.gram.name:
        spectrum = choosing_spectrum
    if not quiet:
        _warn_of_few_checkpoints(len(labels))
    candidates, curves = _candidates(features, calibrate, choosing_spectrum, choosing)
    fallback = _closed_form(needed.gram, CLOSED_FORM, labels, spectrum)
    names = [f"completeness, {each.name}" for each in candidates]
    rules = (*names, _closed_form_name(CLOSED_FORM))
    if not candidates:
        return Regularized(features, needed.gram, fallback, rules, labels, None, spectrum)
    choice = arrays.damping.choose(candidates, curves, quiet=quiet)
    rho = choice["relative"][0]
    relative = rho * arrays.spectrum.mean_trace(needed.gram, needed.n_samples, labels)
    lam = da.where(da.isnan(rho), fallback, relative)
    return Regularized(features, needed.gram, lam, rules, labels, choice, spectrum)


def _candidates(
    features: xr.Dataset,
    calibrate: xr.Dataset | None,
    spectrum: da.Array,
    choosing: ChoosingMatrices,
) -> tuple[list[arrays.damping.Candidate], list[da.Array]]:
    """Return the sets of outputs that may choose λ, best first, and their curves."""
    candidates = []
    if calibrate is not None:
        require_calibration(features, calibrate)
        rows = lazy_features(calibrate)
        totals = arrays.damping.held_out(spectrum, rows.feature.data)
        candidates.append(arrays.damping.Candidate("calibration set", totals, rows.output.data))
    curves = [arrays.damping.curve(each.totals, each.outputs) for each in candidates]
    if features.sizes[SAMPLE] >= _LEAST_ROWS:
        candidates.append(_left_out(spectrum, features, choosing, curves))
        curves.append(arrays.damping.curve(candidates[-1].totals, candidates[-1].outputs))
    return candidates, curves


def require_calibration(features: xr.Dataset, calibrate: xr.Dataset) -> None:
    """Check that held-out samples were featurized as these features, and are enough."""
    validate(calibrate, ["feature", "output"], what="calibrate")
    require_comparable(features, calibrate, "calibration")
    if (n := calibrate.sizes[SAMPLE]) < _LEAST_ROWS:
        raise ValueError(
            f"expected {_LEAST_ROWS} or more held-out samples to choose λ by, got {n}; try "
            "featurizing more of them, or leaving them out"
        )


def _left_out(
    spectrum: da.Array, features: xr.Dataset, choosing: ChoosingMatrices, unless: list[da.Array]
) -> arrays.damping.Candidate:
    rows = arrays.damping.spread_rows(features.feature.data.chunks[0], _LEFT_OUT_ROWS)
    predicted = arrays.damping.left_out(
        spectrum,
        _taken(features.feature.data, rows),
        None if choosing.h is None else _taken(choosing.h, rows),
        _taken(choosing.g, rows),
        unless=unless,
    )
    return arrays.damping.Candidate(_LEFT_OUT, predicted, _taken(features.output.data, rows))


def _taken(data: da.Array, rows: list[slice]) -> da.Array:
    """Return some rows; copies, since views would keep their blocks in memory until λ is known."""
    parts = [data[each].map_blocks(np.copy, dtype=data.dtype, meta=data._meta) for each in rows]
    taken: da.Array = da.concatenate(parts)
    return taken


def _warn_of_few_checkpoints(n: int) -> None:
    if n < 3:
        warn_once(
            "few checkpoints",
            f"scores are made from {n} checkpoint{'s' * (n > 1)}; 3 or more are worth their cost: "
            "from 1 to 3 to 10 the linear datamodeling score rose from 0.57 to 0.62 to 0.65 and "
            "from 0.43 to 0.51 to 0.55, measured on two small models. Train the model again with "
            "other seeds, or set damping= yourself to silence this.",
        )


def _labels(features: xr.Dataset) -> list[str]:
    return [str(name) for name in features[CHECKPOINT].values]


def given_damping(features: xr.Dataset, damping: xr.Dataset | xr.DataArray) -> da.Array:
    """Return λ of the checkpoints of some features, from what :func:`trakdask.damping` returned."""
    remedy = "try damping=td.damping(features), or to choose λ by other samples, calibrate=samples"
    values = damping.get("damping") if isinstance(damping, xr.Dataset) else damping
    if values is None or values.dims != (CHECKPOINT,) or CHECKPOINT not in values.coords:
        has = list(damping.data_vars) if isinstance(damping, xr.Dataset) else damping.dims
        raise ValueError(
            f"expected 'damping' of each checkpoint, with the coord checkpoint, got {has}; {remedy}"
        )
    if values.dtype.kind not in "fiu":
        raise ValueError(f"expected damping in numbers, got dtype {values.dtype}; {remedy}")
    values = aligned(values, features, what="damping")
    if values.chunks is None and not all(map(is_positive, values.values)):
        by_checkpoint = dict(
            zip(map(str, features[CHECKPOINT].values), values.values.tolist(), strict=True)
        )
        raise ValueError(f"expected finite damping >= 0, got {by_checkpoint}; {remedy}")
    data: da.Array = values.variable.chunk({CHECKPOINT: 1}).data
    return data


def relative_damping(value: Any) -> float:
    """Return a damping that is relative to tr(K²)/tr(K), as a number of at least 0."""
    if not is_positive(value):
        raise ValueError(
            "expected damping as 'auto', 'completeness', 'trace', 'closed_form', a number >= 0 "
            "relative to tr(K²)/tr(K), td.Absolute(x), or what td.damping returned, got "
            f"{brief(value)}; try damping='auto'"
        )
    return float(value)
