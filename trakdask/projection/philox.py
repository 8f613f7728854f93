"""Philox4x32-10, the counter-based generator behind every random matrix of the package.

A random bit is a pure function of (seed, checkpoint, row, column), so no state has to be stored or
shared between machines. The definition for the Rademacher matrix is:

.. code-block:: text

    key = (seed & 0xffffffff, seed >> 32)
    rb  = row >> 7                                    # one counter serves 128 rows
    ctr = (rb & 0xffffffff, column, checkpoint, (rb >> 32) | stream << 16)
    w   = Philox4x32-10(ctr, key)
    bit = (w[(row >> 5) & 3] >> (row & 31)) & 1       # the entry of the matrix is 1 - 2 * bit

Every other kind draws its words from the same grid of counters, in a stream of its own, where index
(rb above) and column have other meanings; the module of the kind contains the definition.

References
----------
Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Random123).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from trakdask.projection.acceleration import numba_kernels
from trakdask.tensors import Scratch

STREAM_RADEMACHER = 0
STREAM_SJLT = 1
STREAM_MASK = 2
# 3 and 4 belonged to Kronecker, a projector that stores of others may name.

ROWS_PER_COUNTER = 128


_COUNTERS_PER_GRID = 1 << 14  # numpy's buffers of a grid, 48 bytes per counter, fit in a cache
_MULTIPLIERS = np.array([0xCD9E8D57, 0xD2511F53], np.uint64).reshape(2, 1, 1)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

_scratch = Scratch()


def split_seed(seed: int) -> tuple[int, int]:
    """Return the two 32-bit words of the key: the low and the high half of the seed."""
    return seed & 0xFFFFFFFF, seed >> 32


def fill_words(
    out: np.ndarray, index: int, column: int, *, seed: int, checkpoint: int, stream: int
) -> None:
    """Write the four words of every counter of a grid, by numba if it is installed, else by numpy.

    Parameters
    ----------
    out
        Array (n_columns, n_indices, 2), uint64, C-contiguous, filled in place with words 0 and 1,
        then 2 and 3, the earlier word in the low half. In memory these are the 128 bits in order,
        the lowest first.
    index, column
        First index, in [0, 2**48), and first column, in [0, 2**32).
    seed, checkpoint, stream
        The rest of the address.

    Notes
    -----
    Exactness: numba and numpy give the same words. Cost: about 0.03 (numba) or 0.2 ns (numpy) per
    bit on one core; no allocation beyond 1 MB per thread.
    """
    if (kernels := numba_kernels()) is not None:
        kernels.fill_words(out, index, column, checkpoint, stream << 16, *split_seed(seed))
        return
    n_columns, n_indices, _ = out.shape
    tile = max(1, _COUNTERS_PER_GRID // n_indices)
    for start in range(0, n_columns, tile):
        for first in range(0, n_indices, _COUNTERS_PER_GRID):
            grid = out[start : start + tile, first : first + _COUNTERS_PER_GRID]
            _fill_grid(grid, index + first, column + start, seed, checkpoint, stream)


def _fill_grid(
    out: np.ndarray, index: int, column: int, seed: int, checkpoint: int, stream: int
) -> None:
    """Do the same for a small grid, by numpy, without allocations in the loop over rounds."""
    n_columns, n_indices, _ = out.shape
    even, odd, product = (
        _scratch.take(name, (2, n_columns, n_indices), torch.int64).numpy().view(np.uint64)
        for name in ("even", "odd", "product")
    )
    indices = np.arange(index, index + n_indices, dtype=np.uint64)
    # The counter is (index, column, checkpoint, high part of the index and stream).
    even[0], odd[0] = indices & _LOW, np.arange(column, column + n_columns)[:, None]
    even[1], odd[1] = checkpoint, (indices >> _HALF) | np.uint64(stream << 16)
    for key in _round_keys(seed):
        # Words 0 and 2 in one call, and 1 and 3: on a small grid, calls take much of the time.
        np.multiply(even[::-1], _MULTIPLIERS, out=product)
        np.right_shift(product, _HALF, out=even)
        np.bitwise_xor(even, odd, out=even)
        np.bitwise_xor(even, key, out=even)
        np.bitwise_and(product, _LOW, out=odd)
    # Words 0 and 1 make one number, 2 and 3 the next; numpy writes them where they belong.
    np.left_shift(odd, _HALF, out=odd)
    np.bitwise_or(even, odd, out=np.moveaxis(out, 2, 0))


def round_keys(seed: int) -> list[list[int]]:
    """Return both words of the key of each of the ten rounds."""
    key = split_seed(seed)
    return [[(k + i * w) & 0xFFFFFFFF for k, w in zip(key, _WEYL, strict=True)] for i in range(10)]


@lru_cache(maxsize=8)
def _round_keys(seed: int) -> np.ndarray:
    """Return the same as an array, (rounds, 2, 1, 1) uint64."""
    return np.array(round_keys(seed), np.uint64)[:, :, None, None]
