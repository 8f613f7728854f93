"""Features in, lazy attributions out: scores, scores by group, self-influence.

A score is a product of two operands: the weighted feature of a sample, and the solved feature of a
target. :class:`Solver` makes either, for each estimator.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from scipy import sparse

from trakdask import arrays
from trakdask._version import __version__
from trakdask.arrays.blocks import divided
from trakdask.arrays.memory import Sizes
from trakdask.attribution.estimators import EstimatorLike, TracIn, resolve
from trakdask.attribution.folds import require_all_samples
from trakdask.attribution.groups import group_codes, require_group_coord
from trakdask.attribution.metrics import COMBINATION, MetricLike, measure_of
from trakdask.attribution.protocol import Absolute, Estimator, GramEstimator
from trakdask.attribution.regularization import Regularized, regularize
from trakdask.execution import require_memory
from trakdask.provenance import FEATURE_SPEC, as_text, require_comparable
from trakdask.variables import (
    CHECKPOINT,
    MODULE,
    SAMPLE,
    TARGET,
    TARGET_PREFIX,
    TOKEN,
    VARIABLES,
    aligned,
    coords_along,
    lazy_features,
    validate,
)

_MOST_TARGETS = 4096
"""In a block. More would make large tiles, where a selection of targets needs little."""

_MOST_COMBINATIONS = 2**20
"""Combinations of values of several coords. Each is a row of the sums; few may have samples."""

_MEASURED = f"{TARGET_PREFIX}{COMBINATION}"

Labels = tuple[tuple[str, ...], dict[Hashable, Any]]
"""Dimensions, and coords along them."""


def score(
    features: xr.Dataset,
    targets: xr.Dataset,
    estimator: EstimatorLike = "auto",
    *,
    average: bool = True,
) -> xr.DataArray:
    """Attribute the output of every target to every training sample.

    A positive score means that training on z raised the output of t. This holds for every
    estimator. With λ_c of :func:`damping`, weights h and g, and K_c = Σ_z h_c(z) φ_c(z) φ_c(z)ᵀ,

        score(z, t) = mean_c[ φ_c(z)ᵀ (K_c + λ_c I)⁻¹ φ_c(t) ] · mean_c[ g_c(z) ].

    Parameters
    ----------
    features
        Features of the training samples. If they hold the ``gram`` of this estimator, as
        :func:`save` keeps it, it is used: rows that were selected from them are scored under the
        gram matrix of all samples, and only their blocks are read. Otherwise it is computed from
        these features first. Then stored features are read twice, and other features stay in
        memory until they are scored. ``features.assign(gram=td.gram(features, weights=h))`` has
        weights h of your own in K.
    targets
        Features of the samples to explain, made with the same model and projector.
    estimator
        A value: :class:`Soft`, :class:`Trak`, :class:`RelatIF`, :class:`GradDot`, :class:`GradCos`
        or :class:`TracIn`, which say what they are, and have λ among their options. Or a short form
        of one with its defaults: ``"soft"``, ``"trak"``, ``"relatif"``, ``"grad_dot"``,
        ``"grad_cos"``. ``"auto"`` is the one that the task names as its ``default_estimator``:
        ``"soft"`` for classification into one of several classes, or by several labels, else
        ``"trak"``.
    average
        ``False`` keeps the ensemble: (sample, target, checkpoint), whose mean is the score.

    Returns
    -------
    Lazy DataArray ``score`` (sample, target), float32 (float64 of float64 features), in tiles of
    sample blocks × target blocks; blocks of more than 4096 targets are divided. Coords of the
    training samples keep their names, coords of the targets get the prefix ``target_``.

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
    MemoryError
        If a tile, or a gram matrix that is to be computed, takes more memory than any worker of the
        active client has; without a client, than this machine has.

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

    References
    ----------
    Park et al. 2023, equation 17.

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
    training, explained = operands_of(features, targets)
    labels = labels_of_scores(training, explained)
    operands = solver(training, resolve(training, estimator))
    feature, weight = operands.features.feature.data, operands.weight(operands.features)
    vectors, pooled = operands.vectors(explained), operands.estimator.pooled
    require_tiles(feature, vectors, average=average)
    data = arrays.score.score(feature, vectors, weight, average=average, pooled=pooled)
    attrs = score_attrs(training, targets, operands.attrs)
    return labelled("score", labels, data, attrs, None if average else features[CHECKPOINT])


