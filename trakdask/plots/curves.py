"""Curves and dots: how the damping was chosen, and what evaluations found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from trakdask.plots.figures import BLUE, GREEN, RED, finish, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def damping(chosen: xr.Dataset) -> Figure:
    """Draw how the damping was chosen: the curve, what of it might be chosen, and the choice.

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
    finish(figure, ax, "λ in units of tr(K)/n", "correlation with outputs", title)
    return figure


def lds(result: xr.Dataset) -> Figure:
    """Draw the linear datamodeling score of every target, lowest first, below its noise ceiling.

    Parameters
    ----------
    result
        Dataset of :func:`trakdask.evaluate.lds`, of one kind of scores; computed here.

    Returns
    -------
    Figure with a dot per target, its ceiling in grey where there is one, and the mean with its
    interval.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    """
    result = result.sortby("lds").compute()
    figure, ax = new_axes(6.4, 3.6)
    ax.plot(result.ceiling, ".", color="0.75", label="noise ceiling")
    ax.plot(result["lds"], ".", color=BLUE, label="LDS")
    _draw_mean(ax, result.lds_mean, result.interval, BLUE)
    title = f"LDS {_with_interval(result.lds_mean, result.interval)}"
    finish(figure, ax, "targets, by LDS", "Spearman over subsets", title)
    return figure


def removal_curve(curve: xr.Dataset) -> Figure:
    """Draw how outputs change as ranked samples are removed, compared with random removal.

    Parameters
    ----------
    curve
        Dataset of :func:`trakdask.evaluate.removal_curve`; computed here.

    Returns
    -------
    Figure with the mean output over targets against the removed fraction, with intervals.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    """
    curve = curve.transpose("bound", ...).sortby("fraction").compute()
    figure, ax = new_axes(5.2, 3.6)
    full = float(curve.mean_full_output)
    fractions = np.array([0, *curve.fraction.values])
    for prefix, label, color in (("", "ranked by score", RED), ("random_", "random", "0.5")):
        ax.plot(fractions, [full, *curve[f"mean_{prefix}output"].values], color=color, label=label)
        _band(ax, fractions[1:], curve[f"{prefix}interval"], color)
    finish(figure, ax, "fraction of samples removed", "mean output of the targets")
    return figure


def class_detection(result: xr.Dataset) -> Figure:
    """Draw which share of the top k is of the target's class, beside that of a random order.

    Parameters
    ----------
    result
        Dataset of :func:`trakdask.evaluate.class_detection`, of one kind of scores; computed here.

    Returns
    -------
    Figure with the mean precision at each k with its interval, and the area under the ROC curve in
    its title.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    """
    result = result.transpose("bound", ...).sortby("k").compute()
    figure, ax = new_axes(5.2, 3.4)
    values = result.precision_mean.values
    low, high = result.precision_interval.values
    ax.errorbar(
        result.k, values, [values - low, high - values], fmt="o-", color=BLUE, markersize=4,
        linewidth=1.2, capsize=3, label="top k of the ranking",
    )  # fmt: skip
    chance = float(result.chance.mean())
    ax.axhline(chance, color="0.5", linestyle="--", linewidth=1, label="random order")
    ax.set_xscale("log")
    ax.set_xticks(result.k.values, map(str, result.k.values.tolist()))
    ax.minorticks_off()
    ax.set_ylim(0, 1.03)
    by = result.attrs.get("by", "class")
    title = f"same {by!r}: AUC {_with_interval(result.auc_mean, result.auc_interval)}"
    finish(figure, ax, "k", "precision, mean over targets", title)
    return figure


def shortcut_detection(result: xr.Dataset) -> Figure:
    """Draw how well the marked samples are found for each target, lowest first.

    Parameters
    ----------
    result
        Dataset of :func:`trakdask.evaluate.shortcut_detection`, of one kind of scores; computed
        here. Its coord ``target_`` + ``result.by`` tells which targets carry the mark.

    Returns
    -------
    Figure with a dot per target, in red if it carries the mark, and the mean of these.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    """
    result = result.sortby("auprc").compute()
    is_marked = result[f"target_{result.attrs['by']}"].values.astype(bool)
    figure, ax = new_axes(6.4, 3.6)
    for chosen, color, label in (
        (~is_marked, "0.6", "targets without the mark"), (is_marked, RED, "targets with the mark")
    ):  # fmt: skip
        ax.plot(np.flatnonzero(chosen), result.auprc.values[chosen], ".", color=color, label=label)
    _draw_mean(ax, result.auprc_mean, result.interval, RED)
    ax.axhline(float(result.chance), color="0.5", linestyle="--", linewidth=1, label="random order")
    ax.set_ylim(0, 1.03)
    title = f"AUPRC {_with_interval(result.auprc_mean, result.interval)}"
    finish(figure, ax, "targets, by AUPRC", "AUPRC of the marked samples", title)
    return figure


