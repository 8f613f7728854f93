"""Features in, lazy attributions out: scores, scores by group, self-influence.

A score is a product of two operands: the weighted feature of a sample, and the solved feature of a
target. :class:`Solver` makes either, for each estimator.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask._version import __version__
from trakdask.arrays.blocks import divided
from trakdask.attribution.estimators import (
    DEFAULT_ESTIMATOR,
    DEFAULT_POWER,
    GRAM_POWER,
    Absolute,
    Damping,
    Estimator,
    Options,
    Power,
    Weights,
    gather_options,
)
from trakdask.attribution.grams import Regularized, adds_wrong_classes, regularize
from trakdask.attribution.groups import group_codes, require_group_coord
from trakdask.provenance import FEATURE_SPEC, as_text, require_comparable
from trakdask.variables import (
    CHECKPOINT,
    DAMPING,
    GRAM,
    MODULE,
    N_SAMPLES,
    SAMPLE,
    TARGET,
    TARGET_PREFIX,
    TOKEN,
    VARIABLES,
    checkpoint_names,
    coords_along,
    lazy_features,
    validate,
)

_PRODUCT = "phi_c(z) (K_c + damping_c I)^-1"
_FORMULAS = {
    "trak": f"mean_c[{_PRODUCT} phi_c(t)] mean_c[Q_c(z)]",
    "relatif": f"mean_c[{_PRODUCT} phi_c(t)] sign(Q(z)) / sqrt(mean_c[{_PRODUCT} phi_c(z)])",
    "grad_dot": "mean_c[phi_c(z) phi_c(t)] mean_c[Q_c(z)]",
    "grad_cos": "mean_c[cos(phi_c(z), phi_c(t))] sign(Q(z))",
    "tracin": "sum_c[learning_rate_c Q_c(z) phi_c(z) phi_c(t)]",
}

LOGIT_VARIANCE = "logit_variance"
"""In the attrs of the stored λ: how much log((1 - q)/q) varies at each checkpoint."""

_MOST_TARGETS = 4096
"""In a block. More would make large tiles, of which a selection of targets needs little."""

_MOST_COMBINATIONS = 2**20
"""Of the values of several coords. Each is a row of the sums, although few may have samples."""

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
        these features: those of :func:`open` are read twice, and others stay in memory until
        they are scored.
    targets
        Features of the samples to explain, made with the same model and projector.
    estimator
        ``"auto"``: ``"soft"`` for classification into one of several classes, or by several labels,
        else ``"trak"``. ``"trak"``: h = 1, g = Q, as published. ``"soft"``: with q = Q in [0, 1]
        and a = ``power``, h = q^a (1 - q), g = q^a: the curvature and the gradient of one loss,
        flatter than the real one; a = 1 is the Gauss-Newton influence function. K also has the
        variable ``wrong_classes`` of the features, if that is there (:func:`wrong_classes`).
        ``"relatif"``: TRAK's score by the square root of the sample's self-influence. Without a
        gram matrix: ``"grad_dot"``, mean_c[φ_c(z)·φ_c(t)] · mean_c[Q_c(z)]; ``"grad_cos"``,
        mean_c[cos(φ_c(z), φ_c(t))] times the sign of Q; ``"tracin"``, Σ_c η_c Q_c(z) φ_c(z)·φ_c(t).
    power
        a of ``"soft"``, in [0, 1]; lower for models whose training was stopped early. ``"auto"``: ½
        in h; in g it rises from ½ to 1 as the model's confidence becomes more uniform (by the
        standard deviation of log((1 - q)/q) over training samples: ½ from 1.4 on, 1 up to 0.8). A
        squared error needs 1, which there is ``"trak"``.
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
    ``features = td.open(store).persist()`` first, on threads or on a cluster: then λ, eigenvectors
    and features are in memory, and only the targets are read. Chunks of a local store are mapped
    there: other processes of the machine share them, and they take no memory of their own. So a
    cluster of one machine reads a local store as fast without ``persist``.
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
    training, explained = _operands(features, targets)
    options = gather_options(
        training, estimator, power, damping, calibrate, weights, learning_rates
    )
    labels = labels_of_scores(training, explained)
    operands = solver(training, options)
    feature, weight = operands.features.feature.data, operands.weight(operands.features)
    data = arrays.score.score(
        feature, operands.vectors(explained), weight, average=average, pooled=operands.pooled
    )
    attrs = score_attrs(training, targets, operands.attrs)
    return labelled("score", labels, data, attrs, None if average else features[CHECKPOINT])


def group_score(
    features: xr.Dataset,
    targets: xr.Dataset,
    *,
    by: str | Sequence[str],
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
        Name of a coord of the training samples, or a list of several: then there is a group for
        each combination of their values. Missing values belong to no group.

    Returns
    -------
    Lazy DataArray ``score`` (``by``, target), one dimension per coord, groups sorted: what
    ``score(features, targets).groupby(by).sum()`` would give, at the cost of one pass over the
    features, whatever the number of targets. As there, samples that failed are left out. A
    combination without samples sums to 0.

    Raises
    ------
    ValueError
        If there is no such coord, the result has a coord of the targets of that name, or there are
        more combinations than samples, and more than a million.

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> features = features.assign_coords(source=("sample", ["web", "web", "wiki", "book"] * 2))
    >>> td.group_score(features, features, by=["source", "label"], damping=0.1).shape
    (3, 2, 8)
    """
    training, explained = _operands(features, targets)
    labels, codes, n_groups = labels_of_groups(training, explained, by)
    options = gather_options(
        features, estimator, power, damping, calibrate, weights, learning_rates
    )
    operands = solver(training, options)
    sums = operands.group_sums(operands.features, codes, math.prod(n_groups))
    data = arrays.score.score(sums, operands.vectors(explained), None)
    data = data.reshape((*n_groups, *data.shape[1:]))
    return labelled("score", labels, data, score_attrs(training, targets, operands.attrs))


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
    validate(features, ["feature", "out_to_loss"], what="features")
    allowed = ("auto", "trak", "soft", "grad_dot")
    features = lazy_features(features)
    options = gather_options(
        features, estimator, power, damping, calibrate, weights, allowed=allowed
    )
    if options.has_gram:
        matrix = regularize(features, options)
        features = matrix.features
        forms = arrays.solve.leverage(matrix.inverse, features.feature.data)
    else:
        forms = arrays.weights.squared_norm(features.feature.data)
    g = loss_weights(options, features).loss_data(features)
    data = arrays.weights.self_influence(forms, g, average=average)
    variable = VARIABLES["self_influence"]
    labels = (SAMPLE,), coords_along(features, SAMPLE)
    checkpoint = None if average else features[CHECKPOINT]
    return labelled(variable.name, labels, data, variable.attrs, checkpoint)


