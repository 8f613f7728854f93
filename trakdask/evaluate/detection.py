"""How high samples rank that scores should find: of the target's class, or with its mark."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from trakdask import arrays
from trakdask.arrays.evaluation import Codes, Floats
from trakdask.attribution.groups import group_codes
from trakdask.checks import require_integer
from trakdask.evaluate.labels import (
    BOUND,
    K,
    lazy_data,
    lazy_results,
    mean_with_interval,
    require_bootstrap,
)
from trakdask.variables import SAMPLE, TARGET, TARGET_PREFIX

_NEEDED = "of samples of the target's class and of another, without NaN"


def class_detection(
    scores: xr.DataArray,
    by: str = "label",
    *,
    within: str | None = None,
    ks: Sequence[int] = (1, 10),
    resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> xr.Dataset:
    """Measure how high the samples of each target's class, or subclass, rank.

    Parameters
    ----------
    scores
        Scores (sample, target), with any further dimensions, such as an estimator; every entry
        along these is evaluated, on the same resamples.
    by
        Name of the coord of the samples that holds their class; that of the targets has the prefix
        ``target_``, as :func:`trakdask.score` names it. The name of a finer label, which the model
        was not trained on, makes this subclass detection.
    within
        Name of a coord of the samples and targets; only samples that share it with the target are
        ranked. With ``by="subclass", within="label"``, scores that merely separate the classes do
        not look good.
    ks
        Numbers of top samples, k, for precision and recall.
    resamples, seed, confidence
        Of the bootstrap over targets that makes the intervals.

    Returns
    -------
    Lazy Dataset of float64 variables. Further dimensions of ``scores`` follow those named here:

    - ``auc`` (target): the probability that a sample of the target's class has a higher score than
      another one; 0.5 by chance;
    - ``reciprocal_rank`` (target): 1 / rank of the first sample of the class;
    - ``precision`` (target, k): share of the top k that is of the class; at k = 1 it is 1 or 0;
    - ``recall`` (target, k): share of the class that is in the top k;
    - ``chance`` (target): share of the ranked samples that is of the class, which is the precision
      of a random order;
    - ``auc_mean``, ``reciprocal_rank_mean``, ``precision_mean`` (k), ``recall_mean`` (k): means
      over targets, with ``auc_interval`` (bound), and so on.

    Raises
    ------
    KeyError
        If there is no such coord.
    ValueError
        If a label is missing, no target has samples both of its class and of other ones, or an
        option is out of range; when computed, if all scores are NaN.

    Notes
    -----
    Samples with a NaN are not ranked. Targets without ranked samples of their class, or of others,
    have NaN and are left out of the means. Equal scores count half in ``auc``; elsewhere samples of
    other classes go first among equals, so that constant scores find nothing. The interval of a
    value that is the same for every target has no width.

    A high number says that the ranking is plausible, and no more: scores that only look at the
    labels are perfect here, and a model may owe its output to samples of other classes.

    Scores of different estimators differ by
    ``result.auc.sel(estimator="a") - result.auc.sel(estimator="b")``, target by target.

    Cost: one pass over the scores and a sort per target. Memory: all scores of one chunk of targets
    at a time. Labels are read at once, scores when computed. Results do not depend on chunks.

    References
    ----------
    Hanawa et al. 2021, "Evaluation of similarity-based explanations" (the class and the subclass of
    the top sample); Kwon et al. 2024, "DataInf" (area under the ROC curve, and recall with k the
    number of samples of a class). Quanda (Bareeva et al. 2024) calls these class detection and
    subclass detection.

    Examples
    --------
    >>> import trakdask as td
    >>> scores = xr.DataArray(
    ...     [[3.0, 0.0], [2.0, 1.0], [0.0, 2.0]],
    ...     dims=("sample", "target"),
    ...     coords={"label": ("sample", [0, 0, 1]), "target_label": ("target", [0, 1])},
    ... )
    >>> result = td.evaluate.class_detection(scores, ks=[1, 2])
    >>> float(result.auc_mean), result.precision.values.tolist()
    (1.0, [[1.0, 1.0], [1.0, 0.5]])
    """
    scores = scores.transpose(SAMPLE, TARGET, ...)
    n = scores.sizes[SAMPLE]
    counts = [require_integer("every k", k, 1, n + 1, remedy="try ks=[1]") for k in ks]
    codes, target_codes = _class_codes(scores, by, within)
    chance = _class_shares(codes, target_codes, by)
    values = arrays.evaluation.class_ranks(lazy_data(scores), codes, target_codes, counts)
    options = require_bootstrap(resamples, seed, confidence)
    result = lazy_results(
        _detected, values, chance, len(counts), options, of=scores,
        variables=_detection_variables(scores.dims[2:]), labels={K: counts},
    )  # fmt: skip
    return result.assign_attrs(by=by, within=within or "")


def shortcut_detection(
    scores: xr.DataArray,
    by: str,
    *,
    resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> xr.Dataset:
    """Measure how high samples that carry a mark rank for targets that carry it, and for others.

    Parameters
    ----------
    scores
        Scores (sample, target), with any further dimensions, as in :func:`class_detection`.
    by
        Name of the bool coord of the samples that carry the mark, such as a watermark or a trigger;
        that of the targets has the prefix ``target_``.
    resamples, seed, confidence
        Of the bootstrap over targets that makes the intervals.

    Returns
    -------
    Lazy Dataset of float64 variables. Further dimensions of ``scores`` follow those named here:

    - ``auprc`` (target): the area under the precision-recall curve of finding the marked samples,
      as average precision;
    - ``auprc_mean`` with ``interval`` (bound): over the targets that carry the mark;
    - ``unmarked_mean`` with ``unmarked_interval`` (bound): over the others, NaN if there are none;
    - ``chance`` (): share of marked samples, the area of a random order.

    Raises
    ------
    KeyError
        If there is no such coord.
    ValueError
        If it is not bool, no target or no sample carries the mark, or every sample does; when
        computed, if the scores of all marked targets are NaN.

    Notes
    -----
    Use targets whose prediction the mark decides: those that carry it, are of another class than
    the marked samples, and are still predicted as theirs. If unmarked targets have the same area,
    the marked samples rank high for another reason, such as large gradients.

    Samples with a NaN are not ranked; equal scores share one point of the curve. Cost and memory as
    :func:`class_detection`.

    References
    ----------
    Koh and Liang 2017, section 5; Bareeva et al. 2024 (Quanda), shortcut detection. Average
    precision is that of scikit-learn's ``average_precision_score``.

    Examples
    --------
    >>> import trakdask as td
    >>> scores = xr.DataArray(
    ...     [[3.0, 0.0], [2.0, 1.0], [0.0, 2.0]],
    ...     dims=("sample", "target"),
    ...     coords={
    ...         "marked": ("sample", [True, False, False]),
    ...         "target_marked": ("target", [True, False]),
    ...     },
    ... )
    >>> result = td.evaluate.shortcut_detection(scores, "marked")
    >>> float(result.auprc_mean), float(result.unmarked_mean)
    (1.0, 0.3333)
    """
    scores = scores.transpose(SAMPLE, TARGET, ...)
    positive, is_marked = scores[by].values, scores[f"{TARGET_PREFIX}{by}"].values
    are_bool = positive.dtype == is_marked.dtype == bool
    if not are_bool or not is_marked.any() or positive.all() or not positive.any():
        raise ValueError(
            f"expected {by!r} to be bool, with marked and unmarked samples, and marked targets, "
            f"got {np.count_nonzero(positive)} of {len(positive)} samples ({positive.dtype}) and "
            f"{np.count_nonzero(is_marked)} of {len(is_marked)} targets ({is_marked.dtype}); try "
            "comparing with one value, and targets that carry the mark"
        )
    values, more = arrays.evaluation.average_precision(lazy_data(scores), positive), scores.dims[2:]
    options = require_bootstrap(resamples, seed, confidence)
    result = lazy_results(
        _shortcut, values, is_marked, positive.mean(), options, of=scores,
        variables={
            "auprc": ((TARGET, *more), "area of finding the marked samples"),
            "auprc_mean": (more, "mean of auprc over targets that carry the mark"),
            "interval": ((BOUND, *more), "of auprc_mean"),
            "unmarked_mean": (more, "mean of auprc over the other targets"),
            "unmarked_interval": ((BOUND, *more), "of unmarked_mean"),
            "chance": ((), "share of marked samples, the auprc of a random order"),
        },
    )  # fmt: skip
    return result.assign_attrs(by=by)


def _class_codes(scores: xr.DataArray, by: str, within: str | None) -> tuple[Codes, Codes]:
    """Return class and group of every sample, (sample, 2), and of every target, (target, 2)."""
    classes = _shared_codes(scores, by)
    groups = np.zeros_like(classes) if within is None else _shared_codes(scores, within)
    both = np.stack([classes, groups], axis=1)
    return both[: scores.sizes[SAMPLE]], both[scores.sizes[SAMPLE] :]


def _shared_codes(scores: xr.DataArray, name: str) -> np.ndarray:
    """Return the number of each label: of the samples, then of the targets."""
    labels = scores[name].values, scores[f"{TARGET_PREFIX}{name}"].values
    codes, _ = group_codes(np.concatenate(labels))
    if n_missing := (codes < 0).sum():
        raise ValueError(
            f"expected a label for every sample and target in {name!r}, got {n_missing} without "
            "one; try selecting those that have one"
        )
    return codes


def _class_shares(of_samples: Codes, of_targets: Codes, by: str) -> Floats:
    """Return which share of the samples of each target's group is of its class, (target,)."""
    samples, targets = pd.DataFrame(of_samples), pd.DataFrame(of_targets)
    classes = pd.MultiIndex.from_frame(targets)
    n_relevant = samples.value_counts().reindex(classes, fill_value=0).to_numpy()
    n_ranked = samples[1].value_counts().reindex(targets[1], fill_value=0).to_numpy()
    if not ((n_relevant > 0) & (n_relevant < n_ranked)).any():
        raise ValueError(
            f"expected samples with the {by!r} of a target and samples with another one, got "
            f"{n_relevant.min()} to {n_relevant.max()} of {len(of_samples)} with that of a target; "
            "try a coord that has the same labels for samples and targets"
        )
    return np.asarray(n_relevant / np.maximum(n_ranked, 1))


