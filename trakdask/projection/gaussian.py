"""A dense matrix of quantised normal numbers, for comparison with other packages.

Entries are quantiles of the normal distribution, rounded to 8-bit integers and selected by a random
byte:

.. code-block:: text

    idx  = row >> 4                                   # one counter serves 16 rows
    w    = Philox4x32-10((idx & 0xffffffff, column, checkpoint, (idx >> 32) | 5 << 16), key)
    byte = (w[(row >> 2) & 3] >> (8 * (row & 3))) & 255
    the entry of the matrix is TABLE[byte]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trakdask.projection.cuda import Kernels
from trakdask.projection.cuda import dense as dense_on_gpu
from trakdask.projection.dense_products import digit_sum, integer_matmul
from trakdask.projection.dense_projector import DenseProjector
from trakdask.projection.philox import BYTES_PER_COUNTER, STREAM_NORMAL
from trakdask.projection.quantize import QuantizedBlock, Scratch, quantize_block
from trakdask.projection.random_words import fill_words
from trakdask.projection.row_map import ROW_BLOCK

# fmt: off
_UPPER_HALF = (
    0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5, 5, 6, 6, 7, 7, 8, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 12,
    13, 13, 14, 14, 15, 15, 16, 16, 17, 17, 17, 18, 18, 19, 19, 20, 20, 21, 21, 22, 22, 23, 23, 24,
    24, 25, 25, 26, 26, 27, 27, 28, 28, 29, 29, 30, 31, 31, 32, 32, 33, 33, 34, 34, 35, 36, 36, 37,
    37, 38, 39, 39, 40, 41, 41, 42, 43, 43, 44, 45, 46, 46, 47, 48, 49, 49, 50, 51, 52, 53, 54, 55,
    56, 57, 57, 59, 60, 61, 62, 63, 64, 65, 67, 68, 70, 71, 73, 75, 77, 79, 81, 83, 86, 89, 93, 97,
    103, 111, 127,
)
# fmt: on

TABLE: npt.NDArray[np.int8] = np.array(
    [-entry for entry in reversed(_UPPER_HALF)] + list(_UPPER_HALF), np.int8
)
"""Entry by byte: round(c * quantile((byte + 0.5) / 256)), with c such that the largest is 127."""

VARIANCE = 2 * sum(entry**2 for entry in _UPPER_HALF) / 256
"""Variance of the integer entries."""

_COLUMN_TILE = 1024
# |sums| <= 127 * 128 * 1024 < 2**24, so the float32 product of integer_matmul is exact as well.
_PRODUCT_ROWS = 1024

# Two bytes at a time take half as many look-ups. Their order in memory does not matter.
_PAIRS: npt.NDArray[np.uint16] = TABLE[np.arange(2**16, dtype=np.uint16).view(np.uint8)].view(
    np.uint16
)
_scratch = Scratch()


@dataclass(frozen=True)
class Gaussian(DenseProjector):
    """Project with a dense matrix of normal numbers, quantised to 8 bits.

    An entry of the matrix P is one of 256 integers, a pure function of (seed, checkpoint, row,
    column); a feature is ``(proj_dim * VARIANCE)**-0.5 * P.T @ gradient``. A smaller ``proj_dim``
    is a prefix of a larger one, up to that factor.

    It exists for comparison with packages that draw normal matrices.
    :class:`~trakdask.Rademacher` is faster, as it draws 1 bit per entry
    instead of 8, and its error is never larger.

    Parameters
    ----------
    proj_dim
        Number of feature columns, in [1, 2**32).
    seed
        Integer in [0, 2**64).
    arithmetic
        8-bit digits per gradient element: ``"int8x1"`` (fast), ``"int8x2"`` (default) or
        ``"int8x3"`` (as accurate as float32 input). More digits cost proportionally more.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type, or is out of range.

    Notes
    -----
    Exactness: products are sums of integers, hence bitwise independent of batch, tile and thread
    count; the rounding of the gradients to digits is the only error, as large as with
    :class:`~trakdask.Rademacher`. The quantised normal is the definition of
    P, not an approximation to it.

    Variance: for entries of variance 1 and fourth moment k, the variance of φ·φ' for gradients g
    and g' is (‖g‖² ‖g'‖² + (g·g')² + (k - 3) Σ g_i² g'_i²) / proj_dim. Random signs have k = 1, the
    smallest possible value; this table has k = 2.918, and a normal distribution has 3. The
    difference matters if a gradient is concentrated on a few rows: the norm of a gradient with a
    single nonzero row has the relative variance (k - 1) / proj_dim, which is 0 for random signs.

    References
    ----------
    Johnson and Lindenstrauss 1984, "Extensions of Lipschitz mappings into a Hilbert space".

    Examples
    --------
    >>> Gaussian(proj_dim=512).width(n_rows=10**6)
    512
    """

    kind: ClassVar[str] = "gaussian"
    bits_per_entry: ClassVar[int] = 8

    def scale(self, n_rows: int) -> float:
        """Return the factor that makes feature products estimate gradient products."""
        return float((self.proj_dim * VARIANCE) ** -0.5)

    def _buffer_bytes(self) -> int:
        n_samples = 512
        sums = 8 * _COLUMN_TILE * (1 + self.n_digits) * n_samples
        return 8 * 2**20 + self.n_digits * n_samples * ROW_BLOCK + sums

    def project_on_cpu(self, block: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of one row block to ``out``, both on the CPU.

        Notes
        -----
        Cost: 2 * n_digits * B * rows * proj_dim integer operations and 8 * rows * proj_dim random
        bits, which are never held all at once.
        """
        quantized = quantize_block(block, self.n_digits, _scratch)
        for column in range(0, self.proj_dim, _COLUMN_TILE):
            n_cols = min(_COLUMN_TILE, self.proj_dim - column)
            sums = _tile_product(quantized, row_offset, column, n_cols, self.seed, checkpoint)
            out[:, column : column + n_cols].add_(sums.T)

    def project_on_gpu(
        self, kernels: Kernels, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor
    ) -> None:
        """Add the projection of consecutive row blocks to ``out``, on their GPU.

        Notes
        -----
        Cost: see :func:`trakdask.projection.cuda.dense.accumulate_rademacher`.
        """
        dense_on_gpu.accumulate_gaussian(
            kernels,
            rows,
            row_offset,
            seed=self.seed,
            checkpoint=checkpoint,
            n_digits=self.n_digits,
            table=_table_on(rows.device),
            out=out,
        )