def group_score(
    features: xr.Dataset,
    targets: xr.Dataset,
    estimator: EstimatorLike = "auto",
    *,
    by: str | Sequence[str] | xr.DataArray,
    metric: MetricLike | None = None,
) -> xr.DataArray:
    """Sum the scores of the training samples of each group, without forming the scores.

    Parameters
    ----------
    features, targets, estimator
        As in :func:`score`.
    by
        Name of a coord of the training samples, or a list of several: then there is a group for
        each combination of their values. Missing values belong to no group. Or a DataArray (sample,
        group) with the part of each sample that belongs to each group, such as its authors'. A
        store has no lists as coords; see Examples for parts that pandas makes of lists.
    metric
        A metric of all outputs, as :func:`trakdask.metric` takes it. The result, (``by``, target)
        with one target, is how much each group raised it, M(f) - M(f - sums), mean over
        checkpoints: the group's sums of scores are subtracted from the outputs, and no derivative
        is needed. See Notes on sizes.

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
        more combinations than samples, and more than a million. With ``metric``: as
        :func:`trakdask.metric`, and if samples were selected.
    MemoryError
        If the sums of all groups take more memory than any worker has.

    Notes
    -----
    Scores rank effects well, and their sizes differ between estimators. With ``metric``, the sums
    are therefore multiplied by one number, so that the scores of all samples add up to half of the
    outputs, if they correlate with them by more than ½ over targets, as sums of :class:`Soft`
    mostly do. Most of the effects that were predicted so for tasks of classification were within a
    factor of two of the effects of retraining; otherwise they are too small, often by a factor of
    four and more (``tests/benchmarks/results/2026-11-24-metrics.txt``).

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> features = features.assign_coords(source=("sample", ["web", "web", "wiki", "book"] * 2))
    >>> td.group_score(features, features, by=["source", "label"]).shape
    (3, 2, 8)

    Samples with several authors, who get equal parts of them (``parts.reindex(sample=range(8),
    fill_value=0)`` adds samples without authors):

    >>> import pandas as pd
    >>> import xarray as xr
    >>> authors = pd.Series([["Ada"], ["Ada", "Bo"], ["Bo", "Cy"], ["Cy"]] * 2).explode()
    >>> parts = pd.crosstab(authors.index, authors, normalize="index")
    >>> parts = xr.DataArray(parts, dims=("sample", "author"))
    >>> parts[1].to_series().to_dict()
    {'Ada': 0.5, 'Bo': 0.5, 'Cy': 0.0}
    >>> td.group_score(features, features, by=parts).sizes
    Frozen({'author': 3, 'target': 8})
    """
    training, explained = operands_of(features, targets)
    operands = solver(training, resolve(training, estimator))
    if metric is not None:
        require_all_samples(training)
        measure = measure_of(metric, explained)
        operands.attrs["metric"] = measure.name
    # With a metric, one group more has what belongs to no other, so that groups are all samples.
    if isinstance(by, xr.DataArray):
        labels, members, n_groups = labels_of_members(training, explained, by)
        n = math.prod(n_groups)
        if metric is not None:
            members = sparse.hstack([members, 1 - members.sum(axis=1)[:, None]], format="csr")
        sums = operands.member_sums(operands.features, members)
    else:
        labels, codes, n_groups = labels_of_groups(training, explained, by)
        n = math.prod(n_groups)
        if metric is not None:
            codes = np.where(codes < 0, n, codes)
        sums = operands.group_sums(operands.features, codes, n + (metric is not None))
    data = arrays.score.score(sums, operands.vectors(explained), None)
    if metric is not None:
        data = measure.raised_by(data, data.sum(0), explained.output.data.T)[:n, None]
        names, coords = labels[0][: len(n_groups)], labels[1]
        name = (TARGET,), np.array([measure.name], object)
        labels = (*names, TARGET), {k: coords[k] for k in names} | {_MEASURED: name}
    data = data.reshape((*n_groups, *data.shape[1:]))
    return labelled("score", labels, data, score_attrs(training, targets, operands.attrs))


