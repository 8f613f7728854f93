"""The oracle of random numbers: Philox and the Rademacher matrix by their definitions, and slow."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trakdask.projection.philox import STREAM_RADEMACHER, split_seed

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


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
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c2 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), (p0 >> _HALF) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & _LOW, p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
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


def normal(n_samples: int, n_rows: int) -> Tensor:
    """Return gradients that are the same in every run."""
    return torch.randn(n_samples, n_rows, generator=torch.Generator().manual_seed(n_rows))


def small_integers(n_samples: int, n_rows: int) -> Tensor:
    """Return gradients that rounding to digits leaves as they are."""
    generator = torch.Generator().manual_seed(n_rows)
    return torch.randint(-63, 64, (n_samples, n_rows), generator=generator).float()