@cache
def _table_on(device: torch.device) -> Tensor:
    return torch.from_numpy(TABLE).to(device)


def _tile_product(
    quantized: QuantizedBlock, row: int, column: int, n_cols: int, seed: int, checkpoint: int
) -> Tensor:
    """Return the exact products of one row block with a tile of columns, (n_cols, B), float64."""
    shape = (n_cols, len(quantized.slabs[0]))
    total = _scratch.take("total", shape, torch.int32).zero_()
    part = _scratch.take("part", shape, torch.int32)
    for slab in quantized.slabs:
        for digits in slab.split(_PRODUCT_ROWS, dim=1):
            entries = _entries(row, digits.shape[1], column, n_cols, seed, checkpoint)
            integer_matmul(torch.from_numpy(entries), digits, part)
            total.add_(part)
            row += digits.shape[1]
    return digit_sum(total, quantized.n_digits).mul_(quantized.step)


def _entries(
    row: int, n_rows: int, column: int, n_cols: int, seed: int, checkpoint: int
) -> npt.NDArray[np.int8]:
    """Return a window of the matrix, (n_cols, n_rows); rows must be whole counters."""
    n_counters = n_rows // BYTES_PER_COUNTER
    words = _scratch.take("words", (n_cols, n_counters, 2), torch.int64).numpy().view(np.uint64)
    address = {"seed": seed, "checkpoint": checkpoint, "stream": STREAM_NORMAL}
    fill_words(words, row // BYTES_PER_COUNTER, column, **address)
    entries = _scratch.take("entries", (n_cols, n_rows), torch.int8).numpy()
    pairs = words.view(np.uint16).reshape(n_cols, n_rows // 2)
    # No index is out of range; "wrap" only avoids a buffer between the table and `out`.
    np.take(_PAIRS, pairs, out=entries.view(np.uint16), mode="wrap")
    return entries