def _detection_variables(more: tuple[Hashable, ...]) -> dict[str, Any]:
    random = "share of the ranked samples that is of the target's class"
    variables: dict[str, Any] = {"chance": ((TARGET,), random)}
    for name, dims, description in (
        ("auc", more, "probability that a sample of the target's class has the higher score"),
        ("reciprocal_rank", more, "1 / rank of the first sample of the target's class"),
        ("precision", (K, *more), "share of the top k that is of the target's class"),
        ("recall", (K, *more), "share of the target's class that is in the top k"),
    ):
        variables[name] = (TARGET, *dims), description
        variables[f"{name}_mean"] = dims, f"mean of {name} over targets"
        variables[f"{name}_interval"] = (BOUND, *dims), f"of {name}_mean"
    return variables


def _detected(
    values: np.ndarray, chance: np.ndarray, n_counts: int, options: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Compute all results of values (target, ..., statistic)."""
    values = np.moveaxis(values, -1, 1)
    means, interval = mean_with_interval(values, options, _NEEDED)
    parts: dict[str, Any] = {"auc": 0, "reciprocal_rank": 1}
    parts |= {"precision": slice(2, 2 + n_counts), "recall": slice(2 + n_counts, None)}
    results = {"chance": chance}
    for name, part in parts.items():
        results |= {name: values[:, part], f"{name}_mean": means[part]}
        results[f"{name}_interval"] = interval[:, part]
    return results


def _shortcut(
    values: np.ndarray, is_marked: np.ndarray, chance: float, options: dict[str, Any]
) -> dict[str, np.ndarray]:
    marked, interval = mean_with_interval(values[is_marked], options, _NEEDED)
    # Without unmarked targets there is one of which nothing is known.
    others = np.full_like(values[:1], np.nan) if is_marked.all() else values[~is_marked]
    unmarked, unmarked_interval = arrays.evaluation.bootstrap_mean(others, **options)
    return {
        "auprc": values,
        "auprc_mean": marked,
        "interval": interval,
        "unmarked_mean": unmarked,
        "unmarked_interval": unmarked_interval,
        "chance": np.asarray(chance),
    }
