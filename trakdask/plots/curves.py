"""Curves and dots: how the damping was chosen, and what evaluations found."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from trakdask.plots.figures import BLUE, GREEN, axes, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NEARLY_ALL = 0.95
"""Share of the wrong labels beyond which their curves tell nothing more."""


def damping(chosen: xr.Dataset, *, ax: Axes | None = None) -> Figure:
    """Draw how the damping was chosen: the curve, what suffices for the prior, and the choice.

    Parameters
    ----------
    chosen
        Dataset of :func:`trakdask.damping`; computed here.
    ax
        The axes to draw into. By default, the function makes a new figure.

    Returns
    -------
    Figure of the axes; no choice is marked if the curve was too low to choose from.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    ValueError
        If the damping was not chosen by outputs, in which case there is no curve.

    Examples
    --------
    Three linear classifiers say from the pixels of a digit whether it is an 8.

    .. plot::
        :include-source:

        >>> import numpy as np, trakdask as td
        >>> digits, _ = td.examples.digits()
        >>> x, y = digits.image.values.reshape(-1, 64), np.where(digits.label == 8, 1, -1)
        >>> ridges = np.multiply.outer([3, 10, 30], np.eye(64))
        >>> margins = 3 * y[:, None] * (x @ np.linalg.solve(x.T @ x + ridges, x.T @ y).T)
        >>> gradients = np.stack([x * y[:, None]] * 3, axis=2)
        >>> q = 1 / (1 + np.exp(margins))
        >>> features = td.from_features(gradients, "margins", output=margins, out_to_loss=q)
        >>> chosen = td.damping(features, td.Soft(damping="completeness"))
        >>> figure = td.plots.damping(chosen)
    """
    chosen = chosen.compute()
    if not np.isfinite(chosen.curve.values).any():
        raise ValueError(
            "expected a damping that was chosen by outputs, which has a curve, got the rule "
            f"{str(chosen.rule.values)!r}; try td.damping(features, "
            "td.Soft(damping='completeness'))"
        )
    ax = axes(ax, 6.8, 3.4)
    style: dict[str, Any] = {"markersize": 3.5, "linewidth": 1.2}
    label = "outputs of training rows,\nby totals of scores"
    ax.plot(chosen.relative_damping, chosen.curve, "o-", color=BLUE, label=label, **style)
    if np.isfinite(chosen.grade.values).any():
        label = "outputs of left-out\ncheckpoints"
        ax.plot(chosen.relative_damping, chosen.grade, "s-", color="0.4", label=label, **style)
    # Outputs that did not choose leave a curve, and no choice to mark.
    if np.isfinite(relative := float(chosen.relative)):
        threshold, peak = float(chosen.threshold), float(chosen.peak)
        label = "not clearly below\nthe peak"
        ax.axhspan(threshold, peak, color=GREEN, alpha=0.15, linewidth=0, label=label)
        ax.axvline(relative, color=GREEN, linewidth=1.2, label="chosen λ")
        at_choice = float(chosen.curve.sel(relative_damping=relative, method="nearest"))
        ax.plot(relative, at_choice, "o", color=GREEN, markersize=7)
    ax.set_xscale("log")
    choice = f"λ = {relative:.3g} tr(K)/n" if np.isfinite(relative) else "λ"
    title = f"{choice} by {chosen.rule.values}"
    return finish(ax, "λ in units of tr(K)/n", "correlation with outputs", title)


def lds(result: xr.Dataset, *, ax: Axes | None = None) -> Figure:
    """Draw the linear datamodeling score of every target, lowest first, below its noise ceiling.

    Parameters
    ----------
    result
        Dataset of :func:`trakdask.evaluate.lds`, with at most one further dimension, such as
        ``estimator``; computed here.
    ax
        The axes to draw into. By default, the function makes a new figure.

    Returns
    -------
    Figure with a dot per target, its ceiling in grey where there is one, and the mean with its
    interval; estimators are side by side.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.

    Examples
    --------
    Two kinds of scores, which are the truth with little and with much noise.

    .. plot::
        :include-source:

        >>> import numpy as np, trakdask as td, xarray as xr
        >>> noise = np.random.default_rng(0).standard_normal
        >>> truth = xr.DataArray(noise((200, 50)), dims=("sample", "target"))
        >>> error = noise((200, 50))
        >>> scores = {"good": truth + 0.5 * error, "poor": truth + 2 * error}
        >>> masks = td.evaluate.subsets(200, 40)
        >>> outputs = xr.dot(masks, truth, dim="sample").expand_dims(seed=2)
        >>> outputs = outputs + 5 * noise((2, 40, 50))
        >>> figure = td.plots.lds(td.evaluate.lds(scores, masks, outputs))
    """
    result = result.compute()
    estimators = _estimators(result, result.lds_mean.dims, "")
    longest = max(len(name) for name, _ in estimators)
    ax = axes(ax, max(6.4, 1.4 + max(1.05, 0.08 * longest) * len(estimators)), 3.6)
    names = []
    for i, (name, one) in enumerate(estimators):
        one = one.sortby("lds")
        # The targets of an estimator side by side, from the lowest.
        x, again = i + np.linspace(-0.45, 0.45, one.sizes["target"]), "_" * i  # not in the legend
        if np.isfinite(one.ceiling).any():
            ax.plot(x, one.ceiling, ".", color="0.75", label=f"{again}noise ceiling")
        ax.plot(x, one["lds"], ".", color=BLUE, label=f"{again}LDS")
        mean, (low, high) = float(one.lds_mean), one.interval.values.tolist()
        ax.plot(x[[0, -1]], [mean, mean], color=BLUE, linewidth=1, label=f"{again}mean")
        _band(ax, x[[0, -1]], one.interval, BLUE)
        names.append(f"{name}\n{mean:.2f}\n({low:.2f} to {high:.2f})")
    ax.set_xticks(range(len(names)), names, fontsize=7)
    return finish(ax, "targets, by LDS", "Spearman over subsets")


def mislabelled_curve(curve: xr.Dataset, *, ax: Axes | None = None) -> Figure:
    """Draw which share of the wrong labels is found by inspecting the most suspicious samples.

    Parameters
    ----------
    curve
        Dataset of :func:`trakdask.evaluate.mislabelled_curve`, with at most one further dimension,
        such as ``estimator``; computed here.
    ax
        The axes to draw into. By default, the function makes a new figure.

    Returns
    -------
    Figure with a line and an interval per estimator, the interval of a random order in grey, and
    the best possible curve as a dotted line. The horizontal
    axis ends at twice the share that suffices the best of the estimators for 95 % of the labels.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.

    Examples
    --------
    Two methods, which give wrong labels higher values on average.

    .. plot::
        :include-source:

        >>> import numpy as np, trakdask as td, xarray as xr
        >>> random = np.random.default_rng(0)
        >>> is_wrong = random.random(500) < 0.1
        >>> values = xr.DataArray(random.standard_normal((500, 2)), dims=("sample", "method"))
        >>> values = values.assign_coords(method=["good", "poor"]) + np.outer(is_wrong, [3, 1])
        >>> figure = td.plots.mislabelled_curve(td.evaluate.mislabelled_curve(values, is_wrong))
    """
    curve = curve.transpose("bound", ..., "fraction").sortby("fraction").compute()
    ax = axes(ax, 7.4, 3.8)
    # Nothing is found before inspection begins, and all at its end.
    fractions = np.array([0, *curve.fraction.values, 1])
    for name, one in _estimators(curve, curve.area.dims, "ranked"):
        label = f"{name}, area {float(one.area):.2f}"
        (line,) = ax.plot(fractions, [0, *one.found.values, 1], linewidth=1.4, label=label)
        _band(ax, fractions[1:-1], one.interval, line.get_color())
    ax.plot([0, 1], [0, 1], color="0.5", linestyle="--", linewidth=1, label="random order")
    _band(ax, fractions[1:-1], curve.random_interval, "0.5")
    ax.plot(
        fractions,
        [0, *curve.best.values, 1],
        color="0.5",
        linestyle=":",
        linewidth=1.4,
        label="best",
    )
    # Twice as far as the best curve needs to find nearly all.
    suffices = curve.fraction.where(curve.found.max(curve.area.dims) >= _NEARLY_ALL).min()
    ax.set_xlim(0, min(1, 2 * float(suffices.fillna(1))))
    return finish(ax, "share of samples inspected", "share of wrong labels found")


def cross_validation(result: xr.Dataset, *, ax: Axes | None = None) -> Figure:
    """Draw how well scores predict checkpoints that were left out, with errors.

    Parameters
    ----------
    result
        Dataset of :func:`trakdask.evaluate.cross_validate`.
    ax
        The axes to draw into. By default, the function makes a new figure.

    Returns
    -------
    Figure with the grade of each estimator, a bar of one standard error to both sides, and the
    grades without one checkpoint as grey dots. With several estimators the axis says in brackets
    by how much each differs from the first.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.

    Examples
    --------
    The outputs of the targets are sums of scores and noise here.

    .. plot::
        :include-source:

        >>> import numpy as np, trakdask as td, xarray as xr
        >>> features = td.testing.simulate_features(200, 16, 8)
        >>> masks = td.evaluate.subsets(features, 8).rename(subset="checkpoint")
        >>> targets = td.testing.simulate_features(50, 16, 8, seed=1)
        >>> sums = xr.dot(masks, td.score(features, targets, "trak"), dim="sample").compute()
        >>> noise = float(sums.std()) * np.random.default_rng(0).standard_normal((50, 8))
        >>> targets = targets.assign(output=sums.rename(target="sample").T + noise)
        >>> features = features.assign(trained_on=masks)
        >>> estimators = {"trak": "trak", "grad_dot": "grad_dot"}
        >>> result = td.evaluate.cross_validate(features, targets, estimators)
        >>> figure = td.plots.cross_validation(result)
    """
    if "estimator" not in result.dims:
        result = result.expand_dims(estimator=["scores"])
    names = [str(name) for name in result.estimator.values]
    ax = axes(ax, 6.8, 1.2 + 0.45 * len(names))
    rows = np.arange(len(names))
    without = result.without.transpose("checkpoint", "estimator").values
    x, y = without.ravel(), np.tile(rows, len(without))
    ax.plot(x, y, "|", color="0.6", markersize=9, label="without one checkpoint")
    grades, errors = result.lds_mean.values, result.error.values
    ax.errorbar(
        grades, rows, xerr=errors, fmt="o", color=BLUE, capsize=3, linewidth=1.4,
        label="grade ± its error",
    )  # fmt: skip
    labels = [f"{name}\n{grade:.2f}" for name, grade in zip(names, grades, strict=True)]
    # The first is what others are compared with.
    for i in range(1, len(names)):
        difference, error = result.difference.values[i], result.difference_error.values[i]
        labels[i] += f" ({difference:+.3f} ± {error:.3f})"
    ax.set_yticks(rows, labels)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.axvline(0, color="0.8", linewidth=1)
    ax.locator_params(axis="x", nbins=6)
    return finish(ax, "rank correlation with left-out checkpoints", "")


def _estimators(
    result: xr.Dataset, more: tuple[Hashable, ...], name: str
) -> list[tuple[str, xr.Dataset]]:
    """Return the results of each entry of a further dimension; without one, under this name."""
    if not more:
        return [(name, result)]
    (dim,) = more
    return [(str(entry), result.isel({dim: i})) for i, entry in enumerate(result[dim].values)]


def _band(ax: Axes, x: Any, interval: xr.DataArray, color: Any) -> None:
    low, high = interval.values
    ax.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
