"""Whether scores find samples that are known: of the target's class, or with wrong labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from trakdask import arrays
from trakdask.arrays.detection import Codes
from trakdask.arrays.evaluation import Floats
from trakdask.attribution.groups import group_codes
from trakdask.checks import require_integer
from trakdask.evaluate.results import (
    Scores,
    as_array,
    described_with_mean,
    lazy_data,
    lazy_results,
    require_bootstrap,
    require_fraction,
    with_mean,
)
from trakdask.variables import SAMPLE, TARGET, TARGET_PREFIX, data_in_order

TWENTIETHS = tuple(i / 20 for i in range(1, 20))


def class_detection(
    scores: Scores,
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
        Scores (sample, target), with any further dimensions, or a mapping from names to scores, as
        in :func:`lds`; every entry along these is evaluated, on the same resamples.
    by
        Name of the coord of the samples that holds their class. The coord of the targets has the
        prefix ``target_``, as :func:`trakdask.score` names it. The name of a finer label, which the
        model was not trained on, makes this subclass detection.
    within
        Name of a coord of the samples and targets; only samples that share it with the target are
        ranked. With ``by="subclass", within="label"``, scores that merely separate the classes do
        not look good.
    ks
        Numbers of top samples, k, for the precision.
    resamples, seed, confidence
        Options of the bootstrap over targets that makes the intervals.

    Returns
    -------
    Lazy Dataset of float64 variables. Further dimensions of ``scores`` follow those named here:

    - ``auc`` (target): the probability that a sample of the target's class has a higher score than
      another one; 0.5 by chance;
    - ``precision`` (target, k): share of the top k that is of the class; at k = 1 it is 1 or 0;
    - ``chance`` (target): share of the ranked samples that is of the class, which is the precision
      of a random order;
    - ``auc_mean`` with ``auc_interval`` (bound), ``precision_mean`` (k) with
      ``precision_interval`` (bound, k): means over targets.

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

    Scores of a mapping differ by
    ``result.auc.sel(estimator="a") - result.auc.sel(estimator="b")``, target by target.

    Cost: one pass over the scores and a sort per target. Memory: all scores of one chunk of targets
    at a time. Labels are read at once, scores when computed. Results do not depend on chunks.

    References
    ----------
    Hanawa et al. 2021, "Evaluation of similarity-based explanations" (the class and the subclass of
    the top sample); Kwon et al. 2024, "DataInf" (area under the ROC curve). Quanda (Bareeva et al.
    2024) calls these class detection and subclass detection.

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
    scores = as_array(scores, SAMPLE, TARGET)
    n = scores.sizes[SAMPLE]
    counts = [require_integer("every k", k, 1, n + 1, remedy="try ks=[1]") for k in ks]
    codes, target_codes = _class_codes(scores, by, within)
    chance = _class_shares(codes, target_codes, by)
    values = arrays.detection.class_ranks(lazy_data(scores), codes, target_codes, counts)
    options = require_bootstrap(resamples, seed, confidence)
    more = scores.dims[2:]
    auc = "probability that a sample of the target's class has the higher score"
    precision = "share of the top k that is of the target's class"
    result = lazy_results(
        _detected, values, chance, options, of=scores,
        variables={
            "chance": ((TARGET,), "share of the ranked samples that is of the target's class"),
            **described_with_mean("auc", auc, more, "auc_interval"),
            **described_with_mean("precision", precision, ("k", *more), "precision_interval"),
        },
        labels={"k": counts},
    )  # fmt: skip
    return result.assign_attrs(by=by, within=within or "")


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
            "one; try selecting the others"
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
            f"{n_relevant.min()} to {n_relevant.max()} of {len(of_samples)} with the one of a "
            "target; try a coord that has the same labels for samples and targets"
        )
    return np.asarray(n_relevant / np.maximum(n_ranked, 1))


def _detected(
    values: np.ndarray, chance: np.ndarray, options: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Compute all results of values (target, ..., statistic): the area, and the precisions."""
    auc, precision = values[..., 0], np.moveaxis(values[..., 1:], -1, 1)
    return {
        "chance": chance,
        **with_mean("auc", auc, options, "auc_interval"),
        **with_mean("precision", precision, options, "precision_interval"),
    }


