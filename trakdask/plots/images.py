"""Images as they are drawn: channels last, in the range of colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

Normalize = tuple[float | Sequence[float], float | Sequence[float]]
Array = npt.NDArray[Any]

_CHANNELS = (1, 3)


def as_colours(images: Sequence[Array | xr.DataArray], normalize: Normalize | None) -> list[Array]:
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
    arranged = [_channels_last(np.asarray(image)) for image in images]
    if normalize is not None:
        mean, std = (np.asarray(value, np.float64) for value in normalize)
        return [np.clip(image * std + mean, 0, 1) for image in arranged]
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


def _range(values: Array) -> tuple[float, float]:
    """Return the smallest usual range of colours that includes all values."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    for usual in ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)):
        # Bytes are bytes, however dark.
        if usual[0] <= low and high <= usual[1] and (values.dtype.kind == "f" or usual[1] > 1):
            return usual
    return low, high