# --------------------------------------------------------------------------------- the operands


def _operands(features: xr.Dataset, targets: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """Check the features of training samples and of targets, and return them with lazy arrays."""
    validate(features, ["feature", "out_to_loss"], what="features")
    validate(targets, ["feature"], what="targets")
    require_comparable(features, targets)
    targets = lazy_features(targets)
    feature = targets["feature"].variable
    sizes = divided(feature.chunksizes[SAMPLE], _MOST_TARGETS)
    if sizes != feature.chunksizes[SAMPLE]:
        targets = targets.assign(feature=feature.chunk({SAMPLE: sizes}))
    return lazy_features(features), targets


@dataclass(frozen=True)
class Solver:
    """The two operands of an estimator's product, each of which can be asked for alone.

    ``features`` are those of all training samples, which are compared with their norms as they are
    read if their gram matrix is stored. ``matrix`` is None where there is no gram matrix; ``attrs``
    say how scores are made; ``loss`` are the weights of samples.
    """

    features: xr.Dataset
    options: Options
    matrix: Regularized | None
    attrs: dict[str, str]
    loss: Weights

    @property
    def pooled(self) -> bool:
        """Whether the weights of a sample are replaced by their mean over checkpoints."""
        return self.options.estimator not in ("grad_cos", "tracin")

    def solve(self, vectors: da.Array) -> da.Array:
        """Return (K + λ)⁻¹ of vectors, (row, proj_dim, checkpoint); them where there is no K."""
        matrix = self.matrix
        return vectors if matrix is None else arrays.solve.solve(matrix.inverse, vectors)

    def vectors(self, targets: xr.Dataset) -> da.Array:
        """Return what features are multiplied with, for some targets."""
        solved = self.solve(targets.feature.data)
        if self.options.estimator == "grad_cos":
            inverse = _inverse_root(arrays.weights.squared_norm(targets.feature.data))
            solved = solved * inverse.astype(solved.dtype)[:, None, :]
        return solved

    def weight(self, of: xr.Dataset) -> da.Array:
        """Return the weight of each sample, (sample, checkpoint)."""
        weight, rates = self.loss.loss_data(of), self.options.learning_rates
        if not self.pooled:
            if rates is None:
                norm = arrays.weights.squared_norm(of.feature.data)
                weight = _sign(weight) * _inverse_root(norm)
            else:  # the product is a mean over checkpoints; TracIn is a sum
                weight = weight * (len(rates) * rates)
            # A sample that failed at one checkpoint has no mean over them.
            weight = weight + 0 * weight.mean(axis=1, keepdims=True)
        elif self.options.estimator == "relatif" and self.matrix is not None:
            leverage = arrays.solve.leverage(self.matrix.inverse, of.feature.data)
            weight = _sign(weight) * _inverse_root(leverage.mean(axis=1, keepdims=True))
        return weight

    def group_sums(self, of: xr.Dataset, codes: np.ndarray, n_groups: int) -> da.Array:
        """Return the weighted sum of the features of each group of samples."""
        return arrays.groups.group_sum(
            of.feature.data, self.weight(of), codes, n_groups, pooled=self.pooled
        )


def solver(features: xr.Dataset, options: Options) -> Solver:
    """Return the solver of an estimator; features are those of all training samples, chunked."""
    name, loss = options.estimator, loss_weights(options, features)
    attrs: dict[str, str] = {"estimator": name}
    if not options.has_gram:
        attrs["formula"] = _FORMULAS[name]
        if options.learning_rates is not None:
            attrs["learning_rates"] = ", ".join(f"{rate:g}" for rate in options.learning_rates)
        return Solver(features, options, None, attrs, loss)
    matrix, damping = regularize(features, options), options.damping
    rule = f"{damping.value}" if isinstance(damping, Absolute) else matrix.rules[-1]
    attrs |= {
        "formula": _FORMULAS.get(name, f"mean_c[{_PRODUCT} phi_c(t)] mean_c[{loss.loss}]"),
        "damping": rule if matrix.choice is None else "completeness",
        "gram_weights": options.weights.gram if options.gram_weights is None else "given",
    }
    if adds_wrong_classes(features, options):
        attrs["gram_weights"] += f", and {1 / GRAM_POWER:g} q^{GRAM_POWER:g} between wrong classes"
    return Solver(matrix.features, options, matrix, attrs, loss)


def loss_weights(options: Options, features: xr.Dataset) -> Weights:
    """Return the weights of an estimator; features are those of all training samples, chunked.

    Where the estimator leaves the power to the outputs, it is that of scores.
    """
    if not options.is_adaptive:
        return options.weights
    names, attrs = checkpoint_names(features), {}
    if DAMPING in features and GRAM in features:
        attrs = features[DAMPING].attrs
    # Of stores; those of "trak" have none. Rows that were selected from the store have the power of
    # the whole, as they have its gram matrix.
    variances = attrs.get(LOGIT_VARIANCE, ())
    by_name = dict(zip(attrs.get("pooled_checkpoints", ()), variances, strict=False))
    if set(names) <= set(by_name) and features.sizes[SAMPLE] <= attrs[N_SAMPLES]:
        return Weights(arrays.weights.power_of(np.array([by_name[name] for name in names])))
    return Weights(arrays.weights.adaptive_power(features.out_to_loss.data))


def _inverse_root(x: da.Array) -> da.Array:
    """Return 1/√x, NaN where x is 0."""
    root: da.Array = 1 / da.sqrt(da.where(x > 0, x, np.nan))
    return root


def _sign(q: da.Array) -> da.Array:
    """Return the sign of the mean of Q over checkpoints, (sample, 1); that of 0 is +1."""
    sign: da.Array = da.where(q.mean(axis=1, keepdims=True) < 0, -1.0, 1.0)
    return sign


# ----------------------------------------------------------------------------------- the labels


def labelled(
    name: str, labels: Labels, data: Any, attrs: Any, checkpoint: xr.DataArray | None = None
) -> xr.DataArray:
    """Return a DataArray without copying its coords, as the constructor of DataArray does.

    ``checkpoint`` is the coord of the last axis, if checkpoints are not averaged.
    """
    dims, coords = labels
    if checkpoint is not None:
        dims, coords = (*dims, CHECKPOINT), coords | {CHECKPOINT: checkpoint}
    return xr.Dataset({name: (dims, data, attrs)}, coords=coords)[name]


def labels_of_scores(samples: xr.Dataset, targets: xr.Dataset) -> Labels:
    """Return the dimensions and coords of scores; one side may be divided into tokens or modules.

    Raises
    ------
    ValueError
        If coords of training samples have the names of the targets' coords.
    """
    parts, coords = _labels_of_samples(samples)
    target_dims, target_coords = _labels_of_targets(targets)
    if both := [name for name in coords if name in target_coords]:
        raise ValueError(
            f"expected names of the training samples' coords that scores do not have for the "
            f"targets' coords, got {both[0]!r} for both; try features.rename({{{both[0]!r}: ...}})"
        )
    return (SAMPLE, *parts, *target_dims), coords | target_coords


def labels_of_groups(
    samples: xr.Dataset, targets: xr.Dataset, by: str | Sequence[str]
) -> tuple[Labels, np.ndarray, list[int]]:
    """Return the dimensions and coords of sums of scores by coords, and the samples' groups.

    Groups are numbered as the entries of an array whose shape comes last, with -1 for none.

    Raises
    ------
    ValueError
        If the samples have no such coord, the targets have one of that name, or combinations are
        too many.
    """
    dims, coords = _labels_of_targets(targets)
    names: list[Any] = list(by) if by and isinstance(by, list | tuple) else [by]
    codes, sizes = np.zeros((), np.int8), []
    for name in names:
        require_group_coord(name, coords_along(samples, SAMPLE), [TARGET, *coords])
        numbers, groups = group_codes(samples[name].values)
        coords[name] = name, groups
        sizes.append(len(groups))
        if len(sizes) > 1 and math.prod(sizes) > max(_MOST_COMBINATIONS, samples.sizes[SAMPLE]):
            raise ValueError(
                f"expected up to {_MOST_COMBINATIONS:,} combinations of the values of by, or one "
                f"for each sample, got {math.prod(sizes):,} of {names[: len(sizes)]}; try fewer "
                "coords, or one whose values are the combinations that occur: "
                "assign_coords(group=('sample', values)), and by='group'"
            )
        kind = np.min_scalar_type(-math.prod(sizes) - 1)  # a byte or two for each of 10⁸ samples
        product = codes.astype(kind) * kind.type(len(groups)) + numbers.astype(kind)
        codes = np.where((codes < 0) | (numbers < 0), kind.type(-1), product)
    return ((*names, *dims), coords), codes, sizes


def _labels_of_samples(ds: xr.Dataset) -> Labels:
    """Return the dimension of tokens or modules, if there is one, and all coords of samples."""
    parts = tuple(dim for dim in (TOKEN, MODULE) if dim in ds.variables["feature"].dims)
    coords = ds.coords.variables.items()
    dims = {SAMPLE, *parts}
    return parts, {name: coord for name, coord in coords if coord.dims and set(coord.dims) <= dims}


def _labels_of_targets(targets: xr.Dataset) -> Labels:
    """Return the dimensions and coords of targets, with their prefix."""
    parts, coords = _labels_of_samples(targets)
    labels: dict[Hashable, Any] = {}
    for name, coord in coords.items():
        dims = [TARGET if dim == SAMPLE else dim for dim in coord.dims]
        data = coord.values if coord.dims == (SAMPLE,) else coord.data
        labels[name if name in parts else f"{TARGET_PREFIX}{name}"] = dims, data, coord.attrs
    return (TARGET, *parts), labels


def score_attrs(
    training: xr.Dataset, targets: xr.Dataset, how: Mapping[str, str]
) -> dict[str, Any]:
    """Return the attrs of scores: how features were made, and how scores were made from them."""
    attrs = training.attrs
    kept = {name: attrs[name] for name in FEATURE_SPEC if name in attrs and name != "parameters"}
    return as_text(kept) | {
        **VARIABLES["score"].attrs,
        **how,
        "source": attrs.get("source", ""),
        "target_source": targets.attrs.get("source", ""),
        "trakdask_version": __version__,
    }
