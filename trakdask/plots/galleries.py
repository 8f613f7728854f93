"""Galleries: targets beside the training images that helped and harmed them most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trakdask.checks import require_integer, shown
from trakdask.evaluate.labels import require_dataset
from trakdask.plots.figures import BLUE, GREEN, RED, new_figure, power_of_ten
from trakdask.variables import RANK, TARGET

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["gallery"]

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
    figure = new_figure(0.92 * sum(widths), 1.28 * len(chosen) + 0.75)
    axes = figure.subplots(
        len(chosen), len(widths), squeeze=False, gridspec_kw={"width_ratios": widths}
    )
    for ax in axes.flat:
        ax.set_axis_off()
    for row, target in enumerate(chosen):
        _draw_target(axes[row, 0], target_images[target], sides[0].isel(target=row), label)
        for side, (ranking, color) in enumerate(zip(sides, (GREEN, RED), strict=True)):
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


def _draw_target(
    ax: Axes, image: np.ndarray | xr.DataArray, ranking: xr.Dataset, label: str
) -> None:
    name = f"target_{label}"
    title = f"{label} {ranking[name].item()}" if name in ranking.coords else ""
    _draw(ax, image, title, BLUE)


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
        (axes[0, 0], axes[0, 0], "target", BLUE),
        (axes[0, 2], axes[0, 1 + n_shown], "most helpful training samples", GREEN),
        (axes[0, 3 + n_shown], axes[0, 2 + 2 * n_shown], "most harmful training samples", RED),
    ]
    note = f"above each image: label, score in units of $10^{{{unit}}}$"
    figure.text(0.98, 1 - 0.5 / inches, note, ha="right", fontsize=8, color="0.35")
    for first, last, text, color in heads:
        x = (first.get_position().x0 + last.get_position().x1) / 2
        figure.text(
            x, 1 - 0.28 / inches, text, ha="center", color=color, fontsize=10, weight="bold"
        )
