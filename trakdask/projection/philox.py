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
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

STREAM_RADEMACHER = 0
STREAM_SJLT = 1
STREAM_MASK = 2
STREAM_KRONECKER_LEFT = 3
STREAM_KRONECKER_RIGHT = 4
STREAM_NORMAL = 5

ROWS_PER_COUNTER = 128
BYTES_PER_COUNTER = ROWS_PER_COUNTER // 8

UInt64Array = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_SWAPPED_MULTIPLIERS = np.array(_MULTIPLIERS[::-1]).reshape(2, 1, 1)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def split_seed(seed: int) -> tuple[int, int]:
    """Return the two 32-bit words of the key: the low and the high half of the seed."""
    return seed & 0xFFFFFFFF, seed >> 32


def philox4x32(
    counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
    key: tuple[int, int],
) -> npt.NDArray[np.uint32]:
    """Evaluate Philox4x32-10 for every counter of a grid.

    This plain version follows the paper and is the reference for faster ones.

    Parameters
    ----------
    counter
        Four arrays of integers in [0, 2**32) that broadcast to one shape.
    key
        Two integers in [0, 2**32).

    Returns
    -------
    Array of shape (4, *grid), uint32: the four output words.

    References
    ----------
    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Random123).

    Examples
    --------
    >>> [hex(word) for word in philox4x32((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    words = [np.asarray(word, dtype=np.uint64) for word in counter]
    c0, c1, c2, c3 = np.broadcast_arrays(*words)
    for k0, k1 in _round_keys(key)[:, :, 0, 0]:
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def rademacher_bits(
    row_start: int,
    n_rows: int,
    col_start: int,
    n_cols: int,
    *,
    seed: int,
    checkpoint: int,
) -> npt.NDArray[np.uint8]:
    """Return a window of the bits of the Rademacher matrix, by its definition.

    Parameters
    ----------
    row_start, n_rows
        Window of rows; rows lie in [0, 2**47).
    col_start, n_cols
        Window of columns; columns lie in [0, 2**32).
    seed
        Integer in [0, 2**64).
    checkpoint
        Integer in [0, 2**32).

    Returns
    -------
    Array (n_cols, n_rows), uint8: the bits. The matrix itself is ``1 - 2 * bits.T``.

    Notes
    -----
    This is slow (about 10 bytes of temporary memory per bit), and only serves as the reference in
    tests and in checks of other implementations.

    Examples
    --------
    >>> rademacher_bits(0, 8, 0, 2, seed=0, checkpoint=0).tolist()
    [[1, 0, 1, 0, 1, 0, 1, 1], [0, 0, 1, 1, 0, 1, 1, 1]]
    """
    rows = np.arange(row_start, row_start + n_rows, dtype=np.uint64)
    columns = np.arange(col_start, col_start + n_cols, dtype=np.uint64)
    row_blocks, position = np.unique(rows >> np.uint64(7), return_inverse=True)
    high = (row_blocks >> _HALF) | np.uint64(STREAM_RADEMACHER << 16)
    counter = (row_blocks & _LOW, columns[:, None], checkpoint, high)
    words = philox4x32(counter, split_seed(seed))
    word = words[(rows >> np.uint64(5)) & np.uint64(3), :, position]
    shift = (rows & np.uint64(31)).astype(np.uint32)
    return ((word >> shift[:, None]) & np.uint32(1)).astype(np.uint8).T


class CounterGrid:
    """Buffers that fill grids of counters without allocating in the round loop.

    Parameters
    ----------
    capacity
        The largest number of counters of one grid.

    Notes
    -----
    Buffers take 48 bytes per counter. An object must be used by one thread only.
    """

    def __init__(self, capacity: int) -> None:
        self._even: UInt64Array = np.empty((2, capacity), np.uint64)
        self._odd: UInt64Array = np.empty_like(self._even)
        self._product: UInt64Array = np.empty_like(self._even)

    def fill_words(
        self,
        out: UInt64Array,
        index: int,
        column: int,
        *,
        seed: int,
        checkpoint: int,
        stream: int,
    ) -> None:
        """Write the four words of every counter of a grid.

        Parameters
        ----------
        out
            Array (n_columns, n_indices, 2), uint64, filled in place with words 0 and 1, then 2 and
            3, the earlier word in the low half. In memory these are the 128 bits in order, the
            lowest first.
        index
            First index, in [0, 2**48); for the Rademacher matrix, a row divided by 128.
        column
            First column.
        seed, checkpoint
            As in :func:`rademacher_bits`.
        stream
            One of the ``STREAM_`` constants.
        """
        n_columns, n_indices, _ = out.shape
        n = n_columns * n_indices
        grid = (2, n_columns, n_indices)
        even, odd, product = (
            buffer[:, :n].reshape(grid) for buffer in (self._even, self._odd, self._product)
        )
        keys = _round_keys(split_seed(seed))
        indices = np.arange(index, index + n_indices, dtype=np.uint64)
        columns = np.arange(column, column + n_columns, dtype=np.uint64)[:, None]
        counter = (
            indices & _LOW,
            columns,
            checkpoint,
            (indices >> _HALF) | np.uint64(stream << 16),
        )
        _separable_rounds(counter, keys, even, odd, product[0])
        for key in keys[3:]:
            _full_round(key, even, odd, product)
        np.left_shift(product, _HALF, out=product)
        np.bitwise_or(even, product, out=np.moveaxis(out, 2, 0))


def _separable_rounds(
    counter: tuple[UInt64Array, UInt64Array, int, UInt64Array],
    keys: UInt64Array,
    even: UInt64Array,
    odd: UInt64Array,
    mixed: UInt64Array,
) -> None:
    """Run rounds 1 to 3, mostly on vectors, because index and column are hardly mixed yet.

    This leaves words 0 and 2 in ``even``, and words 1 and 3 in ``odd``.
    """
    keys = keys[:, :, 0, 0]
    low, column, checkpoint, high = counter
    p0: UInt64Array = _MULTIPLIERS[0] * low
    p1: UInt64Array = _MULTIPLIERS[1] * np.full(1, checkpoint, np.uint64)
    c0 = (p1 >> _HALF) ^ column ^ keys[0][0]
    c2 = (p0 >> _HALF) ^ high ^ keys[0][1]
    c1, c3 = p1 & _LOW, p0 & _LOW

    p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
    c0, c1 = (p1 >> _HALF) ^ c1 ^ keys[1][0], p1 & _LOW
    np.bitwise_xor((p0 >> _HALF) ^ keys[1][1], c3, out=even[1])
    c3 = p0 & _LOW

    p0 = _MULTIPLIERS[0] * c0
    np.multiply(even[1], _MULTIPLIERS[1], out=mixed)
    np.right_shift(mixed, _HALF, out=even[0])
    np.bitwise_xor(even[0], c1 ^ keys[2][0], out=even[0])
    np.bitwise_xor((p0 >> _HALF) ^ keys[2][1], c3, out=even[1])
    np.bitwise_and(mixed, _LOW, out=odd[0])
    odd[1] = p0 & _LOW


def _full_round(
    key: UInt64Array, even: UInt64Array, odd: UInt64Array, product: UInt64Array
) -> None:
    # Both halves in one call, since on a grid that fits in a cache, calls take much of the time.
    np.multiply(even[::-1], _SWAPPED_MULTIPLIERS, out=product)
    np.right_shift(product, _HALF, out=even)
    np.bitwise_xor(even, odd, out=even)
    np.bitwise_xor(even, key, out=even)
    np.bitwise_and(product, _LOW, out=odd)


@lru_cache(maxsize=8)
def _round_keys(key: tuple[int, int]) -> UInt64Array:
    """Return (rounds, 2, 1, 1) uint64: the key of every round."""
    keys = [
        [(k + i * w) & 0xFFFFFFFF for k, w in zip(key, _WEYL, strict=True)] for i in range(_ROUNDS)
    ]
    return np.array(keys, np.uint64)[:, :, None, None]
