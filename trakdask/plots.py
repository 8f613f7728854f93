"""Plots of results; each function takes labelled data and returns a matplotlib Figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trakdask.checks import require_integer, shown
from trakdask.evaluate.labels import require_dataset
from trakdask.variables import RANK, TARGET

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["damping", "gallery", "lds", "power_of_ten", "removal_curve"]

_GREEN, _RED, _BLUE = "#1a7f37", "#c62828", "#1565c0"
_RANKED = (TARGET, RANK)
_AXES = set(_RANKED)


def gallery(
    helpful: xr.Dataset,
    harmful: xr.Dataset,
    images: np.ndarray | xr.DataArray,
    target_images: np.ndarray | xr.DataArray,
    *,
    targets: Sequence[int] | None = None,
    label: str = "label",
    n_shown: int = 5,
) -> Figure:
    """Draw targets, each with its most helpful and most harmful training images.

    Parameters
    ----------
    helpful, harmful
        Rankings (target, rank) of :func:`~trakdask.top_k`, with ``largest=True`` and
        ``largest=False``; computed here for the drawn targets only.
    images, target_images
        Grey or RGB images by position, (n, h, w), (n, 1, h, w), (n, 3, h, w) or (n, h, w, 3).
    targets
        Positions of the targets to draw; the first six by default.
    label
        Name of the coord whose values are written above the images.
    n_shown
        Number of training images on each side.

    Returns
    -------
    Figure with one row per target: the target, its most helpful, its most harmful training images.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    TypeError
        If rankings are not Datasets, or images are not arrays.
    ValueError
        If there is no such coord or target, images have another shape, or a ranked sample has no
        image.
    """
    remedy = "try td.top_k(scores, 5) and td.top_k(scores, 5, largest=False)"
    for name, ranking in (("helpful", helpful), ("harmful", harmful)):
        require_dataset(ranking, {"score": _RANKED, "position": _RANKED}, name, remedy)
    n_shown = require_integer("n_shown", n_shown, 1, remedy="try n_shown=5")
    n_shown = min(n_shown, helpful.sizes[RANK], harmful.sizes[RANK])
    _require_images(images, "images")
    _require_images(target_images, "target_images")
    chosen = _chosen_targets((helpful, harmful), target_images, targets)
    _require_label((helpful, harmful), label)
    sides = [r.isel(target=chosen, rank=slice(n_shown)).compute() for r in (helpful, harmful)]
    unit = power_of_ten(*(side.score for side in sides))
    widths = [1.25, 0.2, *[1] * n_shown, 0.2, *[1] * n_shown]
    figure = _new_figure(0.92 * sum(widths), 1.28 * len(chosen) + 0.75)
    axes = figure.subplots(
        len(chosen), len(widths), squeeze=False, gridspec_kw={"width_ratios": widths}
    )
    for ax in axes.flat:
        ax.set_axis_off()
    for row, target in enumerate(chosen):
        _draw_target(axes[row, 0], target_images[target], sides[0].isel(target=row), label)
        for side, (ranking, color) in enumerate(zip(sides, (_GREEN, _RED), strict=True)):
            first = 2 + side * (n_shown + 1)
            _draw_side(
                axes[row, first : first + n_shown],
                ranking.isel(target=row),
                images,
                label,
                color,
                unit,
            )
    _head(figure, axes, n_shown, unit)
    return figure


def _require_images(images: object, name: str) -> None:
    remedy = "try an array of shape (n, h, w) or (n, h, w, 3)"
    shape = getattr(images, "shape", None)
    if not isinstance(shape, tuple):
        raise TypeError(f"expected {name} to be an array, got a {type(images).__name__}; {remedy}")
    is_drawable = len(shape) == 3 or (len(shape) == 4 and {1, 3} & {shape[1], shape[3]})
    if not is_drawable or 0 in shape:
        raise ValueError(
            f"expected {name} of shape (n, h, w), (n, 1, h, w), (n, 3, h, w) or (n, h, w, 3), none "
            f"of them empty, got {tuple(shape)}; {remedy}"
        )
    dtype = np.asarray(images[0]).dtype  # type: ignore[index]
    if dtype.kind not in "fiub":
        raise ValueError(f"expected numbers in {name}, got dtype {dtype}; {remedy}")


def _chosen_targets(
    rankings: tuple[xr.Dataset, xr.Dataset],
    target_images: np.ndarray | xr.DataArray,
    targets: Sequence[int] | None,
) -> list[int]:
    sizes = [ranking.sizes[TARGET] for ranking in rankings]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"expected the same targets in helpful and harmful, got {sizes[0]} and {sizes[1]} "
            "targets; try rankings of the same scores"
        )
    n = min(sizes[0], len(target_images))
    remedy = f"try targets=[{n - 1}], of {sizes[0]} ranked targets and {len(target_images)} images"
    if targets is None:
        return list(range(min(6, n)))
    if isinstance(targets, (str, bytes)) or not isinstance(targets, Iterable):
        raise TypeError(
            f"expected targets to be a list of positions, got {shown(targets)}; {remedy}"
        )
    chosen = [require_integer("every target", target, 0, n, remedy=remedy) for target in targets]
    if not chosen:
        raise ValueError(f"expected at least one position in targets, got []; {remedy}")
    return chosen


def _require_label(rankings: tuple[xr.Dataset, xr.Dataset], label: str) -> None:
    for ranking in rankings:
        names = [str(name) for name, coord in ranking.coords.items() if set(coord.dims) <= _AXES]
        if not isinstance(label, str) or label not in names:
            raise ValueError(
                f"expected label to be one of the rankings' coords {names}, got {shown(label)}; "
                f"try label={names[0]!r}"
            )


def damping(chosen: xr.Dataset) -> Figure:
    """Draw how the damping was chosen: the curve, half a standard error below its peak, the choice.

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
    TypeError, ValueError
        If this is not such a Dataset, or the damping was not chosen by outputs, in which case there
        is no curve.
    """
    require_dataset(
        chosen,
        {
            "curve": ("relative_damping",),
            **dict.fromkeys(("rule", "relative", "threshold", "peak"), ()),
        },
        "chosen",
        "try td.damping(features, 'completeness')",
    )
    chosen = chosen.compute()
    if not np.isfinite(chosen.curve.values).any():
        raise ValueError(
            "expected a damping that was chosen by outputs, which has a curve, got the rule "
            f"{str(chosen.rule.values)!r}; try td.damping(features, 'completeness')"
        )
    figure = _new_figure(5.2, 3.4)
    ax = figure.subplots()
    ax.plot(chosen.relative_damping, chosen.curve, "o-", color=_BLUE, markersize=3.5, linewidth=1.2)
    if np.isfinite(relative := float(chosen.relative)):
        threshold, peak = float(chosen.threshold), float(chosen.peak)
        ax.axhspan(threshold, peak, color=_GREEN, alpha=0.15, linewidth=0)
        ax.axvline(relative, color=_GREEN, linewidth=1.2)
        at_choice = float(chosen.curve.sel(relative_damping=relative, method="nearest"))
        ax.plot(relative, at_choice, "o", color=_GREEN, markersize=7)
    ax.set_xscale("log")
    ax.set_xlabel("λ in units of tr(K)/n")
    ax.set_ylabel("correlation with outputs")
    choice = f"λ = {relative:.3g} tr(K)/n" if np.isfinite(relative) else "λ"
    ax.set_title(f"{choice} by {chosen.rule.values}", fontsize=9)
    figure.tight_layout()
    return figure


def power_of_ten(*scores: xr.DataArray) -> int:
    """Return the exponent e for which the largest of ``score / 10**e`` is between 1 and 10.

    NaN and infinite scores are ignored.

    Raises
    ------
    TypeError
        If there are no scores, or they are not DataArrays of numbers.

    Examples
    --------
    >>> power_of_ten(xr.DataArray([-0.00034, 0.00011]))
    -4
    """
    for array in scores or (None,):
        if not isinstance(array, xr.DataArray) or array.dtype.kind not in "fiub":
            kind = f"dtype {array.dtype}" if isinstance(array, xr.DataArray) else shown(array)
            raise TypeError(
                f"expected DataArrays of numbers, got {kind}; try td.top_k(scores, 5).score"
            )
    values = (np.abs(array.values.astype(np.float64)) for array in scores)
    largest = max(float(np.max(x, where=np.isfinite(x), initial=0.0)) for x in values)
    return math.floor(math.log10(largest)) if largest > 0 else 0


def _new_figure(width: float, height: float) -> Figure:
    try:
        import matplotlib.pyplot as plt  # optional dependency
    except ImportError as err:
        raise ImportError(
            f"expected matplotlib for plots, got an import error ({err}); try pip install "
            "'trakdask[plots]'"
        ) from err
    figure = plt.figure(figsize=(width, height))
    plt.close(figure)  # a notebook would show an open figure twice
    return figure


def _draw_target(
    ax: Axes, image: np.ndarray | xr.DataArray, ranking: xr.Dataset, label: str
) -> None:
    name = f"target_{label}"
    title = f"{label} {ranking[name].item()}" if name in ranking.coords else ""
    _draw(ax, image, title, _BLUE)


def _draw_side(
    axes: np.ndarray,
    ranking: xr.Dataset,
    images: np.ndarray | xr.DataArray,
    label: str,
    color: str,
    unit: int,
) -> None:
    for rank, ax in enumerate(axes):
        one = ranking.isel(rank=rank)
        if (position := int(one.position)) < 0:
            continue  # there are fewer samples than ranks
        if position >= len(images):
            raise ValueError(
                f"expected one image per training sample, in their order, got {len(images)} images "
                f"and the ranked sample {position}; try the images of all training samples"
            )
        shown = (
            f"{one[label].item():g}" if one[label].dtype.kind in "iuf" else str(one[label].item())
        )
        _draw(ax, images[position], f"{shown}   {float(one.score) / 10.0**unit:+.2f}", color)


def _draw(ax: Axes, image: np.ndarray | xr.DataArray, title: str, color: str) -> None:
    ax.set_axis_on()
    ax.imshow(_drawable(np.asarray(image)), cmap="gray_r", interpolation="nearest")
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_color(color)
        spine.set_linewidth(1.6)
    ax.set_title(title, fontsize=8, color=color, pad=3)


def _drawable(image: np.ndarray) -> np.ndarray:
    if image.ndim == 3 and image.shape[0] in (1, 3):
        image = np.moveaxis(image, 0, -1)
    return image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image


def _head(figure: Figure, axes: np.ndarray, n_shown: int, unit: int) -> None:
    inches = figure.get_size_inches()[1]
    figure.subplots_adjust(
        left=0.02, right=0.98, bottom=0.1 / inches, top=1 - 0.72 / inches, wspace=0.12, hspace=0.42
    )
    heads = [
        (axes[0, 0], axes[0, 0], "target", _BLUE),
        (axes[0, 2], axes[0, 1 + n_shown], "most helpful training samples", _GREEN),
        (axes[0, 3 + n_shown], axes[0, 2 + 2 * n_shown], "most harmful training samples", _RED),
    ]
    note = f"above each image: label, score in units of $10^{{{unit}}}$"
    figure.text(0.98, 1 - 0.5 / inches, note, ha="right", fontsize=8, color="0.35")
    for first, last, text, color in heads:
        x = (first.get_position().x0 + last.get_position().x1) / 2
        figure.text(
            x, 1 - 0.28 / inches, text, ha="center", color=color, fontsize=10, weight="bold"
        )


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
    TypeError, ValueError
        If this is not such a Dataset, or it has more than one kind of scores.
    """
    require_dataset(
        result,
        {"lds": (TARGET,), "ceiling": (TARGET,), "lds_mean": (), "interval": ("bound",)},
        "result",
        "try td.evaluate.lds(scores, masks, outputs), of one kind of scores: "
        "result.sel(estimator='soft')",
    )
    result = result.sortby("lds").compute()
    figure = _new_figure(6.4, 3.6)
    ax = figure.subplots()
    order = np.arange(result.sizes[TARGET])
    ax.plot(order, result.ceiling, ".", color="0.75", label="noise ceiling")
    ax.plot(order, result["lds"], ".", color=_BLUE, label="LDS")
    ax.axhline(float(result.lds_mean), color=_BLUE, linewidth=1)
    ax.axhspan(*result.interval.values.tolist(), color=_BLUE, alpha=0.15, linewidth=0)
    ax.set_title(f"LDS {float(result.lds_mean):.3f}, mean over targets", fontsize=10)
    _finish(figure, ax, "targets, by LDS", "Spearman over subsets")
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
    TypeError, ValueError
        If this is not such a Dataset.
    """
    along, bounds = ("fraction",), ("bound", "fraction")
    require_dataset(
        curve,
        {
            "mean_full_output": (),
            **{"mean_output": along, "interval": bounds},
            **{"mean_random_output": along, "random_interval": bounds},
        },
        "curve",
        "try td.evaluate.removal_curve(train_fn, scores, [0.1, 0.2])",
    )
    curve = curve.transpose("bound", ...).sortby("fraction").compute()
    figure = _new_figure(5.2, 3.6)
    ax = figure.subplots()
    full = float(curve.mean_full_output)
    fractions = np.array([0, *curve.fraction.values])
    for prefix, label, color in (("", "ranked by score", _RED), ("random_", "random", "0.5")):
        ax.plot(fractions, [full, *curve[f"mean_{prefix}output"].values], color=color, label=label)
        low, high = curve[f"{prefix}interval"].values
        ax.fill_between(fractions[1:], low, high, color=color, alpha=0.2, linewidth=0)
    _finish(figure, ax, "fraction of samples removed", "mean output of the targets")
    return figure


def _finish(figure: Figure, ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.legend(frameon=False, fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
