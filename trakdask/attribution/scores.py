"""Features in, lazy attributions out: scores, scores by group, self-influence."""

from __future__ import annotations

import math
from typing import Any, overload

import dask.array as da
import xarray as xr

from trakdask import arrays
from trakdask.attribution.effects import DESCRIPTIONS, group_effects
from trakdask.attribution.estimators import EstimatorLike, resolve
from trakdask.attribution.folds import require_all_samples, require_folds
from trakdask.attribution.labels import (
    By,
    labelled,
    labels_of_groups,
    labels_of_scores,
    labels_without_targets,
    score_attrs,
    with_rest,
)
from trakdask.attribution.metrics import MetricLike, measure_of
from trakdask.attribution.operands import (
    Solver,
    operands_of,
    require_tiles,
    self_influence_forms,
    solver,
)
from trakdask.attribution.uncertainty import bounded
from trakdask.checks import require_flags, require_number
from trakdask.variables import CHECKPOINT, SAMPLE, VARIABLES, coords_along, require_new, validate


@overload
def score(
    features: xr.Dataset,
    targets: xr.Dataset,
    estimator: EstimatorLike = ...,
    *,
    average: bool = ...,
) -> xr.DataArray: ...
@overload
def score(
    features: xr.Dataset,
    targets: xr.Dataset,
    estimator: EstimatorLike = ...,
    *,
    level: float,
    q: float | None = ...,
) -> xr.Dataset: ...
def score(
    features: xr.Dataset,
    targets: xr.Dataset,
    estimator: EstimatorLike = "auto",
    *,
    average: bool = True,
    level: float | None = None,
    q: float | None = None,
) -> xr.DataArray | xr.Dataset:
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
        A value: :class:`Soft`, :class:`Trak`, :class:`RelatIF` or :class:`TracIn`, which say what
        they are, and have λ among their options. Or a short form with its defaults: ``"soft"``,
        ``"trak"``, ``"relatif"``; and two without options or a gram matrix. ``"grad_dot"`` is
        mean_c[φ_c(z)·φ_c(t)] · mean_c[Q_c(z)]. ``"grad_cos"`` is mean_c[cos(φ_c(z), φ_c(t))] times
        the sign of Q, NaN where a feature is 0. ``"auto"`` is the one that the task names as its
        ``default_estimator``: ``"soft"`` for classification into one of several classes, or by
        several labels, else ``"trak"``.
    average
        ``False`` keeps the ensemble: (sample, target, checkpoint), whose mean is the score.
    level
        Return intervals, too, which say how far scores would differ with other seeds: which part of
        such intervals contains the score that infinitely many checkpoints would give, such as 0.9.
    q
        With ``level``: keep only the scores that differ from 0, at this false discovery rate: the
        expected share of the kept scores of a target that are 0 in truth. The others are NaN, which
        :func:`top_k` never ranks.

    Returns
    -------
    Lazy DataArray ``score`` (sample, target), float32 (float64 of float64 features), in tiles of
    sample blocks × target blocks; blocks of more than 4096 targets are divided. Coords of the
    training samples keep their names, coords of the targets get the prefix ``target_``.

    With ``level`` a lazy Dataset: ``score``, ``lower``, ``upper``, and ``snr``, the score divided
    by its standard error. :func:`top_k` ranks it by any of them.

    Raises
    ------
    StoreMismatchError
        If features and targets were made differently; the field is named.
    ValueError
        If an option does not make sense; if ``gram`` is of fewer samples than there are, or has a
        dimension ``sample``; if rows were selected, and another gram matrix of all is needed than
        the one at hand. When computed: if ``feature`` was changed since its ``gram`` and
        ``feature_norm`` were made; if q of ``"soft"`` is not in [0, 1], or features are not finite;
        ``numpy.linalg.LinAlgError`` if the damped gram matrix is singular. With ``level``: if there
        are fewer than five checkpoints.
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

    Intervals need independent checkpoints: trained with other seeds, or on other samples.
    Checkpoints of one training resemble each other, and their intervals are too narrow. Only the
    draw of checkpoints varies; λ and the power of ``"soft"`` are held fixed. Scores are a linear
    model of retraining, whose error :func:`trakdask.evaluate.cross_validate` grades. The errors are
    a jackknife: a score is a product of two means over checkpoints for most estimators, and each
    checkpoint is left out of both. The bounds are quantiles of Student's distribution.
    :class:`TracIn` is a sum along a training; here its terms are taken for independent. Intervals
    take 76 bytes of memory more per entry of a tile.

    With ``q``, all samples, or groups, of a target are one family of two-sided tests, by the
    procedure of Benjamini and Hochberg. P-values are rounded up by at most 3 %. The scores are
    computed once more to count them, and not kept.

    References
    ----------
    Park et al. 2023, equation 17. Efron & Stein 1981 (jackknife); Benjamini & Hochberg 1995.
    Coverage of intervals: ``2026-11-24-intervals.txt``.

    Examples
    --------
    Which of 120 irises helped the models most to recognise the first of 30 others?

    >>> import trakdask as td
    >>> features, targets = td.examples.iris_features()
    >>> str(targets.species.values[0])
    'versicolor'
    >>> scores = td.score(features, targets)  # lazy
    >>> td.top_k(scores, 3).compute().species[0].values.tolist()
    ['versicolor', 'versicolor', 'versicolor']

    The scores of each of the five checkpoints, whose mean is the score:

    >>> apart = td.score(features, targets, average=False)
    >>> apart.dims
    ('sample', 'target', 'checkpoint')
    >>> spread = apart.std("checkpoint", ddof=1) / 5**0.5  # its standard error

    Intervals, and a ranking by their lower bounds, of what helped for certain:

    >>> found = td.score(features, targets, level=0.9)
    >>> list(found)
    ['score', 'lower', 'upper', 'snr']
    >>> td.top_k(found, 3, rank_by="lower").compute().species[0].values.tolist()
    ['versicolor', 'versicolor', 'versicolor']
    """
    require_flags(average=average)
    if level is not None or q is not None:
        return bounded(features, targets, estimator, level=level, q=q, average=average)
    training, explained = operands_of(features, targets)
    # 1. Labels first: names that clash are an error before λ is looked for, which may warn.
    labels = labels_of_scores(training, explained)
    operands = solver(training, resolve(training, estimator))
    # 2. The operands of the product: features of samples, which the solver may check for changes,
    # and their weights; and solved features of targets.
    feature, weight = operands.features.feature.data, operands.weight(operands.features)
    vectors, pooled = operands.vectors(explained), operands.estimator.pooled
    # 3. Tiles of their product, one for each block of samples and of targets.
    require_tiles(feature, vectors, average=average)
    data = arrays.score.score(feature, vectors, weight, average=average, pooled=pooled)
    attrs = score_attrs(training, targets, operands.attrs)
    return labelled("score", labels, data, attrs, None if average else features[CHECKPOINT])


@overload
def group_score(
    features: xr.Dataset,
    targets: xr.Dataset,
    estimator: EstimatorLike = ...,
    *,
    by: By,
    metric: MetricLike | None = ...,
    effect: bool = ...,
    share: bool = ...,
) -> xr.DataArray: ...
@overload
def group_score(
    features: xr.Dataset,
    targets: xr.Dataset,
    estimator: EstimatorLike = ...,
    *,
    by: By,
    metric: MetricLike | None = ...,
    effect: bool = ...,
    level: float,
    q: float | None = ...,
) -> xr.Dataset: ...
def group_score(
    features: xr.Dataset,
    targets: xr.Dataset,
    estimator: EstimatorLike = "auto",
    *,
    by: By,
    metric: MetricLike | None = None,
    effect: bool = False,
    share: bool = False,
    level: float | None = None,
    q: float | None = None,
) -> xr.DataArray | xr.Dataset:
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
        A metric of all outputs, as :func:`trakdask.evaluate.metric` takes it. The result, (``by``,
        target) with one target, is how much each group raised it, M(f) - M(f - effects), mean over
        checkpoints: the group's effects are subtracted from the outputs, and no derivative is
        needed.
    effect
        Return effects in units of the output f, or of the metric: the value of models of all
        samples, less the value of models without the group. Where an effect is positive, models
        without the group have a lower output: a classifier is less sure of the right class, and its
        loss higher. Needs checkpoints of known halves, see
        :func:`trakdask.evaluate.train_on_halves`, and 20 or more targets.
    share
        Return which share of the scores of all targets each group has, (``by``): Σ_t Σ_z m(z)
        score(z, t) / Σ_t Σ_z score(z, t), with the part m of the sample z that belongs to the
        group, and all samples in the denominator. Groups that harmed the targets have negative
        shares. If each sample belongs to groups entirely, shares add up to 1. Leave out targets
        that failed. A regression has none, since its outputs have both signs.
    level
        With ``effect``: return a Dataset with prediction intervals, ``lower`` and ``upper`` for a
        single retraining without the group, and ``mean_lower`` and ``mean_upper`` for the mean of
        many, such as of 0.9. Else as in :func:`score`: intervals of sums, which cover the draw of
        the checkpoints, and not the error of the method. Shares have none.
    q
        As in :func:`score`, for sums alone.

    Returns
    -------
    Lazy DataArray ``score`` (``by``, target), one dimension per coord, groups sorted: what
    ``score(features, targets).groupby(by).sum()`` would give, at the cost of one pass over the
    features, whatever the number of targets. As there, samples that failed are left out, but a
    group whose samples all failed is NaN. A combination without samples sums to 0. With a unit its
    name is ``effect``, and its ``units`` and ``sign``, in words, are in ``attrs``; of shares it is
    ``share``.

    Raises
    ------
    ValueError
        If there is no such coord, the result has a coord of the targets of that name, or there are
        more combinations than samples, and more than a million. With ``metric``: as
        :func:`trakdask.evaluate.metric`, and if samples were selected. With ``effect``: if
        ``trained_on`` is missing, or, when computed, the same for all checkpoints; if there are
        fewer than four checkpoints, or 20 targets, or samples were selected. With ``share``: of a
        regression, or with bounds. With ``level`` alone: as :func:`score`.
    MemoryError
        If the sums of all groups take more memory than any worker has.

    Warns
    -----
    UserWarning
        Of effects: if a group has more than 30 % of the samples, or all samples of a class. When
        computed: if models of half of the samples have hardly learned.

    Notes
    -----
    **Effects.** Each checkpoint j was trained on a known part of the samples. The scores of the
    others predict its outputs, up to a slope b that all targets have in common, and residuals with
    the variance σ² (:func:`trakdask.evaluate.cross_validate` ranks the same predictions). b is of
    models of half of the data, which a sample changes more than it changes models of all. How much
    more was measured by retraining: the slope of effects is the one with which scores add up to
    half of the outputs, if they correlate with them by more than ½ over targets, but 0.3 b to b;
    else it is 0.75 b. The variance of one retraining without a part γ of the samples is taken to be
    σ² (1 + 3 γ) + (0.3 effect)², that of the mean of many σ² (0.1 + 3 γ) + (0.3 effect)². Bounds
    are quantiles of Student's distribution. σ² is the mean of that of the target and of all. Where
    the mean margin of a classifier is below 1, models of halves have hardly learned. Then the slope
    is b, and 30 γ takes the place of 3 γ.

    These numbers gave about the right coverage on small tasks, which the guide to groups lists.
    They are untested for groups of more than 30 % and for a class that vanishes with its source.

    **Metrics.** Without ``effect``, sums are multiplied by one number, so that the scores of all
    samples add up to half of the outputs, if they correlate with them by more than ½ over targets,
    as sums of :class:`Soft` mostly do. Most of the effects that were predicted so for tasks of
    classification were within a factor of two of the effects of retraining; otherwise they are too
    small, often by a factor of four and more (``tests/benchmarks/results/2026-11-24-metrics.txt``).

    **Cost.** Effects take one more pass over the features, 2 n p C² flops. Intervals of sums take
    one more sum of features for each checkpoint: C + 1 times the operations and the memory, groups
    × p × C numbers. For a share, targets are added up before they are solved; for
    ``"grad_cos"``, after each of them was divided by its length.

    Examples
    --------
    Which species taught the models to recognise each species, and which one made it harder to
    recognise the virginicas, the last column?

    >>> import trakdask as td
    >>> features, targets = td.examples.iris_features()
    >>> asked = td.combine(targets, by="species")  # one target for each species
    >>> sums = td.group_score(features, asked, by="species").compute()
    >>> sums.species[sums.argmax("species")].values.tolist()
    ['setosa', 'versicolor', 'virginica']
    >>> str(sums.species.values[sums[:, 2].argmin("species")])
    'versicolor'

    Groups of two coords:

    >>> known = features.assign_coords(sure=features.output.mean("checkpoint") > 2)
    >>> td.group_score(known, targets, by=["species", "sure"]).sizes
    Frozen({'species': 3, 'sure': 2, 'target': 30})

    Samples with several authors, who get equal parts of them (``parts.reindex(sample=range(8),
    fill_value=0)`` adds samples without authors):

    >>> import pandas as pd
    >>> import xarray as xr
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> authors = pd.Series([["Ada"], ["Ada", "Bo"], ["Bo", "Cy"], ["Cy"]] * 2).explode()
    >>> parts = pd.crosstab(authors.index, authors, normalize="index")
    >>> parts = xr.DataArray(parts, dims=("sample", "author"))
    >>> parts[1].to_series().to_dict()
    {'Ada': 0.5, 'Bo': 0.5, 'Cy': 0.0}
    >>> td.group_score(features, features, by=parts).sizes
    Frozen({'author': 3, 'target': 8})
    >>> shares = td.group_score(features, features, by=parts, share=True)
    >>> round(float(shares.sum()), 3)
    1.0

    Effects in units of the output, by checkpoints of known halves:

    >>> features = td.testing.simulate_features(60, 4, n_checkpoints=5)
    >>> halves = td.evaluate.subsets(features, 5).rename(subset="checkpoint")
    >>> features = features.assign(trained_on=halves)
    >>> features = features.assign_coords(source=("sample", ["a", "b", "c", "d"] * 15))
    >>> targets = td.testing.simulate_features(30, 4, n_checkpoints=5, seed=1)
    >>> effects = td.group_score(features, targets, by="source", effect=True, level=0.9)
    >>> list(effects), effects.effect.sizes
    (['effect', 'lower', 'upper', 'mean_lower', 'mean_upper'], Frozen({'source': 4, 'target': 30}))
    """
    require_flags(effect=effect, share=share)
    _require_options(effect, share, metric is not None, level, q)
    # 1. Intervals of sums, which need no unit. Those of effects are of another kind, by residuals.
    if not effect and (level is not None or q is not None):
        return bounded(features, targets, estimator, by, level=level, q=q)
    training, explained = operands_of(features, targets)
    # 2. What effects and metrics need to know of the targets, and of all training samples.
    if share and explained.attrs.get("loss_kind") == "squared error":
        raise ValueError(
            "expected outputs that say how right they are for share=True, got a regression, whose "
            "outputs have both signs, and may add up to 0; try metric='loss', effect=True"
        )
    if effect or metric is not None:
        validate(explained, ["output"], what="targets")
        (require_folds if effect else require_all_samples)(training)
    # 3. Sums of scores alone, or in the unit of the output or of the metric.
    measure = None if metric is None else measure_of(metric, explained)
    operands = solver(training, resolve(training, estimator))
    attrs = score_attrs(training, targets, operands.attrs)
    if not effect and measure is None:
        return _sums(operands, explained, by, attrs, share=share)
    labels, found = group_effects(operands, explained, by, measure, effect=effect, level=level)
    attrs["units"] = "output"
    if measure is not None:
        attrs["metric"] = attrs["units"] = measure.name
    attrs["sign"] = "positive: lower without the group"
    if level is None:
        attrs["description"] = DESCRIPTIONS["effect"]
        return labelled("effect", labels, found["effect"], attrs)
    variables = {
        name: (labels[0], data, {"description": DESCRIPTIONS[name]}) for name, data in found.items()
    }
    require_new(labels[1], variables)
    return xr.Dataset(variables, labels[1], attrs | {"level": level})


