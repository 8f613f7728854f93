"""Features in two bytes: float16 with an exact power of two per sample and checkpoint."""

from __future__ import annotations

import dask.array as da
import numpy as np
from dask.base import tokenize

__all__ = ["decoded", "encode"]

_TOP = 15
"""The largest element of a row comes to lie in [2^14, 2^15): float16 ends at 65504."""
_LAST = 128 - _TOP  # the exponent of rows that go up to the end of float32
_BELOW_TOP = 2**_TOP - 16  # the largest float16 below 2^15


def encode(feature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, p, 1) features as float16, and the scale (rows, 1) to multiply them with.

    Relative to the largest element of its row, no element is off by more than 2^-11. Zeros,
    infinities and NaN stay what they are; other elements of their rows are scaled by the finite.

    Examples
    --------
    >>> stored, scale = encode(np.array([[[3.0], [-0.75]], [[0.0], [np.inf]]], "f4"))
    >>> (stored[..., 0].astype("f4") * scale).tolist()
    [[3.0, -0.75], [0.0, inf]]
    """
    finite = np.where(np.isfinite(feature), feature, feature.dtype.type(0))
    _, exponent = np.frexp(np.abs(finite).max(axis=1, initial=0))  # largest = m 2^e, m in [½, 1)
    exponent = exponent - _TOP
    stored = np.ldexp(feature, -exponent[:, None, :]).astype(np.float16)
    if (is_top := exponent == _LAST).any():  # rounded up, the largest would overflow float32
        at = np.where(is_top[:, None, :] & np.isfinite(feature), _BELOW_TOP, np.inf).astype(
            np.float16
        )
        stored = np.clip(stored, -at, at)
    return stored, np.ldexp(1.0, exponent)


def decoded(stored: da.Array, scale: da.Array) -> da.Array:
    """Return the features as float32, lazy."""
    result: da.Array = da.blockwise(
        _decode, "spc", stored, "spc", scale, "sc",
        name="feature-of-half-" + tokenize(stored.name, scale.name), align_arrays=False,
        dtype=np.float32, meta=np.empty((0, 0, 0), np.float32),
    )  # fmt: skip
    return result


def _decode(stored: np.ndarray, scale: np.ndarray) -> np.ndarray:
    is_missing = np.isnan(scale)  # a block that was never stored
    _, exponent = np.frexp(np.where(is_missing, 1, scale))
    found: np.ndarray = np.ldexp(stored.astype(np.float32), exponent[:, None, :] - 1)
    found[is_missing[:, 0]] = np.nan
    return found