def self_influence(
    features: xr.Dataset,
    estimator: EstimatorLike = "auto",
    *,
    average: bool = True,
) -> xr.DataArray:
    """Return how much training on each sample lowered its own loss: g(z) · score(z, z), not < 0.

    mean_c[ φ_c(z)ᵀ (K_c + λ_c I)⁻¹ φ_c(z) ] · mean_c[ g_c(z) ]². Large for samples that the model
    had to memorise, such as those with wrong labels.

    Parameters
    ----------
    features
        As in :func:`score`.
    estimator
        :class:`Trak` or :class:`Soft`; :class:`GradDot` is mean_c ‖φ_c(z)‖² · mean_c[Q_c(z)]².
    average
        ``False`` keeps ``checkpoint``.

    Returns
    -------
    Lazy DataArray ``self_influence`` (sample), float64, or (sample, checkpoint).

    Notes
    -----
    Cost: 2 p² flops per sample and checkpoint beside the cost of the gram matrix, block by block.

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
    features, operands, forms = self_influence_forms(features, estimator)
    g = operands.estimator.g(operands.features)
    data = arrays.weights.self_influence(forms, g, average=average)
    variable = VARIABLES["self_influence"]
    labels = (SAMPLE,), coords_along(features, SAMPLE)
    checkpoint = None if average else features[CHECKPOINT]
    return labelled(variable.name, labels, data, variable.attrs, checkpoint)


# --------------------------------------------------------------------------------- the operands


def self_influence_forms(
    features: xr.Dataset, estimator: EstimatorLike
) -> tuple[xr.Dataset, Solver, da.Array]:
    """Return features, their solver, and φ_c(z)ᵀ (K_c + λ_c I)⁻¹ φ_c(z), (sample, checkpoint)."""
    validate(features, ["feature", "out_to_loss"], what="features")
    features = lazy_features(features)
    resolved = resolve(features, estimator)
    if resolved.norms or not resolved.pooled:
        raise ValueError(
            f"expected an estimator with a self-influence, got {resolved}; try estimator='trak', "
            "'soft' or 'grad_dot'"
        )
    operands = solver(features, resolved)
    if operands.matrix is None:
        return features, operands, arrays.weights.squared_norm(features.feature.data)
    data = operands.features.feature.data
    sizes = Sizes.of(data)
    require_memory(
        arrays.memory.leverage(sizes, sizes.proj_dim),
        f"the products of a block of {sizes.rows} samples with a gram matrix",
        "try fewer columns, or smaller blocks: features.chunk(sample=...)",
    )
    return features, operands, arrays.solve.leverage(operands.matrix.inverse, data)


def require_tiles(
    feature: da.Array, vectors: da.Array, *, average: bool = True, errors: bool = False
) -> None:
    """Refuse tiles of scores that no worker has the memory for."""
    sizes, targets = Sizes.of(feature), Sizes.of(vectors)
    if not average:
        sizes, targets = (replace(of, n_checkpoints=1) for of in (sizes, targets))
    require_memory(
        arrays.memory.score(sizes, targets, errors=errors),
        f"the scores of a block of {sizes.rows} samples for {targets.rows} targets",
        "try smaller blocks: features.chunk(sample=...), targets.chunk(sample=...)",
    )


def require_sums(feature: da.Array, n_groups: int, n_folds: int = 1) -> None:
    """Refuse sums of features by group that no worker has the memory for."""
    require_memory(
        arrays.memory.group_sums(Sizes.of(feature), n_groups, n_folds),
        f"the sums of {n_groups} groups",
        "try groups that are larger, and so fewer, or td.score for some of the samples",
    )


def operands_of(features: xr.Dataset, targets: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """Check the features of training samples and of targets, and return them with lazy arrays."""
    validate(features, ["feature", "out_to_loss"], what="features")
    validate(targets, ["feature"], what="targets")
    require_comparable(features, targets)
    targets = lazy_features(targets)
    feature = targets["feature"].variable
    sizes = divided(feature.chunksizes[SAMPLE], _MOST_TARGETS)
    if sizes != feature.chunksizes[SAMPLE]:
        targets = targets.assign(feature=feature.copy(data=feature.data.rechunk({0: sizes})))
    return lazy_features(features), targets


@dataclass(frozen=True)
class Solver:
    """The two operands of an estimator's product; each can be asked for alone.

    ``features`` of all training samples are compared with their norms as they are read, if their
    gram matrix is stored. ``estimator`` has the weights that it has in scores.
    ``matrix`` is None where there is no gram matrix; ``attrs`` say how scores are made.
    """

    features: xr.Dataset
    estimator: Estimator
    matrix: Regularized | None
    attrs: dict[str, str]

    def solve(self, vectors: da.Array) -> da.Array:
        """Return (K + λ)⁻¹ of vectors, (row, proj_dim, checkpoint); them where there is no K."""
        matrix = self.matrix
        return vectors if matrix is None else arrays.solve.solve(matrix.inverse, vectors)

    def vectors(self, targets: xr.Dataset) -> da.Array:
        """Return what features are multiplied with, for some targets."""
        return self.estimator.vectors(self.solve(targets.feature.data), targets)

    def weight(self, of: xr.Dataset) -> da.Array:
        """Return the weight of each sample, (sample, checkpoint)."""
        return self.estimator.weight(of, None if self.matrix is None else self.matrix.inverse)

    def fold_weights(self, of: xr.Dataset) -> da.Array:
        """Return the factor of each sample where a checkpoint is left out, (sample, fold)."""
        inverse = None if self.matrix is None else self.matrix.inverse
        return self.estimator.fold_weights(of, inverse)

    def group_sums(self, of: xr.Dataset, codes: np.ndarray, n_groups: int) -> da.Array:
        """Return the weighted sum of the features of each group of samples."""
        require_sums(of.feature.data, n_groups)
        return arrays.groups.group_sum(
            of.feature.data, self.weight(of), codes, n_groups, pooled=self.estimator.pooled
        )

    def member_sums(self, of: xr.Dataset, members: sparse.csr_array) -> da.Array:
        """Return the weighted sum of the features of each group, whose samples count in parts."""
        weight = self.weight(of)
        weight = arrays.weights.pooled(weight) if self.estimator.pooled else weight
        require_sums(of.feature.data, members.shape[1])
        sums: da.Array = arrays.jackknife.member_sums(of.feature.data, weight[:, None], members)
        one: da.Array = sums[:, 0]
        return one


def solver(features: xr.Dataset, estimator: Estimator) -> Solver:
    """Return the solver of a resolved estimator; features are all training samples', chunked."""
    of_scores = estimator.of_scores(features)
    attrs = {"estimator": estimator.name, "formula": of_scores.formula}
    if not isinstance(estimator, GramEstimator):
        if isinstance(estimator, TracIn):
            attrs["learning_rates"] = ", ".join(f"{rate:g}" for rate in estimator.rates)
        return Solver(features, of_scores, None, attrs)
    matrix, damping = regularize(features, estimator), estimator.damping
    rule = f"{damping.value}" if isinstance(damping, Absolute) else matrix.rules[-1]
    by_outputs = "cross-validation" if estimator.rule == "cross_validation" else "completeness"
    attrs["damping"] = rule if matrix.choice is None else by_outputs
    attrs["gram_weights"] = matrix.gram_weights
    return Solver(matrix.features, of_scores, matrix, attrs)


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


