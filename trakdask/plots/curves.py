"""Curves and dots: how the damping was chosen, and what evaluations found."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from trakdask.plots.figures import BLUE, GREEN, finish, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def damping(chosen: xr.Dataset) -> Figure:
    """Draw how the damping was chosen: the curve, what suffices for the prior, and the choice.

    Parameters
    ----------
    chosen
        Dataset of :func:`trakdask.damping`; computed here.

    Returns
    -------
    Figure with one axes; no choice is marked if the curve was too low to choose from.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    ValueError
        If the damping was not chosen by outputs, in which case there is no curve.
    """
    chosen = chosen.compute()
    if not np.isfinite(chosen.curve.values).any():
        raise ValueError(
            "expected a damping that was chosen by outputs, which has a curve, got the rule "
            f"{str(chosen.rule.values)!r}; try td.damping(features, 'completeness')"
        )
    figure, ax = new_axes(5.2, 3.4)
    ax.plot(chosen.relative_damping, chosen.curve, "o-", color=BLUE, markersize=3.5, linewidth=1.2)
    if np.isfinite(relative := float(chosen.relative)):
        threshold, peak = float(chosen.threshold), float(chosen.peak)
        ax.axhspan(threshold, peak, color=GREEN, alpha=0.15, linewidth=0)
        ax.axvline(relative, color=GREEN, linewidth=1.2)
        at_choice = float(chosen.curve.sel(relative_damping=relative, method="nearest"))
        ax.plot(relative, at_choice, "o", color=GREEN, markersize=7)
    ax.set_xscale("log")
    choice = f"λ = {relative:.3g} tr(K)/n" if np.isfinite(relative) else "λ"
    title = f"{choice} by {chosen.rule.values}"
    return finish(figure, ax, "λ in units of tr(K)/n", "correlation with outputs", title)


def lds(result: xr.Dataset) -> Figure:
    """Draw the linear datamodeling score of every target, lowest first, below its noise ceiling.

    Parameters
    ----------
    result
        Dataset of :func:`trakdask.evaluate.lds`, with at most one further dimension, such as
        ``estimator``; computed here.

    Returns
    -------
    Figure with a dot per target, its ceiling in grey where there is one, and the mean with its
    interval; estimators are side by side.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    """
    dots = {"ceiling": ("0.75", "noise ceiling"), "lds": (BLUE, "LDS")}
    figure, ax = _draw_targets(result, "lds_mean", dots)
    return finish(figure, ax, "targets, by LDS", "Spearman over subsets")


def removal_curve(curve: xr.Dataset) -> Figure:
    """Draw how outputs change as ranked samples are removed, compared with random removal.

    Parameters
    ----------
    curve
        Dataset of :func:`trakdask.evaluate.removal_curve`, with at most one further dimension, such
        as ``estimator``; computed here.

    Returns
    -------
    Figure with the mean output over targets against the removed fraction, with intervals: a line
    for each estimator, and one for random removal.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    """
    curve = curve.transpose("bound", ..., "fraction").sortby("fraction").compute()
    figure, ax = new_axes(5.2, 3.6)
    full = float(curve.mean_full_output)
    fractions = np.array([0, *curve.fraction.values])
    for name, one in _estimators(curve, curve.mean_output.dims[:-1], "ranked by score"):
        (line,) = ax.plot(fractions, [full, *one.mean_output.values], label=name)
        _band(ax, fractions[1:], one.interval, line.get_color())
    ax.plot(fractions, [full, *curve.mean_random_output.values], color="0.5", label="random order")
    _band(ax, fractions[1:], curve.random_interval, "0.5")
    return finish(figure, ax, "fraction of samples removed", "mean output of the targets")


def class_detection(result: xr.Dataset) -> Figure:
    """Draw which share of the top k is of the target's class, beside that of a random order.

    Parameters
    ----------
    result
        Dataset of :func:`trakdask.evaluate.class_detection`, with at most one further dimension,
        such as ``estimator``; computed here.

    Returns
    -------
    Figure with the mean precision at each k with its interval, and the area under the ROC curve, of
    each estimator.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    """
    result = result.transpose("bound", ...).sortby("k").compute()
    figure, ax = new_axes(5.2, 3.4)
    for name, one in _estimators(result, result.auc_mean.dims, "ranked by score"):
        low, high = abs(one.precision_interval - one.precision_mean).values
        label = f"{name}, AUC {_with_interval(one.auc_mean, one.auc_interval)}"
        ax.errorbar(
            one.k, one.precision_mean, [low, high], fmt="o-", markersize=4, linewidth=1.2,
            capsize=3, label=label,
        )  # fmt: skip
    chance = float(result.chance.mean())
    ax.axhline(chance, color="0.5", linestyle="--", linewidth=1, label="random order")
    ax.set_xscale("log")
    ax.set_xticks(result.k.values, map(str, result.k.values.tolist()))
    ax.minorticks_off()
    ax.set_ylim(0, 1.03)
    title = f"samples of the target's {result.attrs.get('by', 'class')!r}"
    return finish(figure, ax, "k", "precision, mean over targets", title)


def mislabelled_curve(curve: xr.Dataset) -> Figure:
    """Draw which share of the wrong labels is found by inspecting the most suspicious samples.

    Parameters
    ----------
    curve
        Dataset of :func:`trakdask.evaluate.mislabelled_curve`, with at most one further dimension,
        such as ``estimator``; computed here.

    Returns
    -------
    Figure with a line and an interval per estimator, the interval of a random order in grey, and
    the best possible curve as a dotted line.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    """
    curve = curve.transpose("bound", ..., "fraction").sortby("fraction").compute()
    figure, ax = new_axes(5.2, 3.8)
    fractions = np.array([0, *curve.fraction.values, 1])
    for name, one in _estimators(curve, curve.area.dims, "ranked"):
        label = f"{name}, area {float(one.area):.2f}"
        (line,) = ax.plot(fractions, [0, *one.found.values, 1], linewidth=1.4, label=label)
        _band(ax, fractions[1:-1], one.interval, line.get_color())
    ax.plot([0, 1], [0, 1], color="0.5", linestyle="--", linewidth=1, label="random order")
    _band(ax, fractions[1:-1], curve.random_interval, "0.5")
    ax.plot(
        fractions, [0, *curve.best.values, 1], color="0.3", linestyle=":", linewidth=1, label="best"
    )
    return finish(figure, ax, "share of samples inspected", "share of wrong labels found")


def _estimators(
    result: xr.Dataset, more: tuple[Hashable, ...], name: str
) -> list[tuple[str, xr.Dataset]]:
    """Return the results of each entry of a further dimension; the name is for that of none."""
    if not more:
        return [(name, result)]
    (dim,) = more
    return [(str(entry), result.isel({dim: i})) for i, entry in enumerate(result[dim].values)]


def _band(ax: Axes, x: Any, interval: xr.DataArray, color: Any) -> None:
    low, high = interval.values
    ax.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def _draw_targets(
    result: xr.Dataset, mean: str, dots: dict[str, tuple[str, str]]
) -> tuple[Figure, Axes]:
    """Draw dots for each target, lowest first, and their mean; of several estimators side by side.

    ``dots`` are the color and the label of variables; the last are those of which there is a mean.
    """
    result = result.compute()
    estimators = _estimators(result, result[mean].dims, "")
    figure, ax = new_axes(max(6.4, 1.05 * len(estimators)), 3.6)
    for i, (_, one) in enumerate(estimators):
        one = one.sortby(mean.removesuffix("_mean"))
        x = i + np.linspace(-0.45, 0.45, one.sizes["target"])
        for name, (color, label) in dots.items():  # a legend leaves out what begins with _
            ax.plot(x, one[name], ".", color=color, label="_" * i + label)
        ends, height = x[[0, -1]], [float(one[mean])] * 2
        ax.plot(ends, height, color=color, linewidth=1, label="_" * i + "mean")
        _band(ax, ends, one.interval, color)
    names = [f"{name}\n{_with_interval(one[mean], one.interval)}" for name, one in estimators]
    ax.set_xticks(range(len(names)), [name.replace(" (", "\n(") for name in names], fontsize=7)
    return figure, ax


def _with_interval(value: xr.DataArray, interval: xr.DataArray) -> str:
    low, high = interval.values.tolist()
    return f"{float(value):.2f} ({low:.2f} to {high:.2f})"