def _require_options(
    effect: bool, share: bool, is_metric: bool, level: float | None, q: float | None
) -> None:
    """Refuse options of :func:`group_score` that have no meaning together."""
    if share and (effect or is_metric or level is not None or q is not None):
        raise ValueError(
            "expected share= without effect=, metric=, level= and q=, since shares have "
            "neither units nor known errors, got them; try metric='loss', effect=True, level=0.9"
        )
    # The bounds of effects have no p-values. Those of a metric are known in its unit alone.
    if (effect and q is not None) or (is_metric and not effect and (q, level) != (None, None)):
        raise ValueError(
            "expected q= for scores alone, and level= of a metric with effect=True, got "
            f"{q=}, {level=}, {effect=}; try effect=True, level=0.9"
        )
    if effect and level is not None:
        require_number("level", level, high=1, remedy="try level=0.9")


def _sums(
    operands: Solver, targets: xr.Dataset, by: By, attrs: dict[str, Any], *, share: bool
) -> xr.DataArray:
    """Return the sums of scores by group, (group, target), or their shares, (group,)."""
    labels, members, n_groups = labels_of_groups(operands.features, targets, by)
    n = math.prod(n_groups)
    if share:
        members = with_rest(members, n)
    sums = operands.sums(operands.features, members, n + share)
    data = arrays.score.score(sums, operands.vectors(targets, summed=share), None)
    if share:
        # (group + rest, 1): the scores of all samples are the sum over all rows.
        data = (data[:n] / da.nansum(data, 0))[:, 0]  # a group may have failed
        labels = labels_without_targets(labels, len(n_groups))
        attrs["description"] = "share of the sum of all scores"
    if len(n_groups) > 1:
        data = data.reshape((*n_groups, *data.shape[1:]))
    return labelled("share" if share else "score", labels, data, attrs)