def mislabelled_curve(curve: xr.Dataset) -> Figure:
    """Draw which share of the wrong labels is found by inspecting the most suspicious samples.

    Parameters
    ----------
    curve
        Dataset of :func:`trakdask.evaluate.mislabelled_curve`; computed here. A line is drawn for
        each entry along a further dimension, of which there may be one.

    Returns
    -------
    Figure with a line and an interval per method, the interval of a random order in grey, and the
    best possible curve as a dotted line.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    """
    more = [str(dim) for dim in curve.found.dims if dim != "fraction"]
    curve = curve.transpose("bound", ..., "fraction").sortby("fraction").compute()
    methods = [curve.isel({more[0]: i}) for i in range(curve.sizes[more[0]])] if more else [curve]
    figure, ax = new_axes(5.2, 3.8)
    fractions = np.array([0, *curve.fraction.values, 1])
    for one in methods:
        name = str(one[more[0]].values) if more else "ranked"
        label = f"{name}, area {float(one.area):.2f}"
        (line,) = ax.plot(fractions, [0, *one.found.values, 1], linewidth=1.4, label=label)
        _band(ax, fractions[1:-1], one.interval, line.get_color())
    ax.plot([0, 1], [0, 1], color="0.5", linestyle="--", linewidth=1, label="random order")
    _band(ax, fractions[1:-1], curve.random_interval, "0.5")
    ax.plot(
        fractions, [0, *curve.best.values, 1], color="0.3", linestyle=":", linewidth=1, label="best"
    )
    finish(figure, ax, "share of samples inspected", "share of wrong labels found")
    return figure


def randomization_check(result: xr.Dataset) -> Figure:
    """Draw the correlation with a random model for every target, lowest first.

    Parameters
    ----------
    result
        Dataset of :func:`trakdask.evaluate.randomization_check`, of one random model; computed
        here.

    Returns
    -------
    Figure with a dot per target, and the mean with its interval.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    """
    result = result.sortby("correlation").compute()
    figure, ax = new_axes(6.4, 3.6)
    ax.axhline(0, color="0.5", linestyle="--", linewidth=1)
    ax.plot(result.correlation, ".", color=BLUE, label="targets")
    mean, interval = result.correlation_mean, result.interval
    _draw_mean(ax, mean, interval, BLUE)
    ax.set_ylim(-1.03, 1.03)
    title = f"correlation with a random model {_with_interval(mean, interval)}"
    finish(figure, ax, "targets, by correlation", "Spearman over samples", title)
    return figure


def seed_agreement(result: xr.Dataset) -> Figure:
    """Draw the reliability of mean scores against the number of models.

    Parameters
    ----------
    result
        Dataset of :func:`trakdask.evaluate.seed_agreement`; computed here.

    Returns
    -------
    Figure with the reliability and its interval, and the agreement of two models in its title.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    """
    result = result.transpose("bound", ...).sortby("n_models").compute()
    figure, ax = new_axes(5.2, 3.4)
    ax.plot(result.n_models, result.reliability, "o-", color=GREEN, markersize=4, linewidth=1.2,
            label="predicted by Spearman-Brown")  # fmt: skip
    _band(ax, result.n_models, result.reliability_interval, GREEN)
    ax.set_xticks(result.n_models.values)
    ax.set_ylim(0, 1.03)
    title = f"agreement of two models {_with_interval(result.agreement_mean, result.interval)}"
    finish(figure, ax, "models that are averaged", "correlation with as many others", title)
    return figure


def _band(ax: Axes, x: Any, interval: xr.DataArray, color: Any) -> None:
    low, high = interval.values
    ax.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def _draw_mean(ax: Axes, mean: xr.DataArray, interval: xr.DataArray, color: str) -> None:
    """Draw a line at the mean over targets, with its interval."""
    ax.axhline(float(mean), color=color, linewidth=1, label="mean")
    ax.axhspan(*interval.values.tolist(), color=color, alpha=0.15, linewidth=0)


def _with_interval(value: xr.DataArray, interval: xr.DataArray) -> str:
    low, high = interval.values.tolist()
    return f"{float(value):.2f} ({low:.2f} to {high:.2f})"