def labels_of_members(
    samples: xr.Dataset, targets: xr.Dataset, by: str | Sequence[str] | xr.DataArray
) -> tuple[Labels, sparse.csr_array, list[int]]:
    """Return the same as :func:`labels_of_groups`, but the part of each sample in each group.

    The parts are sparse, (sample, group): one group each, unless ``by`` is a DataArray of parts.

    Raises
    ------
    ValueError
        As :func:`labels_of_groups`; if an array has other dimensions, or is not finite.
    """
    if not isinstance(by, xr.DataArray):
        labels, codes, sizes = labels_of_groups(samples, targets, by)
        is_member = codes >= 0
        starts = np.concatenate([[0], np.cumsum(is_member)])
        ones = np.ones(starts[-1], np.float32)
        shape = (len(codes), math.prod(sizes))
        return labels, sparse.csr_array((ones, codes[is_member], starts), shape), sizes
    if by.ndim != 2 or SAMPLE not in by.dims or not np.isfinite(by.values).all():
        raise ValueError(
            f"expected by as finite parts of samples in groups, (sample, group), got {by.dtype} "
            f"{by.dims}; try xr.DataArray(parts, {{'author': names}}, ('sample', 'author'))"
        )
    by = by.transpose(SAMPLE, ...)
    name = str(by.dims[1])
    parts = aligned(by.drop_vars(name, errors="ignore"), samples, what="by")
    dims, coords = _labels_of_targets(targets)
    coords[name] = by[name].variable
    return ((name, *dims), coords), sparse.csr_array(parts.values), [by.sizes[name]]


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