@overload
def self_influence(
    features: xr.Dataset,
    estimator: EstimatorLike = ...,
    *,
    average: bool = ...,
) -> xr.DataArray: ...
@overload
def self_influence(
    features: xr.Dataset,
    estimator: EstimatorLike = ...,
    *,
    level: float,
    q: float | None = ...,
) -> xr.Dataset: ...
def self_influence(
    features: xr.Dataset,
    estimator: EstimatorLike = "auto",
    *,
    average: bool = True,
    level: float | None = None,
    q: float | None = None,
) -> xr.DataArray | xr.Dataset:
    """Return how much training on each sample lowered its own loss: g(z) · score(z, z), not < 0.

    mean_c[ φ_c(z)ᵀ (K_c + λ_c I)⁻¹ φ_c(z) ] · mean_c[ g_c(z) ]². Large for samples that the model
    had to memorise, such as those with wrong labels.

    Parameters
    ----------
    features
        As in :func:`score`.
    estimator
        :class:`Trak` or :class:`Soft`; ``"grad_dot"`` is mean_c ‖φ_c(z)‖² · mean_c[Q_c(z)]².
    average
        ``False`` keeps ``checkpoint``.
    level, q
        As in :func:`score`.

    Returns
    -------
    Lazy DataArray ``self_influence`` (sample), float64, or (sample, checkpoint). With ``level`` a
    Dataset with intervals, as :func:`score` returns it.

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
    require_flags(average=average)
    if level is not None or q is not None:
        return bounded(features, None, estimator, level=level, q=q, average=average)
    features, operands, forms = self_influence_forms(features, estimator)
    # Of the solver's features, whose Q raises the error if features were changed.
    g = operands.estimator.g(operands.features)
    data = arrays.weights.self_influence(forms, g, average=average)
    variable = VARIABLES["self_influence"]
    labels = (SAMPLE,), coords_along(features, SAMPLE)
    checkpoint = None if average else features[CHECKPOINT]
    return labelled(variable.name, labels, data, variable.attrs, checkpoint)
