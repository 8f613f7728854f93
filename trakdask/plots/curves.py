"""Curves: how the damping was chosen, and what evaluations found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trakdask.plots.figures import BLUE, GREEN, RED, finish, new_figure
from trakdask.variables import TARGET

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["damping", "lds", "removal_curve"]


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
    figure = new_figure(5.2, 3.4)
    ax = figure.subplots()
    ax.plot(chosen.relative_damping, chosen.curve, "o-", color=BLUE, markersize=3.5, linewidth=1.2)
    if np.isfinite(relative := float(chosen.relative)):
        threshold, peak = float(chosen.threshold), float(chosen.peak)
        ax.axhspan(threshold, peak, color=GREEN, alpha=0.15, linewidth=0)
        ax.axvline(relative, color=GREEN, linewidth=1.2)
        at_choice = float(chosen.curve.sel(relative_damping=relative, method="nearest"))
        ax.plot(relative, at_choice, "o", color=GREEN, markersize=7)
    ax.set_xscale("log")
    ax.set_xlabel("λ in units of tr(K)/n")
    ax.set_ylabel("correlation with outputs")
    choice = f"λ = {relative:.3g} tr(K)/n" if np.isfinite(relative) else "λ"
    ax.set_title(f"{choice} by {chosen.rule.values}", fontsize=9)
    figure.tight_layout()
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
    figure = new_figure(6.4, 3.6)
    ax = figure.subplots()
    order = np.arange(result.sizes[TARGET])
    ax.plot(order, result.ceiling, ".", color="0.75", label="noise ceiling")
    ax.plot(order, result["lds"], ".", color=BLUE, label="LDS")
    ax.axhline(float(result.lds_mean), color=BLUE, linewidth=1)
    ax.axhspan(*result.interval.values.tolist(), color=BLUE, alpha=0.15, linewidth=0)
    ax.set_title(f"LDS {float(result.lds_mean):.3f}, mean over targets", fontsize=10)
    finish(figure, ax, "targets, by LDS", "Spearman over subsets")
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
    figure = new_figure(5.2, 3.6)
    ax = figure.subplots()
    full = float(curve.mean_full_output)
    fractions = np.array([0, *curve.fraction.values])
    for prefix, label, color in (("", "ranked by score", RED), ("random_", "random", "0.5")):
        ax.plot(fractions, [full, *curve[f"mean_{prefix}output"].values], color=color, label=label)
        low, high = curve[f"{prefix}interval"].values
        ax.fill_between(fractions[1:], low, high, color=color, alpha=0.2, linewidth=0)
    finish(figure, ax, "fraction of samples removed", "mean output of the targets")
    return figure
