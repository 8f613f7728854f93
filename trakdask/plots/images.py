"""Images as they are drawn: channels last, in the range of colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trakdask.checks import shown

__all__ = ["Normalize", "as_colours", "require_images", "require_normalize"]

Normalize = tuple[float | Sequence[float], float | Sequence[float]]
Array = npt.NDArray[Any]

_CHANNELS = (1, 3)


def require_images(images: object, name: str) -> None:
    """Reject what is not an array of grey or RGB images by position.

    Raises
    ------
    TypeError
        If it is not an array.
    ValueError
        If it has another shape or dtype.
    """
    remedy = "try an array of shape (n, h, w) or (n, h, w, 3)"
    shape = getattr(images, "shape", None)
    if not isinstance(shape, tuple):
        raise TypeError(f"expected {name} to be an array, got a {type(images).__name__}; {remedy}")
    is_drawable = len(shape) == 3 or (len(shape) == 4 and {*_CHANNELS} & {shape[1], shape[3]})
    if not is_drawable or 0 in shape:
        raise ValueError(
            f"expected {name} of shape (n, h, w), (n, 1, h, w), (n, 3, h, w) or (n, h, w, 3), none "
            f"of them empty, got {tuple(shape)}; {remedy}"
        )
    dtype = np.asarray(images[0]).dtype  # type: ignore[index]
    if dtype.kind not in "fiub":
        raise ValueError(f"expected numbers in {name}, got dtype {dtype}; {remedy}")


def require_normalize(normalize: object) -> tuple[Array, Array] | None:
    """Return mean and standard deviation by channel as arrays of one or three numbers.

    Raises
    ------
    ValueError
        If they are not such numbers, or a standard deviation is not positive.
    """
    if normalize is None:
        return None
    try:
        mean, std = (np.atleast_1d(np.asarray(each, np.float64)) for each in normalize)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        mean = std = np.zeros(0)
    are_numbers = {mean.shape, std.shape} <= {(n,) for n in _CHANNELS}
    if not are_numbers or not np.isfinite([*mean, *std]).all() or not (std > 0).all():
        raise ValueError(
            "expected normalize as the mean and the standard deviation of one or three channels, "
            f"got {shown(normalize)}; try normalize=((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))"
        )
    return mean, std


def as_colours(
    images: Sequence[Array | xr.DataArray], normalize: tuple[Array, Array] | None
) -> list[Array]:
    """Return images as (h, w), in their units, or as (h, w, 3), between 0 and 1.

    Parameters
    ----------
    images
        All images of a figure, which share a scale.
    normalize
        Mean and standard deviation that were subtracted and divided by, to be undone. Otherwise
        colours are taken as they are if they lie in [0, 1], and moved there from [-1, 1], from
        0 to 255, or from any other range.

    Raises
    ------
    ValueError
        If ``normalize`` is for three channels and an image has one.

    Examples
    --------
    >>> as_colours([np.full((3, 1, 1), -1.0), np.ones((3, 1, 1))], None)[0].tolist()
    [[[0.0, 0.0, 0.0]]]
    """
    arranged = [_channels_last(np.asarray(image)) for image in images]
    if normalize is not None:
        return [_without_normalization(image, *normalize) for image in arranged]
    colours = [image for image in arranged if image.ndim == 3]
    if not colours:
        return arranged
    finite = np.concatenate([image[np.isfinite(image)] for image in colours])
    low, high = _range(finite)
    return [
        np.clip((image - low) / (high - low), 0, 1) if image.ndim == 3 else image
        for image in arranged
    ]


def _channels_last(image: Array) -> Array:
    if image.dtype == bool:
        image = image.astype(np.float32)
    if image.ndim == 3 and image.shape[0] in _CHANNELS:
        image = np.moveaxis(image, 0, -1)
    return image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image


def _without_normalization(image: Array, mean: Array, std: Array) -> Array:
    if image.ndim == 2 and (len(mean) > 1 or len(std) > 1):
        raise ValueError(
            f"expected normalize with one number each for grey images, got {len(mean)} and "
            f"{len(std)}; try normalize=({mean[0]:g}, {std[0]:g})"
        )
    restored: Array = np.clip(image * std + mean, 0, 1)
    return restored


def _range(values: Array) -> tuple[float, float]:
    """Return the smallest usual range of colours that includes all values."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    for usual in ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)):
        # Bytes are bytes, however dark.
        if usual[0] <= low and high <= usual[1] and (values.dtype.kind == "f" or usual[1] > 1):
            return usual
    return low, high