def mislabelled_auc(
    values: Scores,
    is_mislabelled: np.ndarray | xr.DataArray,
    *,
    confidence: float = 0.95,
) -> xr.Dataset:
    """Measure how well values separate wrong labels from right ones.

    Parameters
    ----------
    values
        One value per training sample, which is higher the more suspicious its label is, such as the
        self-influence: (sample), with any further dimensions, whose entries are all evaluated; or
        a mapping from names to values, which has the further dimension ``estimator``.
    is_mislabelled
        Which labels are wrong, bool (sample,).
    confidence
        Level of the interval.

    Returns
    -------
    Lazy Dataset of ``auc``, the probability that a wrong label has a higher value than a right one
    (0.5 by chance; ties count half), and ``interval`` (bound): DeLong's, symmetric on the logit
    scale.

    Raises
    ------
    ValueError
        If sizes do not agree, or all labels are wrong or all are right; when computed, if a value
        is NaN.

    References
    ----------
    DeLong et al. 1988; Koh and Liang 2017, section 5.4.

    Examples
    --------
    >>> import trakdask as td
    >>> values = xr.DataArray([0.1, 0.9, 0.2, 0.8], dims="sample")
    >>> td.evaluate.mislabelled_auc(values, [False, True, False, True]).auc.values.item()
    1.0
    """
    values, wrong = _checked(values, is_mislabelled)
    confidence = require_fraction("confidence", confidence)
    more = values.dims[1:]
    return lazy_results(
        _auc, lazy_data(values), wrong, confidence, of=values,
        variables={
            "auc": (more, "probability that a wrong label has the higher value"),
            "interval": (("bound", *more), "of auc"),
        },
    )  # fmt: skip


def mislabelled_curve(
    values: Scores,
    is_mislabelled: np.ndarray | xr.DataArray,
    fractions: Sequence[float] = TWENTIETHS,
    *,
    confidence: float = 0.95,
) -> xr.Dataset:
    """Measure which share of the wrong labels is found by inspecting the most suspicious samples.

    Parameters
    ----------
    values
        As in :func:`mislabelled_auc`: (sample), higher the more suspicious.
    is_mislabelled
        Which labels are wrong, bool (sample,).
    fractions
        Shares of the samples that are inspected, between 0 and 1; every twentieth by default.
    confidence
        Level of the intervals.

    Returns
    -------
    Lazy Dataset of float64 variables. Further dimensions of ``values`` follow those named here:

    - ``found`` (fraction): share of the wrong labels that is among the inspected samples, with
      ``interval`` (bound, fraction), Wilson's, of as many trials as there are wrong labels;
    - ``area``: the area under this curve for fractions from 0 to 1, with ``area_interval`` (bound).
      Both follow from the results of :func:`mislabelled_auc`. A random order has ½;
    - ``random_interval`` (bound, fraction): where the share found in a random order lies, whose
      expectation is the fraction itself;
    - ``best`` (fraction): the share found if all wrong labels came first. The area of that curve is
      1 - ½ the share of wrong labels.

    Raises
    ------
    ValueError
        If sizes do not agree, all labels are wrong or all are right, or fractions are not between 0
        and 1; when computed, if a value is NaN.

    Notes
    -----
    The loss of a classification follows from its features: with f = log p / (1 - p),
    ``numpy.logaddexp(0, -features.output.mean("checkpoint"))`` is -log p. It is the method to beat.

    Equal values count as if in random order. :func:`trakdask.plots.mislabelled_curve` draws it.

    References
    ----------
    Koh and Liang 2017, section 5.4; Kwon et al. 2024, "DataInf". Quanda (Bareeva et al. 2024) calls
    this mislabeling detection.

    Examples
    --------
    >>> import trakdask as td
    >>> values = xr.DataArray([0.1, 0.9, 0.2, 0.8], dims="sample")
    >>> curve = td.evaluate.mislabelled_curve(values, [False, True, False, True], [0.25, 0.5])
    >>> curve.found.values.tolist(), float(curve.area)
    ([0.5, 1.0], 0.75)
    """
    values, wrong = _checked(values, is_mislabelled)
    confidence = require_fraction("confidence", confidence)
    shares = [require_fraction("every fraction", share) for share in fractions]
    more = values.dims[1:]
    return lazy_results(
        _found_curve, lazy_data(values), wrong, shares, confidence, of=values,
        variables={
            "found": (("fraction", *more), "share of the wrong labels that is found"),
            "interval": (("bound", "fraction", *more), "of found"),
            "area": (more, "area under found, for fractions from 0 to 1"),
            "area_interval": (("bound", *more), "of area"),
            "random_interval": (("bound", "fraction"), "of found in a random order"),
            "best": (("fraction",), "found if all wrong labels came first"),
        },
        labels={"fraction": shares},
    )  # fmt: skip


