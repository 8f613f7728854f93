"""Features in, lazy attributions out: scores, scores by group, self-influence."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask._version import __version__
from trakdask.attribution.dampings import regularize
from trakdask.attribution.estimators import (
    DEFAULT_ESTIMATOR,
    DEFAULT_POWER,
    Damping,
    Estimator,
    Power,
    gather_options,
)
from trakdask.attribution.groups import require_group_coord
from trakdask.attribution.products import loss_weights, operands, solver
from trakdask.provenance import FEATURE_SPEC, as_text
from trakdask.variables import (
    CHECKPOINT,
    MODULE,
    SAMPLE,
    TARGET,
    TARGET_PREFIX,
    TOKEN,
    VARIABLES,
    coords_along,
    lazy_features,
    may_have_failed,
    validate,
)

__all__ = [
    "group_score",
    "labelled",
    "labels_of_samples",
    "labels_of_scores",
    "labels_of_targets",
    "require_flag",
    "score",
    "score_attrs",
    "self_influence",
]


Labels = tuple[tuple[str, ...], dict[Hashable, Any]]
"""Dimensions, and coords along them."""


def score(
    features: xr.Dataset,
    targets: xr.Dataset,
    *,
    estimator: Estimator = DEFAULT_ESTIMATOR,
    power: Power = DEFAULT_POWER,
    damping: Damping = "auto",
    calibrate: xr.Dataset | None = None,
    weights: xr.DataArray | None = None,
    learning_rates: Mapping[str, float] | xr.DataArray | None = None,
    average: bool = True,
) -> xr.DataArray:
    """Attribute the output of every target to every training sample.

    Positive, for every estimator: training on z raised the output of t. With λ_c of
    :func:`damping`, weights h and g, and K_c = Σ_z h_c(z) φ_c(z) φ_c(z)ᵀ,

        score(z, t) = mean_c[ φ_c(z)ᵀ (K_c + λ_c I)⁻¹ φ_c(t) ] · mean_c[ g_c(z) ].

    Parameters
    ----------
    features
        Features of the training samples. If they hold the ``gram`` of this estimator, as
        :func:`save` keeps it, it is used: rows that were selected from them are scored under the
        gram matrix of all samples, and only their blocks are read. Otherwise it is reduced from
        these features: stored ones are read twice, and those that are computed stay in memory until
        they are scored.
    targets
        Features of the samples to explain, made with the same model and projector.
    estimator
        ``"auto"``: ``"soft"`` for classification into one of several classes, or by several labels,
        else ``"trak"``. ``"trak"``: h = 1, g = Q, as published. ``"soft"``: with q = Q in [0, 1]
        and a = ``power``, h = q^a (1 - q), g = q^a: the curvature and the gradient of one loss,
        flatter than the real one; a = 1 is the Gauss-Newton influence function.
        ``"relatif"``: TRAK's score by the square root of the sample's self-influence. Without a
        gram matrix: ``"grad_dot"``, mean_c[φ_c(z)·φ_c(t)] · mean_c[Q_c(z)]; ``"grad_cos"``,
        mean_c[cos(φ_c(z), φ_c(t))] times the sign of Q; ``"tracin"``, Σ_c η_c Q_c(z) φ_c(z)·φ_c(t).
    power
        a of ``"soft"``, in [0, 1]; lower for models whose training was stopped early, nearer 1
        where few samples are removed. ``"auto"``: ½ in h; in g from ½ up to 1 the more equally sure
        the model is of all training samples, which is to say the less log((1 - q)/q) varies between
        them (1 up to a standard deviation of 0.8, ½ from 1.4 on). A squared error needs 1, which
        there is ``"trak"``.
    damping
        λ, see :func:`damping`.
    calibrate
        Features of held-out samples whose outputs choose λ, see :func:`damping`.
    weights
        h (sample) or (sample, checkpoint), instead of the estimator's.
    learning_rates
        η of ``"tracin"`` by name of checkpoint, a mapping or a DataArray (checkpoint).
    average
        ``False`` keeps the ensemble: (sample, target, checkpoint), whose mean is the score.

    Returns
    -------
    Lazy DataArray ``score`` (sample, target), float32 (float64 of float64 features), in tiles of
    sample blocks × target blocks; blocks of more than 4096 targets are divided. Coords of the
    training samples keep their names, those of the targets get the prefix ``target_``.

    Raises
    ------
    StoreMismatchError
        If features and targets were made differently; the field is named.
    ValueError
        If an option does not make sense; if ``gram`` is of fewer samples than there are, or has a
        dimension ``sample``; if rows were selected, and another gram matrix of all is needed than
        the one at hand. When computed: if ``feature`` was changed since its ``gram`` and
        ``feature_norm`` were made; if q of ``"soft"`` is not in [0, 1], or features are not finite;
        ``numpy.linalg.LinAlgError`` if the damped gram matrix is singular.

    Warns
    -----
    UserWarning
        As :func:`damping` does.

    Notes
    -----
    Only the targets' side is solved: p × m numbers per checkpoint; the n × m scores exist in tiles.
    With the eigenvectors that :func:`save` stores this takes 4 p² flops per target and checkpoint;
    without them the gram matrix is decomposed for each query. For many queries, type
    ``features = td.open(store).persist()`` first, on a cluster or on threads: then λ, eigenvectors
    and features are in memory, and only the targets are read. Chunks of a local store are mapped
    there: other processes of the machine share them, and they take no memory of their own.
    Samples and targets that failed (``featurize(..., on_error="record")``) have NaN scores. They do
    not affect the scores of others, except that n in tr(K)/n still counts failed samples.
    ``"relatif"`` also solves for each training sample, 2 p² flops. Its self-influence is that of
    :func:`self_influence`, so the size of Q cancels. Cosines with a zero feature are NaN.

    Measured by ``tests/benchmarks/quality.py`` on seven small classification tasks, half of the
    samples removed: ``"soft"`` at the automatic λ and power had a linear datamodeling score above
    that of ``"trak"`` at the best λ in hindsight, or the same. Nineteen further tasks, regression
    and language models are on the page "Quality".

    References
    ----------
    Park et al. 2023, equation 17 (TRAK; traker's ``TRAKer.finalize_scores``, whose scores are those
    of ``damping=Absolute(lambda_reg)`` up to one factor per checkpoint). Koh & Liang 2017
    (influence functions). Barshan et al. 2020 (ℓ-RelatIF). Pruthi et al. 2020 (TracInCP). Charpiat
    et al. 2019 (gradient similarity, cosine).

    Examples
    --------
    Spread, signal-to-noise and the score without one checkpoint:

    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4, n_checkpoints=3)
    >>> apart = td.score(features, features.isel(sample=[0, 1]), average=False)
    >>> spread = apart.std("checkpoint", ddof=1) / 3**0.5
    >>> signal_to_noise = apart.mean("checkpoint") / spread
    >>> without_c1 = apart.drop_sel(checkpoint="c1").mean("checkpoint")
    >>> spread.dims == signal_to_noise.dims == without_c1.dims == ("sample", "target")
    True
    """
    require_flag("average", average)
    training, explained = operands(features, targets)
    options = gather_options(
        features, estimator, power, damping, calibrate, weights, learning_rates
    )
    dims, coords = labels_of_scores(training, explained)
    if not average:
        dims, coords = (*dims, CHECKPOINT), coords | {CHECKPOINT: features[CHECKPOINT]}
    made = solver(training, options)
    data = arrays.score.score(
        made.features.feature.data, made.vectors(explained), made.weight(made.features),
        average=average, pooled=made.pooled,
    )  # fmt: skip
    attrs = score_attrs(training, explained, made.attrs, may_have_failed=may_have_failed(targets))
    return labelled("score", dims, data, coords, attrs)


def group_score(
    features: xr.Dataset,
    targets: xr.Dataset,
    *,
    by: str,
    estimator: Estimator = DEFAULT_ESTIMATOR,
    power: Power = DEFAULT_POWER,
    damping: Damping = "auto",
    calibrate: xr.Dataset | None = None,
    weights: xr.DataArray | None = None,
    learning_rates: Mapping[str, float] | xr.DataArray | None = None,
) -> xr.DataArray:
    """Sum the scores of the training samples of each group, without forming the scores.

    Parameters
    ----------
    features, targets, estimator, power, damping, calibrate, weights, learning_rates
        As in :func:`score`.
    by
        Name of a coord of the training samples; missing values belong to no group.

    Returns
    -------
    Lazy DataArray ``score`` (``by``, target), groups sorted: what
    ``score(features, targets).groupby(by).sum()`` would give, at the cost of one pass over the
    features, whatever the number of targets. As there, samples that failed are left out.

    Raises
    ------
    ValueError
        If there is no such coord, or the result has a coord of the targets of that name.
    """
    training, explained = operands(features, targets)
    dims, coords = labels_of_targets(explained)
    known, taken = labels_of_samples(training)[1], [TARGET, *coords]
    by = require_group_coord(by, list(map(str, known)), list(map(str, taken)))
    options = gather_options(
        features, estimator, power, damping, calibrate, weights, learning_rates
    )
    made = solver(training, options)
    sums, groups = made.group_sums(made.features, by)
    data = arrays.score.score(sums, made.vectors(explained), None)
    attrs = score_attrs(training, explained, made.attrs, may_have_failed=may_have_failed(targets))
    return labelled("score", (by, *dims), data, {by: (by, groups), **coords}, attrs)


def self_influence(
    features: xr.Dataset,
    *,
    estimator: Estimator = DEFAULT_ESTIMATOR,
    power: Power = DEFAULT_POWER,
    damping: Damping = "auto",
    calibrate: xr.Dataset | None = None,
    weights: xr.DataArray | None = None,
    average: bool = True,
) -> xr.DataArray:
    """Return how much training on each sample lowered its own loss: g(z) · score(z, z), not < 0.

    mean_c[ φ_c(z)ᵀ (K_c + λ_c I)⁻¹ φ_c(z) ] · mean_c[ g_c(z) ]². Large for samples that the model
    had to memorise, such as those with wrong labels.

    Parameters
    ----------
    features, power, damping, calibrate, weights
        As in :func:`score`.
    estimator
        ``"trak"`` or ``"soft"``; ``"grad_dot"`` is mean_c ‖φ_c(z)‖² · mean_c[Q_c(z)]².
    average
        ``False`` keeps ``checkpoint``.

    Returns
    -------
    Lazy DataArray ``self_influence`` (sample), float64, or (sample, checkpoint).

    Notes
    -----
    Cost: 2 p² flops per sample and checkpoint beside those of the gram matrix, block by block.

    References
    ----------
    Koh & Liang 2017, section 5.4; Pruthi et al. 2020, section 4.1.

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> td.self_influence(features).dims
    ('sample',)
    """
    require_flag("average", average)
    validate(features, ["feature", "out_to_loss"], what="features")
    allowed = ("auto", "trak", "soft", "grad_dot")
    options = gather_options(
        features, estimator, power, damping, calibrate, weights, allowed=allowed
    )
    features = lazy_features(features)
    if options.estimator.has_gram:
        matrix = regularize(features, options)
        own = matrix.leverage(matrix.features.feature.data)
    else:
        own = arrays.weights.squared_norm(features.feature.data)
    g = loss_weights(options.estimator, features).of(features)
    data = arrays.weights.own_influence(own, g, average=average)
    variable = VARIABLES["self_influence"]
    dims, coords = labels_of_samples(features)
    if not average:
        dims, coords = (*dims, CHECKPOINT), coords | {CHECKPOINT: features[CHECKPOINT]}
    return labelled(variable.name, dims, data, coords, variable.attrs)


def labelled(
    name: str, dims: tuple[str, ...], data: Any, coords: Mapping[Hashable, Any], attrs: Any
) -> xr.DataArray:
    """Return a DataArray without copying its coords, as the constructor of DataArray does."""
    return xr.Dataset({name: (dims, data, attrs)}, coords=coords)[name]


def require_flag(name: str, value: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"expected {name} as True or False, got {value!r}; try {name}=True")


def labels_of_scores(samples: xr.Dataset, targets: xr.Dataset) -> Labels:
    """Return the dimensions and coords of scores; one side may be divided into tokens or modules.

    Raises
    ------
    ValueError
        If coords of training samples have the names of the targets' coords.
    """
    dims, coords = labels_of_samples(samples)
    target_dims, target_coords = labels_of_targets(targets)
    if both := [name for name in coords if name in target_coords]:
        raise ValueError(
            f"expected names of the training samples' coords that scores do not have for the "
            f"targets' coords, got {both[0]!r} for both; try features.rename({{{both[0]!r}: ...}})"
        )
    return (*dims, *target_dims), coords | target_coords


def labels_of_samples(samples: xr.Dataset) -> Labels:
    """Return the dimensions and coords of training samples."""
    parts = _part_dims(samples)
    return (SAMPLE, *parts), coords_along(samples, SAMPLE) | _coords_of(samples, parts)


def labels_of_targets(targets: xr.Dataset) -> Labels:
    """Return the dimensions and coords of targets, with their prefix."""
    coords: dict[Hashable, Any] = {
        f"{TARGET_PREFIX}{name}": (TARGET, coord.values)
        for name, coord in coords_along(targets, SAMPLE).items()
    }
    parts = _part_dims(targets)
    for name, coord in _coords_of(targets, parts).items():
        dims = [TARGET if dim == SAMPLE else dim for dim in coord.dims]
        own = name if name in parts else f"{TARGET_PREFIX}{name}"
        coords[own] = xr.Variable(dims, coord.data, coord.attrs)
    return (TARGET, *parts), coords


def _part_dims(ds: xr.Dataset) -> tuple[str, ...]:
    """Return the dimension of tokens or modules, if samples are divided into these."""
    return tuple(dim for dim in (TOKEN, MODULE) if dim in ds.variables["feature"].dims)


def _coords_of(ds: xr.Dataset, dims: tuple[str, ...]) -> dict[Hashable, xr.Variable]:
    """Return the coords that run along some dimensions, such as the text of tokens."""
    return {n: c.variable for n, c in ds.coords.items() if set(dims) & set(c.dims)}


def score_attrs(
    training: xr.Dataset, targets: xr.Dataset, made: Mapping[str, str], *, may_have_failed: bool
) -> dict[str, Any]:
    """Return the attrs of scores: how features were made, and how scores were made from them."""
    attrs = training.attrs
    kept = {name: attrs[name] for name in FEATURE_SPEC if name in attrs and name != "parameters"}
    return as_text(kept) | {
        **VARIABLES["score"].attrs,
        **made,
        "source": attrs.get("source", ""),
        "target_source": targets.attrs.get("source", ""),
        **({"target_on_error": "record"} if may_have_failed else {}),
        "trakdask_version": __version__,
    }
