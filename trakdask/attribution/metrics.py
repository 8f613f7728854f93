"""Metrics of the outputs of many targets, and how they depend on each output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr

from trakdask import arrays
from trakdask.arrays.blocks import Floats, blockwise
from trakdask.arrays.graphs import plain
from trakdask.arrays.metrics import Measured
from trakdask.checks import require_choice
from trakdask.variables import (
    CHECKPOINT,
    SAMPLE,
    TARGET,
    TARGET_PREFIX,
    aligned,
    coords_along,
    lazy_features,
    validate,
)

MetricLike = Literal["loss", "accuracy", "worst_group", "gap", "auroc"] | Callable[..., Any]

COMBINATION = "combination"
"""The coord with the names of combined targets."""

_COORDS = {"loss": None, "accuracy": None, "worst_group": "group", "gap": "group", "auroc": "label"}
"""The coord of the targets that each metric needs."""

_LOSSES: dict[str, Callable[..., Measured]] = {
    "cross-entropy": arrays.metrics.loss,
    "weighted cross-entropy": arrays.metrics.loss,
    "squared error": arrays.metrics.squared_loss,
    "minus output": arrays.metrics.negative,
}
"""The mean loss by what tasks say of it."""

_HELD_OUT = 0.75
"""The share of a margin at which the derivative is taken, as models of less data are less sure."""

_AT_ONCE = 2**22
"""Numbers of predicted outputs in a task: groups × checkpoints × targets, at least one group."""


def metric(outputs: xr.DataArray, targets: xr.Dataset, metric: MetricLike) -> xr.DataArray:
    """Compute a metric of the outputs of many targets, such as the outputs of retrained models.

    Parameters
    ----------
    outputs
        Outputs f, (..., target), such as :func:`trakdask.evaluate.retrain` returns, or (...,
        sample), as features have them.
    targets
        Features of these targets, whose coords have labels and groups.
    metric
        ``"loss"``: the mean loss; ``"accuracy"``: the mean probability of the right class;
        ``"worst_group"``, ``"gap"``: the lowest accuracy of the groups in the coord ``group``, and
        the highest minus the lowest; ``"auroc"``: the area under the ROC curve for the coord
        ``label``, 0 or 1, where a pair counts σ of the difference of its logits. Or a function
        ``metric(outputs, coords)`` of a tensor (target,), float64, and a Dataset of the targets'
        coords, that returns a scalar.

    Returns
    -------
    Lazy DataArray (..., target), float64, with one target, as scores of
    :func:`trakdask.combine` have it. So :func:`trakdask.evaluate.lds` compares the two.

    Raises
    ------
    TypeError, ValueError
        If there is no such metric, the targets lack its coord, their task does not say its
        ``loss_kind``, or its outputs are no margins, and so have a ``"loss"`` alone, or none.

    Notes
    -----
    Outputs that are NaN are left out. For a squared error, the loss is half of it, and the true
    values are output + out_to_loss of the targets; the weights of a weighted cross-entropy are in
    out_to_loss, too. Where the output is minus the loss, as of
    :class:`~trakdask.models.tasks.MultiRegression`, the loss is minus the output. A function needs
    torch; names do not.

    Examples
    --------
    >>> import trakdask as td
    >>> targets = td.testing.simulate_features(n_samples=6, proj_dim=4, n_checkpoints=3)
    >>> targets = targets.assign_coords(group=targets.label)
    >>> td.evaluate.metric(targets.output, targets, "worst_group").dims
    ('checkpoint', 'target')
    """
    measure = measure_of(metric, targets)
    dim = TARGET if TARGET in outputs.dims else SAMPLE
    # Outputs have the coords of scores, where the names of the targets' coords have a prefix.
    coords = {
        str(name).removeprefix(TARGET_PREFIX) if name != TARGET else SAMPLE: (SAMPLE, coord.values)
        for name, coord in coords_along(outputs, dim).items()
    }
    positions = xr.DataArray(np.arange(outputs.sizes[dim]), coords, SAMPLE)
    outputs = outputs.isel({dim: aligned(positions, targets, what="outputs").values})
    lazy = outputs.transpose(..., dim).chunk({dim: -1})
    data = measure.values(plain(lazy.data))[..., None]
    labels: dict[Hashable, Any] = dict(coords_along(lazy, *lazy.dims[:-1]))
    labels[f"{TARGET_PREFIX}{COMBINATION}"] = TARGET, np.array([measure.name], object)
    dims = (*lazy.dims[:-1], TARGET)
    return xr.DataArray(data, labels, dims, name="metric", attrs={"metric": measure.name})


@dataclass(frozen=True)
class Measure:
    """A metric of some targets. ``truth`` (target,) is lazy: true values, or weights of targets."""

    name: str
    formula: Callable[..., Measured]
    columns: tuple[np.ndarray, ...]
    truth: da.Array | None
    at: float

    def values(self, outputs: da.Array) -> da.Array:
        """Return the metric of outputs (..., target) in one chunk of targets, (...)."""
        outer = "abcdef"[: outputs.ndim - 1]
        truth = () if self.truth is None else (self.truth, "t")
        return blockwise(
            arrays.metrics.values, outer, outputs, f"{outer}t", *truth,
            formula=self.formula, columns=self.columns, concatenate=True,
            name="metric", dtype=np.float64,
        )  # fmt: skip

    def weights(self, outputs: da.Array) -> da.Array:
        """Return the derivative by the output of each target, (target,), mean of checkpoints.

        The mean of the metric depends on the data as outputs do, times the mean derivative where
        outputs of retrained models lie (Stein's lemma). They are less sure than models of all data.
        """
        truth = () if self.truth is None else (self.truth, "t")
        return blockwise(
            arrays.metrics.derivative, "t", outputs, "ct", *truth,
            formula=self.formula, columns=self.columns, at=self.at, concatenate=True,
            name="metric-weights", dtype=np.float64,
        )  # fmt: skip

    def raised_by(
        self, sums: da.Array, total: da.Array, outputs: da.Array, scale: da.Array | float
    ) -> da.Array:
        """Return how much each group raised the metric of outputs (checkpoint, target).

        ``sums`` of scores are (group, target), ``total`` (target,) is the sum of all samples, and
        ``scale`` is what :func:`trakdask.arrays.effects.scale` returns.
        """
        rows = max(_AT_ONCE // max(outputs.size, 1), 1)
        sums = sums.rechunk((rows, -1)).astype(np.float64)
        outputs = outputs.rechunk(-1) + 0 * total.rechunk(-1)  # a target without scores is left out
        # (group, checkpoint, target), which is why few groups are in a chunk.
        without = outputs[None] - scale * sums[:, None]
        return self.values(outputs).mean() - self.values(without).mean(-1)

    def error(self, predicted: da.Array, outputs: da.Array, slope: da.Array) -> da.Array:
        """Return how far the metric of one more model is from predictions, (1,).

        ``predicted`` and ``outputs`` (target, checkpoint) are of checkpoints that were left out.
        """
        outputs, predicted = (x.rechunk(-1).astype(np.float64) for x in (outputs, predicted))
        mean = outputs.mean(axis=1, keepdims=True)
        # The outputs that predictions make of the mean of each target, as
        # :func:`trakdask.arrays.effects.errors` has them for single outputs.
        fitted = mean + slope * (predicted - predicted.mean(axis=1, keepdims=True))
        rest = self.values(outputs.T) - self.values(fitted.T)
        return rest.std(ddof=1, keepdims=True)


def measure_of(metric: MetricLike, targets: xr.Dataset) -> Measure:
    """Return the metric of a name, or of a function, for some targets."""
    validate(targets, ["output"], what="targets")
    if not targets.sizes[SAMPLE]:
        raise ValueError("expected one or more targets to measure, got none; try selecting others")
    along, loss = coords_along(targets, SAMPLE), targets.attrs.get("loss_kind")
    at = 1.0 if loss in ("squared error", "minus output") else _HELD_OUT
    if callable(metric):
        # A partial function, or an object that can be called, has no name.
        name = getattr(metric, "__name__", type(metric).__name__)
        formula = functools.partial(_of_function, metric, list(map(str, along)))
        return Measure(name, formula, tuple(c.values for c in along.values()), None, at)
    require_choice("metric", metric, list(_COORDS), remedy="try metric='accuracy', or a function")
    _require_loss(metric, targets, loss)
    if metric != "loss":
        return Measure(metric, getattr(arrays.metrics, metric), _column(metric, along), None, at)
    # What a loss needs to know of each target beside its output, (target,).
    truth: da.Array | None = None
    if loss in ("squared error", "weighted cross-entropy"):
        validate(targets, ["out_to_loss"], what="targets")
        lazy = lazy_features(targets)
        # -dloss/df of (f - y)²/2 is y - f, so this is y at every checkpoint.
        known = (lazy.output + lazy.out_to_loss).mean(CHECKPOINT)
        if loss != "squared error":
            # Q is the weight times 1 - p. Sums are exact also where p is 1 at some checkpoint.
            total = (1 / (1 + np.exp(lazy.output.astype(np.float64)))).sum(CHECKPOINT)
            known = lazy.out_to_loss.sum(CHECKPOINT) / total.where(total > 0)
        truth = known.data.rechunk(-1)
    return Measure(metric, _LOSSES[str(loss)], (), truth, at)


def _require_loss(metric: str, targets: xr.Dataset, loss: str | None) -> None:
    """Refuse a metric that outputs do not determine, or of which the task does not say so."""
    task = targets.attrs.get("task")
    if loss is None:
        raise ValueError(
            f"expected a task that says its loss_kind for metric={metric!r}, got {task}; try "
            f"loss_kind = 'cross-entropy', or another one of {[*_LOSSES]}, in the class of the "
            "task, and targets.assign_attrs(loss_kind=...) for features that are there, or "
            "metric=lambda outputs, coords: outputs.mean()"
        )
    if "combined" in targets.attrs:
        raise ValueError(
            f"expected outputs of single targets for metric={metric!r}, got targets that were "
            f"combined ({targets.attrs['combined']}); try the targets before td.combine"
        )
    if loss not in _LOSSES or (metric != "loss" and not loss.endswith("cross-entropy")):
        remedy = "metric='loss', or " if loss in _LOSSES else ""
        raise ValueError(
            f"expected a task whose outputs are margins for metric={metric!r}, got {task}, whose "
            f"loss_kind is {loss!r}; try {remedy}metric=lambda outputs, coords: outputs.mean()"
        )


def _column(metric: str, along: dict[Hashable, xr.Variable]) -> tuple[np.ndarray, ...]:
    """Return the numbers of groups, or the labels, if the metric needs some."""
    name = _COORDS[metric]
    if name is None:
        return ()
    if name not in along:
        raise ValueError(
            f"expected the coord {name!r} of the targets for metric={metric!r}, got "
            f"{list(map(str, along))}; try targets.assign_coords({name}=('sample', values))"
        )
    values = along[name].values
    # Groups need numbers only. Missing ones get -1, which is no group.
    if name == "group":
        return (pd.factorize(values)[0],)
    if set(np.unique(values).tolist()) != {0, 1}:
        raise ValueError(
            f"expected labels 0 and 1 for metric={metric!r}, got {np.unique(values)[:9].tolist()}; "
            "try targets.assign_coords(label=...), with outputs of two classes"
        )
    return (values.astype(bool),)


def _of_function(
    metric: Callable[..., Any], names: list[str], f: Floats, *columns: np.ndarray
) -> Measured:
    """Return the value of a function of one's own, and its derivative, if it has one."""
    import torch  # a second, which processes that ask for no such metric need not wait

    coords = {name: (SAMPLE, column) for name, column in zip(names, columns, strict=True)}
    outputs = torch.tensor(f, requires_grad=True)
    value = metric(outputs, xr.Dataset(coords=coords))
    # A metric without a derivative still has a value; weights of targets by it are refused later.
    if not getattr(value, "requires_grad", False):
        return float(value), np.full(len(f), np.nan)
    (gradient,) = torch.autograd.grad(value, outputs)
    return float(value.detach()), gradient.numpy()