def _checked(values: Scores, is_mislabelled: object) -> tuple[xr.DataArray, np.ndarray]:
    values = as_array(values, SAMPLE)
    wrong = np.asarray(data_in_order(is_mislabelled, values, SAMPLE, what="is_mislabelled"))
    n = values.sizes[SAMPLE]
    if wrong.dtype != bool or wrong.shape != (n,) or wrong.all() or not wrong.any():
        raise ValueError(
            f"expected is_mislabelled to be bool ({n},), with right and wrong labels, got "
            f"{wrong.dtype} {wrong.shape} with {np.count_nonzero(wrong)} wrong ones; try "
            "is_mislabelled=(given_label != true_label)"
        )
    return values, wrong


def _auc(values: np.ndarray, wrong: np.ndarray, confidence: float) -> dict[str, np.ndarray]:
    more, columns = values.shape[1:], values.reshape(len(values), -1).T
    if (unknown := np.isnan(columns).any(axis=0)).any():
        raise ValueError(
            f"expected values without NaN, got NaN in {int(unknown.sum())} of {len(wrong)} "
            f"samples, the first at sample {int(np.argmax(unknown))}; try values.dropna('sample')"
        )
    results = [arrays.detection.roc_auc(column, wrong, confidence) for column in columns]
    return {
        "auc": np.array([area for area, _ in results]).reshape(more),
        "interval": np.stack([bounds for _, bounds in results], axis=1).reshape(2, *more),
    }


def _found_curve(
    values: np.ndarray, wrong: np.ndarray, shares: list[float], confidence: float
) -> dict[str, np.ndarray]:
    area = _auc(values, wrong, confidence)
    n, n_wrong, more = len(wrong), int(wrong.sum()), values.shape[1:]
    inspected = np.array(shares) * n
    columns = values.reshape(n, -1).T
    found = np.stack([_found(column, wrong, inspected) for column in columns], axis=1) / n_wrong
    found = found.reshape(-1, *more)
    # The area counts pairs of a wrong label and any sample. The AUC counts the pairs of a wrong and
    # a right label; of two wrong labels either may come first, which is ½.
    of_wrong = n_wrong / n / 2
    return {
        "found": found,
        "interval": arrays.detection.proportion_interval(found, n_wrong, confidence),
        "area": of_wrong + (1 - n_wrong / n) * area["auc"],
        "area_interval": of_wrong + (1 - n_wrong / n) * area["interval"],
        "random_interval": _random_interval(inspected, n, n_wrong, confidence),
        "best": np.minimum(inspected / n_wrong, 1),
    }


def _found(values: np.ndarray, wrong: np.ndarray, inspected: np.ndarray) -> np.ndarray:
    """Return how many wrong labels are expected among the highest values, equal ones shuffled."""
    order = np.argsort(-values, kind="stable")
    ordered = values[order]
    last_of_equal = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    hits = np.cumsum(wrong[order])[last_of_equal]
    return np.asarray(np.interp(inspected, [0, *(last_of_equal + 1)], [0, *hits]))


def _random_interval(inspected: np.ndarray, n: int, n_wrong: int, confidence: float) -> np.ndarray:
    from scipy.stats import hypergeom  # takes a second to import, and only evaluation needs it

    quantiles = np.array([[(1 - confidence) / 2], [(1 + confidence) / 2]])
    drawn = hypergeom.ppf(quantiles, n, n_wrong, np.round(inspected))
    return np.asarray(drawn / n_wrong)
