"""A dense matrix of random signs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from trakdask.projection import by_torch
from trakdask.projection.cuda import GpuProjector, Kernels, products
from trakdask.projection.fixed_point import (
    FRACTION_BITS,
    multiply_signs,
    quantize,
    sign_bits,
    signed_sums,
    split_digits,
)
from trakdask.projection.philox import STREAM_RADEMACHER
from trakdask.projection.protocol import ARITHMETIC, ROUNDING_ERROR, Cost, allowed
from trakdask.projection.rows import ROW_ALIGNMENT, ROW_BLOCK, RowMap

_COLUMN_TILE = 2048


@dataclass(frozen=True)
class Rademacher(GpuProjector):
    """Project with a dense matrix of random signs.

    The matrix P has entries +1 and -1 that are a pure function of (seed, checkpoint, row, column);
    a feature is ``proj_dim**-0.5 * P.T @ gradient``. A smaller ``proj_dim`` is a prefix of a
    larger one, up to that factor.

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
    count; the rounding of the gradients to digits is the only error. Per sample and block of 16384
    rows, the error of an element is at most 2**-7 (``int8x1``; 2**-6 for the largest), 2**-14 or
    2**-22 times the largest magnitude in the block. The relative error of a block is at most that
    times the ratio of the largest magnitude to the root mean square, so outliers cost accuracy,
    most of all with ``int8x1``. Zeros are exact, and subnormals are as accurate as other numbers; a
    sample with NaN or infinity becomes NaN.

    References
    ----------
    Achlioptas 2003, "Database-friendly random projections". Park et al. 2023, "TRAK", step 2.

    Examples
    --------
    >>> Rademacher(proj_dim=512).width(n_rows=10**6)
    512
    """

    kind: ClassVar[str] = "rademacher"
    row_alignment: ClassVar[int] = ROW_ALIGNMENT

    proj_dim: int = field(default=2048, metadata=allowed(range(1, 2**32), 2048))
    seed: int = field(default=0, metadata=allowed(range(2**64), 0))
    arithmetic: str = field(default="int8x2", metadata=allowed(tuple(ARITHMETIC), "int8x2"))

    @property
    def n_digits(self) -> int:
        """Number of 8-bit digits per gradient element."""
        return ARITHMETIC[self.arithmetic]

    def cost(self, n_rows: int) -> Cost:
        """Return the cost of projecting gradients of ``n_rows`` elements."""
        n_samples, entries = 512, n_rows * self.proj_dim
        block, sums = (4 + self.n_digits) * ROW_BLOCK, 8 * _COLUMN_TILE * (2 + self.n_digits)
        return Cost(
            operations=2 * self.n_digits * entries,
            random_bits=entries,
            buffer_bytes=12 * 2**20 + n_samples * (block + sums),
            rounding_error=ROUNDING_ERROR[self.arithmetic],
            product_error=self._product_error(),
        )

    def project_block(self, block: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of one row block to ``out``, both on the CPU; see ``Projector``.

        Notes
        -----
        Cost: 2 * n_digits * B * rows * proj_dim integer operations and rows * proj_dim random bits,
        which are never held all at once.
        """
        integers, step = quantize(block, FRACTION_BITS[self.n_digits])
        if self.n_digits == 1:
            integers.clamp_(-127, 127)  # 2**7 is no signed digit
        # Digits are split once, for all tiles of columns.
        slabs, address = split_digits(integers, self.n_digits, row_offset), self._at(checkpoint)
        for column in range(0, self.proj_dim, _COLUMN_TILE):
            n_columns = min(_COLUMN_TILE, self.proj_dim - column)
            packed = sign_bits(row_offset, block.shape[1], column, n_columns, **address)
            sums = signed_sums(packed, slabs, self.n_digits).mul_(step)
            out[:, column : column + n_columns].add_(sums.T)

    def project_on_gpu(
        self, kernels: Kernels, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor
    ) -> None:
        """Add the projection of consecutive row blocks to ``out``; see ``GpuProjector``.

        Notes
        -----
        Cost: 2 * n_digits * B * rows * proj_dim integer operations and one byte written and read in
        the cache per entry of the matrix, once for all samples. Memory in addition to ``rows`` and
        ``out``: about 64 MB of digits and sums, at least for one block, and a tile.
        """
        tile = products.tile_columns(self.proj_dim, kernels.cache_bytes)
        # The bytes of the digits and of the sums of a row block.
        block_bytes = products.lines(len(rows), self.n_digits) * max(ROW_BLOCK, 4 * tile)
        for run in products.runs(rows.shape[1], block_bytes):
            digits, totals, steps = products.quantize(kernels, rows, run, self.n_digits)
            for column in range(0, self.proj_dim, tile):
                target = out[:, column : min(column + tile, self.proj_dim)]
                n_columns = products.padded_columns(target.shape[1])
                sums = digits.new_empty((*digits.shape[:2], n_columns), dtype=torch.int32)
                bits = digits.new_empty(n_columns, run.depth)
                # One product per block, since only sums within a block are integers of one scale.
                for block in range(run.n_blocks):
                    row = row_offset + run.first + block * run.n_rows
                    products.fill_bits(kernels, bits, row, column, self.seed, checkpoint)
                    products.multiply(digits[block], bits, sums[block])
                products.combine(kernels, sums, steps, target, totals, self.n_digits)

    def project_by_torch(self, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of consecutive row blocks to ``out``; see ``GpuProjector``."""
        matrix = {"width": self.proj_dim, "n_digits": self.n_digits, **self._at(checkpoint)}

        def sums_of(integers: Tensor, row: int) -> Tensor:
            return by_torch.dense_sums(integers, row, **matrix)

        by_torch.project(rows, row_offset, out, self.n_digits, sums_of)

    def multiply_vectors(self, row_map: RowMap, checkpoint: int, vectors: Tensor) -> Tensor:
        """Return the product with the matrix from the other side; see ``Projector``."""
        return multiply_signs(vectors, 0, row_map.n_rows, **self._at(checkpoint))

    def _at(self, checkpoint: int) -> dict[str, int]:
        return {"seed": self.seed, "checkpoint": checkpoint, "stream": STREAM_RADEMACHER}
