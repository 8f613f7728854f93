"""Philox4x32-10 on grids of counters."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from trakdask.projection.compiled.jit import jit

UInt64Array = npt.NDArray[np.uint64]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def fill_words(
    out: UInt64Array, index: int, column: int, key: tuple[int, int], checkpoint: int, stream: int
) -> None:
    """Write the four words of every counter of a grid; see :mod:`trakdask.projection.words`."""
    numbers = (np.uint64(number) for number in (index, column, *key, checkpoint, stream << 16))
    _fill(out, *numbers)


@jit
def philox(c0, c1, c2, c3, k0, k1):
    """Return the four words of one counter; everything uint64 with an empty high half."""
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


@jit
def _fill(out, index, column, k0, k1, checkpoint, high):
    for j in range(out.shape[0]):
        for i in range(out.shape[1]):
            at = index + numba.uint64(i)
            c0, c1, c2, c3 = philox(
                at & _LOW, column + numba.uint64(j), checkpoint, (at >> _HALF) | high, k0, k1
            )
            out[j, i, 0] = c0 | (c1 << _HALF)
            out[j, i, 1] = c2 | (c3 << _HALF)
