"""Metrics of the outputs of targets: the value, and the derivative by each output.

Outputs are margins f = log p/(1 - p) of the right class, (target,), float64; predictions for
:func:`squared_loss`, and minus the loss for :func:`negative`. Accuracies are smoothed: a target
counts p = σ(f).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trakdask.arrays.blocks import Floats

Measured = tuple[float, Floats]

NOTHING: Measured = (np.nan, np.array(np.nan))
"""A metric where all outputs failed, or all of one label; and its derivative by each."""

TEMPERATURE = 0.1
"""Groups whose accuracies differ by less share the derivative of the worst, and of the best."""


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + exp(-x)), without overflow."""
    return np.asarray(0.5 + 0.5 * np.tanh(x / 2))


def loss(f: Floats, weight: Floats | float = 1.0) -> Measured:
    """Return the mean of log(1 + exp(-f)), the cross-entropy, each times a number of its target.

    >>> loss(np.zeros(2))[1].tolist(), loss(np.zeros(2), np.array([2.0, 0.0]))[1].tolist()
    ([-0.25, -0.25], [-0.5, 0.0])
    """
    return float((weight * np.logaddexp(0, -f)).mean()), -weight * sigmoid(-f) / len(f)


def negative(f: Floats) -> Measured:
    """Return the mean of -f.

    >>> negative(np.array([-1.0, -3.0]))[0]
    2.0
    """
    return float(-f.mean()), np.full(len(f), -1 / len(f))


def squared_loss(f: Floats, y: Floats) -> Measured:
    """Return the mean of half the squared error.

    >>> squared_loss(np.array([1.0, 4.0]), np.array([1.0, 2.0]))[0]
    1.0
    """
    return float(((f - y) ** 2).mean() / 2), (f - y) / len(f)


def accuracy(f: Floats) -> Measured:
    """Return the mean probability of the right class.

    >>> accuracy(np.zeros(2))[0]
    0.5
    """
    p = sigmoid(f)
    return float(p.mean()), p * (1 - p) / len(f)


def worst_group(f: Floats, group: npt.NDArray[np.intp]) -> Measured:
    """Return the lowest accuracy of a group; its derivative is the soft minimum's.

    ``group`` is a number >= 0 of each target, or -1 for none.

    >>> worst_group(np.array([0.0, 4.0, 4.0]), np.array([0, 1, 1]))[0]
    0.5
    """
    return _extreme(f, group, -1)


def gap(f: Floats, group: npt.NDArray[np.intp]) -> Measured:
    """Return the highest accuracy of a group minus the lowest; its derivative is soft, too.

    >>> gap(np.zeros(3), np.array([0, 1, 1]))[0]
    0.0
    """
    (best, of_best), (worst, of_worst) = _extreme(f, group, 1), _extreme(f, group, -1)
    return best - worst, np.asarray(of_best - of_worst)


def _extreme(f: Floats, group: npt.NDArray[np.intp], sign: int) -> Measured:
    """Return the extreme accuracy, and how the softmax of all accuracies depends on outputs."""
    is_member = group >= 0
    if not is_member.any():
        return NOTHING
    _, code = np.unique(group[is_member], return_inverse=True)
    p, count = sigmoid(f[is_member]), np.bincount(code)
    by_group = np.bincount(code, p) / count
    # Less the largest, so that nothing overflows.
    nearness = np.exp((sign * by_group - (sign * by_group).max()) / TEMPERATURE)
    gradient = np.zeros(len(f))
    # The softmax says how much each group counts, and p (1 - p)/count how its mean depends on an
    # output.
    gradient[is_member] = (nearness / nearness.sum() / count)[code] * p * (1 - p)
    return float(sign * (sign * by_group).max()), gradient


def auroc(f: Floats, label: npt.NDArray[np.bool_]) -> Measured:
    """Return the mean of σ(z - z') over pairs with label 1 and 0; z is the logit of label 1.

    Memory: a few numbers for each of the pairs.

    >>> auroc(np.array([0.0, 0.0]), np.array([True, False]))[0]
    0.5
    """
    if label.all() or not label.any():
        return NOTHING
    z = np.where(label, f, -f)
    pairs = sigmoid(z[label][:, None] - z[~label])
    slope, gradient = pairs * (1 - pairs) / pairs.size, np.zeros(len(f))
    gradient[label], gradient[~label] = slope.sum(1), slope.sum(0)  # f is -z where the label is 0
    return float(pairs.mean()), gradient


def measured(
    f: Floats, truth: Floats | None, formula: Callable[..., Measured], columns: Any
) -> Measured:
    """Return a metric of the outputs that are not NaN, and its derivative by all outputs.

    Both are NaN where there is nothing to measure: a derivative of 0 would be a score of 0.
    """
    whole, gradient = np.isfinite(f), np.zeros(len(f))
    known = columns if truth is None else (truth, *columns)
    value, gradient[whole] = (
        formula(f[whole], *(column[whole] for column in known)) if whole.any() else NOTHING
    )
    if np.isnan(value):
        gradient[:] = np.nan
    return value, gradient


def values(outputs: npt.NDArray[np.floating], truth: Floats | None = None, **how: Any) -> Floats:
    """Return a metric of outputs (..., target), (...)."""
    rows = outputs.reshape(-1, outputs.shape[-1]).astype(np.float64)
    values = [measured(f, truth, **how)[0] for f in rows]
    return np.array(values).reshape(outputs.shape[:-1])


def derivative(
    outputs: npt.NDArray[np.floating], truth: Floats | None = None, *, at: float, **how: Any
) -> Floats:
    """Return the mean derivative at a share of outputs (checkpoint, target), (target,)."""
    rows = at * outputs.astype(np.float64)
    values, gradients = zip(*(measured(f, truth, **how) for f in rows), strict=True)
    weights = np.mean(gradients, axis=0)
    # Where values are NaN, too, there was nothing to measure, and the score is NaN.
    if np.isnan(weights).any() and not np.isnan(values).any():
        raise ValueError(
            "expected a metric with a derivative at all outputs, got one without; try a smooth "
            "function of the tensor of outputs, or td.group_score(..., metric=), which needs none"
        )
    return np.asarray(weights)
