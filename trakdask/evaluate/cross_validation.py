"""How good scores are, by checkpoints that were left out: nothing is retrained."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import dask
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.attribution.effects import left_out
from trakdask.attribution.estimators import EstimatorLike, resolve
from trakdask.attribution.folds import differ
from trakdask.attribution.operands import operands_of, solver
from trakdask.evaluate.results import require_known
from trakdask.variables import (
    CHECKPOINT,
    SAMPLE,
    TARGET,
    TARGET_PREFIX,
    TRAINED_ON,
    coords_along,
    lazy_features,
    validate,
)

_NEW = "estimator"
_FIRST = "these scores predict left-out checkpoints at {:.2f} ± {:.2f}"
_OTHER = "{}: {:.3f} ± {:.3f} {}"


def cross_validate(
    features: xr.Dataset | Mapping[str, xr.Dataset],
    targets: xr.Dataset | Mapping[str, xr.Dataset],
    estimators: EstimatorLike | Mapping[str, EstimatorLike] = "auto",
) -> xr.Dataset:
    """Grade scores by how well they predict checkpoints that they were not made with.

    Each checkpoint was trained on a known part of the samples, so it is a retrained model whose
    outputs are known. It is left out of the ensemble, and the scores of the others predict its
    outputs: their sum over the samples that it saw, less the mean of such sums over all of the
    checkpoints. The grade says how well predictions rank checkpoints. Nothing is trained, and the
    grade belongs to your model, data and options.

    Parameters
    ----------
    features
        Features of all training samples, with ``trained_on`` (sample, checkpoint), see
        :func:`trakdask.featurize`; or a mapping from names to such features, made in several ways.
    targets
        Features of samples that no checkpoint was trained on, 50 or more; or a mapping with the
        same names. Training samples serve where there are no others: their own scores are part of
        the sums, as they are of their outputs.
    estimators
        As in :func:`trakdask.score`, with λ among their options; or a mapping from names
        to several.

    Returns
    -------
    Dataset in memory, float64:

    - ``lds`` (target): Spearman's correlation of predictions and outputs, an unbiased estimate of
      what it would be over very many checkpoints, so that it may be a little above 1;
    - ``lds_mean`` (): its mean over targets, the grade, and ``error`` (), its standard error by a
      jackknife over checkpoints;
    - ``without`` (checkpoint): the grade without each checkpoint, from which ``error`` is made;
    - for mappings, all of these along ``estimator``, and ``difference`` and ``difference_error``,
      the grade less the grade of the first. Both have the same checkpoints, so the error of the
      difference is mostly much smaller than the errors of the two.

    ``attrs["summary"]`` says it in a sentence, and a line for each further estimator.

    Raises
    ------
    ValueError
        If ``trained_on`` is missing or the same for all checkpoints, there are fewer than four
        checkpoints, or samples are missing in the features.
    StoreMismatchError
        If features and targets were made differently.

    Notes
    -----
    Cost: beside the cost of a query, one pass over the features for each of the features and
    estimators, 2 n p C² flops.

    The outputs of a checkpoint vary with its seed, too, which no score can predict. So the grade is
    lower than a linear datamodeling score whose outputs are means over several seeds; compare
    grades with each other, and with :func:`lds` of a single seed. With four checkpoints the error
    is large; ten grade well. λ and K are made with all checkpoints. The error covers the draw of
    the checkpoints and their samples. Grades of several models by the same samples share that luck.

    References
    ----------
    Park et al. 2023, section 4 (linear datamodeling score); Efron & Stein 1981 (jackknife).

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=60, proj_dim=8, n_checkpoints=5)
    >>> masks = td.evaluate.subsets(features, 5).rename(subset="checkpoint")
    >>> features = features.assign(trained_on=masks)
    >>> targets = td.testing.simulate_features(n_samples=50, proj_dim=8, n_checkpoints=5)
    >>> result = td.evaluate.cross_validate(features, targets, {"trak": "trak", "dot": "grad_dot"})
    >>> result.lds.dims, result.lds_mean.sizes["estimator"]
    (('target', 'estimator'), 2)
    """
    settings = _settings(features, targets, estimators)
    lazy, first = [], next(iter(settings.values()))[1]
    for training, explained, estimator in settings.values():
        validate(explained, ["output"], what="targets")
        asked, to = operands_of(training, explained)
        operands = solver(asked, resolve(asked, estimator))
        predicted = left_out(operands, operands.vectors(to))
        output = explained.output.transpose(SAMPLE, CHECKPOINT).data
        lazy.append((predicted, output, differ(lazy_features(training))))
    # In one call, which computes once what the estimators share.
    grades = [_graded(*each) for each in dask.compute(*lazy)]
    data = {name: np.stack([grade[name] for grade in grades], axis=-1) for name in _DIMS}
    require_known(data["lds"].T)
    result = xr.Dataset(
        {n: ((*_DIMS[n][0], _NEW), data[n], {"description": _DIMS[n][1]}) for n in _DIMS},
        coords={
            _NEW: list(settings),
            CHECKPOINT: first[CHECKPOINT],
            **{
                f"{TARGET_PREFIX}{name}": (TARGET, coord.data, coord.attrs)
                for name, coord in coords_along(first, SAMPLE).items()
            },
        },
    )
    if [*settings] == [""]:
        result = result.squeeze(_NEW, drop=True)
    else:
        # Both grades without the same checkpoint: what the checkpoints have in common is no error
        # of the difference.
        difference = result.without - result.without.isel({_NEW: 0})
        result["difference"] = result.lds_mean - result.lds_mean.isel({_NEW: 0})
        result["difference_error"] = (_NEW,), arrays.folds.jackknife_error(difference)
    return result.assign_attrs(summary=_summary(result))


_DIMS: dict[str, tuple[tuple[str, ...], str]] = {
    "lds": ((TARGET,), "Spearman of predictions and outputs of left-out checkpoints"),
    "lds_mean": ((), "mean of lds over targets"),
    "error": ((), "standard error of lds_mean"),
    "without": ((CHECKPOINT,), "lds_mean without a checkpoint"),
}


def _settings(
    features: Any, targets: Any, estimators: Any
) -> dict[str, tuple[xr.Dataset, xr.Dataset, EstimatorLike]]:
    """Return the features, targets and estimators to grade, by name."""
    training, explained = _by_name(features), _by_name(targets)
    if {*training} != {*explained}:
        raise ValueError(
            "expected features and targets as two Datasets, or as two mappings with the same "
            f"names, got {list(training)} and {list(explained)}; try both with the same names"
        )
    named = _by_name(estimators)
    if not training or not named:
        raise ValueError(
            "expected a name for each of the features and estimators to grade, got an empty "
            "mapping; try {'soft': 'soft', 'trak': 'trak'}"
        )
    pairs = product(training, named.items())
    return {
        ", ".join(filter(None, (one, two))): (training[one], explained[one], estimator)
        for one, (two, estimator) in pairs
    }


def _by_name(values: Any) -> dict[str, Any]:
    # A Dataset is a mapping, too.
    is_mapping = isinstance(values, Mapping) and not isinstance(values, xr.Dataset)
    return dict(values) if is_mapping else {"": values}


def _graded(predicted: np.ndarray, output: np.ndarray, differ: bool) -> dict[str, np.ndarray]:
    if not differ:
        raise ValueError(
            f"expected checkpoints that were trained on different samples, got {TRAINED_ON!r} with "
            "the same samples for all; try td.evaluate.train_on_halves"
        )
    lds, without = arrays.folds.agreement(predicted, output.astype(np.float64), unbiased=True)
    return {
        "lds": lds,
        "lds_mean": np.asarray(np.nanmean(lds) if np.isfinite(lds).any() else np.nan),
        "error": arrays.folds.jackknife_error(without),
        "without": without,
    }


def _summary(result: xr.Dataset) -> str:
    """Say the result in a sentence."""
    if _NEW not in result.dims:
        return _FIRST.format(float(result.lds_mean), float(result.error))
    name, *others = (str(each) for each in result[_NEW].values)
    first = result.sel({_NEW: name})
    texts = [f"{name}: " + _FIRST.format(float(first.lds_mean), float(first.error))]
    for other in others:
        one = result.sel({_NEW: other})
        size, error = abs(float(one.difference)), float(one.difference_error)
        texts.append(_OTHER.format(other, size, error, "more" if one.difference >= 0 else "less"))
    return "\n".join(texts)
