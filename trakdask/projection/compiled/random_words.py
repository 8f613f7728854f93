"""Philox4x32-10 on grids of counters."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import uint32, uint64

from trakdask.projection.compiled.jit import inlined, jit

UInt64Array = npt.NDArray[np.uint64]


def fill_words(
    out: UInt64Array, index: int, column: int, key: tuple[int, int], checkpoint: int, stream: int
) -> None:
    """Write the four words of every counter; see :mod:`trakdask.projection.random_words`."""
    _fill(out, index, column, checkpoint, stream << 16, *key)


@inlined
def philox(c0, c1, c2, c3, k0, k1):
    """Return the four words of one counter; all uint32, so that loops over it vectorise."""
    for _ in range(10):
        p0, p1 = uint64(c0) * uint64(0xD2511F53), uint64(c2) * uint64(0xCD9E8D57)
        c0, c2 = (
            uint32(uint32(p1 >> uint64(32)) ^ c1 ^ k0),
            uint32(uint32(p0 >> uint64(32)) ^ c3 ^ k1),
        )
        c1, c3 = uint32(p1), uint32(p0)
        k0, k1 = uint32(k0 + uint32(0x9E3779B9)), uint32(k1 + uint32(0xBB67AE85))
    return c0, c1, c2, c3


@jit
def _fill(out, index, column, checkpoint, stream, k0, k1):
    # The address comes as int64 and is cut to uint32 here: given as uint32, LLVM makes code that
    # takes twice as long.
    for j in range(out.shape[0]):
        pairs = out[j].reshape(2 * out.shape[1])
        for i in range(out.shape[1]):
            w0, w1, w2, w3 = philox(
                uint32(index + i),
                uint32(column + j),
                uint32(checkpoint),
                uint32(((index + i) >> 32) | stream),
                uint32(k0),
                uint32(k1),
            )
            pairs[2 * i] = uint64(w0) | (uint64(w1) << uint64(32))
            pairs[2 * i + 1] = uint64(w2) | (uint64(w3) << uint64(32))
