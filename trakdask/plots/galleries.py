"""Galleries: targets beside the training images that helped and harmed them most."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from trakdask.checks import require_integer
from trakdask.plots.figures import BLUE, GREEN, RED, new_figure
from trakdask.variables import N_SAMPLES, RANK, TARGET

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_CHANNELS = (1, 3)
_IMAGE_IN, _TARGET_IN = 0.92, 1.15
_POINTS = 11
_LINE_IN = 0.185
_CHARACTERS_PER_IN = 10.5
"""The type above the images has as many."""
_LABEL_LINES = 2


def gallery(
    helpful: xr.Dataset,
    harmful: xr.Dataset,
    images: np.ndarray | xr.DataArray,
    target_images: np.ndarray | xr.DataArray,
    *,
    targets: Sequence[int] | None = None,
    label: str = "label",
    predictions: np.ndarray | xr.DataArray | None = None,
    n_shown: int = 5,
    normalize: tuple[float | Sequence[float], float | Sequence[float]] | None = None,
    cmap: str = "gray_r",
) -> Figure:
    """Draw targets, each with its most helpful and most harmful training images.

    Parameters
    ----------
    helpful, harmful
        Rankings (target, rank) of :func:`~trakdask.top_k`, with ``largest=True`` and
        ``largest=False``; computed here for the drawn targets only.
    images, target_images
        Grey or RGB images by position, (n, h, w), (n, 1, h, w), (n, 3, h, w) or (n, h, w, 3).
        Colours may lie in [0, 1], in [-1, 1], or be bytes.
    targets
        Positions of the targets to draw; the first six by default, as the title then says.
    label
        Name of the coord whose values are written above the images; long texts are shortened.
    predictions
        Labels that the model predicted, by position of the target: a title then says ``3, read as
        9``.
    n_shown
        Number of training images on each side.
    normalize
        Mean and standard deviation that the images were normalized with, numbers or one for each
        channel: images are drawn as they were before.
    cmap
        Colour map of grey images; ``"gray"`` for photographs, whose zero is black.

    Returns
    -------
    Figure with one row per target: the target, its most helpful, its most harmful training images,
    with their labels and scores. ``helpful.attrs`` say how the scores were made.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    IndexError
        If there is no image of a ranked sample: give the images of all training samples, in order.
        Also if a target is not there.
    ValueError
        If ``targets`` is empty, or there are images of other samples than were ranked.

    Examples
    --------
    The digits whose pixels are most and least alike.

    .. plot::
        :include-source:

        >>> import trakdask as td
        >>> digits, others = td.examples.digits()
        >>> images, tested = digits.image.values, others.image.values
        >>> coords = {"label": digits.label.values}
        >>> features = td.from_features(images.reshape(-1, 64), "pixels", coords=coords)
        >>> targets = td.from_features(tested[2:4].reshape(-1, 64), "pixels")
        >>> scores = td.score(features, targets, "grad_cos")
        >>> alike, unlike = td.top_k(scores, 4), td.top_k(scores, 4, largest=False)
        >>> figure = td.plots.gallery(alike, unlike, images, tested[2:4])
    """
    n_shown = require_integer("n_shown", n_shown, 1, remedy="try n_shown=5")
    n_shown = min(n_shown, helpful.sizes[RANK], harmful.sizes[RANK])
    chosen = list(range(min(6, helpful.sizes[TARGET]))) if targets is None else list(targets)
    if not chosen:
        raise ValueError("expected targets= with at least one position, got none; try targets=[0]")
    if (last := max(chosen)) >= (n_targets := helpful.sizes[TARGET]):
        raise IndexError(
            f"expected targets= as positions below {n_targets}, the number of targets, got {last}; "
            f"try targets=range({min(6, n_targets)})"
        )
    sides = [r.isel(target=chosen, rank=slice(n_shown)).compute() for r in (helpful, harmful)]
    _require_image("target_images", target_images, last)
    _require_image("images", images, max(int(side.position.max()) for side in sides))
    if len(images) != (n := helpful.attrs.get(N_SAMPLES, len(images))):
        raise ValueError(
            f"expected images= of the {n} samples that were ranked, got {len(images)}; try "
            "images[rows] of the rows that were selected, or that the store has not dropped"
        )
    pictures = _pictures(sides, images, target_images, chosen, label, predictions)
    places, stored, titles, colors = zip(*pictures, strict=True)
    drawn = as_colours(stored, normalize)
    n_lines = max(title.count("\n") + 1 for title in titles)
    note = ""
    if targets is None and len(chosen) < n_targets:
        note = f"the first {len(chosen)} of {n_targets} targets"
    figure, axes = _grid(len(chosen), n_shown, n_lines, note)
    # All grey images in one scale, so that they can be compared.
    low, high = grey_limits(drawn) or (None, None)
    for place, image, title, color in zip(places, drawn, titles, colors, strict=True):
        ax = axes[place]
        # Places without an image stay empty.
        ax.set_axis_on()
        ax.imshow(image, cmap=cmap, vmin=low, vmax=high, interpolation="nearest")
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_color(color)
        ax.spines[:].set_linewidth(1.6)
        ax.set_title(title, fontsize=_POINTS, color=color, pad=5, parse_math=False)
    return figure


def _require_image(name: str, images: np.ndarray | xr.DataArray, position: int) -> None:
    if position >= len(images):
        raise IndexError(
            f"expected {name}= with the images of all samples, in their order, got {len(images)}, "
            f"which has none of sample {position}; try the images of the samples that were "
            "featurized"
        )


def _pictures(
    sides: Sequence[xr.Dataset],
    images: Any,
    target_images: Any,
    chosen: list[int],
    label: str,
    predictions: Any,
) -> Iterator[tuple[tuple[int, int], Any, str, str]]:
    """Yield targets, then their most helpful and most harmful samples.

    Each has its row and column, its image, the text above the image, and the colour of both.
    """
    n_shown, of_targets = sides[0].sizes[RANK], sides[0].coords.get(f"target_{label}")
    for row, target in enumerate(chosen):
        text = "" if of_targets is None else _text(of_targets[row])
        if predictions is not None and (read_as := _text(np.asarray(predictions)[target])) != text:
            text = f"{text}, read as {read_as}"
        yield (row, 0), target_images[target], _wrapped(text, _TARGET_IN), BLUE
    for side, first, color in zip(sides, (2, n_shown + 3), (GREEN, RED), strict=True):
        for row, rank in np.ndindex(side.sizes[TARGET], n_shown):
            one = side.isel({TARGET: row, RANK: rank})
            if (position := int(one.position)) < 0:
                continue  # there are fewer samples than ranks
            text, score = _text(one[label]), f"{float(one.score):+#.2g}"
            fits = len(text) + len(score) + 2 <= _IMAGE_IN * _CHARACTERS_PER_IN
            title = f"{text}  {score}" if fits else f"{_wrapped(text)}\n{score}"
            yield (row, first + rank), images[position], title, color


def _text(value: Any) -> str:
    return f"{value.item():g}" if value.dtype.kind in "iuf" else str(value.item())


def _wrapped(text: str, inches: float = _IMAGE_IN) -> str:
    """Return a text in the few short lines that fit above an image."""
    width = int(inches * _CHARACTERS_PER_IN)
    return "\n".join(textwrap.wrap(text, width, max_lines=_LABEL_LINES, placeholder="…"))


def grey_limits(colours: Sequence[np.ndarray]) -> tuple[float, float] | None:
    """Return the smallest and largest value of the grey images: they share a scale."""
    grey = [image[np.isfinite(image)] for image in colours if image.ndim == 2]
    values = np.concatenate(grey) if grey else np.zeros(0)
    return (float(values.min()), float(values.max())) if len(values) else None


def _grid(n_rows: int, n_shown: int, n_lines: int, note: str) -> tuple[Figure, np.ndarray]:
    """Return a figure with its headings, and its axes, which are still empty."""
    # In widths of an image: the target, and two sides with gaps before them.
    widths = [_TARGET_IN / _IMAGE_IN, 0.2, *[1] * n_shown, 0.2, *[1] * n_shown]
    width, gap = _IMAGE_IN * sum(widths) * 1.06, _LINE_IN * n_lines + 0.12
    note = textwrap.fill(note, int(width * _CHARACTERS_PER_IN))
    head = 0.32 + _LINE_IN * (note.count("\n") + 1) * bool(note)
    height = head + n_rows * (_IMAGE_IN + gap) + 0.08
    figure = new_figure(width, height)
    grid = {"width_ratios": widths, "left": 0.02, "right": 0.98, "bottom": 0.08 / height}
    grid |= {"top": 1 - (head + gap) / height, "wspace": 0.12, "hspace": gap / _IMAGE_IN}
    axes = figure.subplots(n_rows, len(widths), squeeze=False, gridspec_kw=grid)
    for ax in axes.flat:
        ax.set_axis_off()
    figure.text(0.02, 1 - 0.05 / height, note, va="top", fontsize=_POINTS, color="0.35")
    columns = ((0, 0), (2, 1 + n_shown), (3 + n_shown, 2 + 2 * n_shown))
    headings = ("target", BLUE), ("helpful", GREEN), ("harmful", RED)
    for (first, last), (text, color) in zip(columns, headings, strict=True):
        x = (axes[0, first].get_position().x0 + axes[0, last].get_position().x1) / 2
        figure.text(
            x, 1 - head / height, text, ha="center", va="bottom", fontsize=_POINTS + 2, color=color,
            weight="bold",
        )  # fmt: skip
    return figure, axes


def as_colours(
    images: Sequence[np.ndarray | xr.DataArray],
    normalize: tuple[float | Sequence[float], float | Sequence[float]] | None,
) -> list[np.ndarray]:
    """Return images as (h, w), in their units, or as (h, w, 3), between 0 and 1.

    Parameters
    ----------
    images
        All images of a figure, which share a scale.
    normalize
        Mean and standard deviation that were subtracted and divided by, to be undone. Otherwise
        colours are taken as they are if they lie in [0, 1], and moved there from [-1, 1], from
        0 to 255, or from any other range.

    Examples
    --------
    >>> as_colours([np.full((3, 1, 1), -1.0), np.ones((3, 1, 1))], None)[0].tolist()
    [[[0.0, 0.0, 0.0]]]
    """
    # 1. Channels last, and none of grey images.
    arranged = []
    for image in map(np.asarray, images):
        image = image.astype(np.float32) if image.dtype == bool else image
        if image.ndim == 3 and image.shape[0] in _CHANNELS:
            image = np.moveaxis(image, 0, -1)
        arranged.append(image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image)
    if normalize is not None:
        mean, std = (np.asarray(value, np.float64) for value in normalize)
        return [np.clip(image * std + mean, 0, 1) for image in arranged]
    colours = [image for image in arranged if image.ndim == 3]
    if not colours:
        return arranged
    # 2. The smallest usual range of colours that includes all values.
    values = np.concatenate([image[np.isfinite(image)] for image in colours])
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    for usual in ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)):
        # Bytes are bytes, however dark.
        if usual[0] <= low and high <= usual[1] and (values.dtype.kind == "f" or usual[1] > 1):
            low, high = usual
            break
    return [
        np.clip((image - low) / (high - low), 0, 1) if image.ndim == 3 else image
        for image in arranged
    ]
