"""A dense matrix of random signs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from trakdask.projection.cuda import GpuProjector, Kernels
from trakdask.projection.cuda.products import add_rademacher
from trakdask.projection.integer_products import sign_bits, signed_sums, split_digits
from trakdask.projection.memory import Scratch
from trakdask.projection.philox import STREAM_RADEMACHER
from trakdask.projection.protocol import (
    ARITHMETIC,
    ROUNDING_ERROR,
    ROW_ALIGNMENT,
    ROW_BLOCK,
    Cost,
    allowed,
)
from trakdask.projection.quantize import FRACTION_BITS, quantize

_COLUMN_TILE = 2048
_scratch = Scratch()


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
        integers, step = quantize(block, FRACTION_BITS[self.n_digits], _scratch)
        if self.n_digits == 1:
            integers.clamp_(-127, 127)  # 2**7 is no signed digit
        # Digits are split once, for all tiles of columns.
        slabs = split_digits(integers, self.n_digits, row_offset)
        address = {"seed": self.seed, "checkpoint": checkpoint, "stream": STREAM_RADEMACHER}
        for column in range(0, self.proj_dim, _COLUMN_TILE):
            n_columns = min(_COLUMN_TILE, self.proj_dim - column)
            packed = sign_bits(row_offset, block.shape[1], column, n_columns, **address)
            sums = signed_sums(packed, slabs, self.n_digits).mul_(step)
            out[:, column : column + n_columns].add_(sums.T)

    def project_on_gpu(
        self, kernels: Kernels, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor
    ) -> None:
        """Add the projection of consecutive row blocks to ``out``, on their GPU."""
        add_rademacher(
            kernels,
            rows,
            row_offset,
            seed=self.seed,
            checkpoint=checkpoint,
            n_digits=self.n_digits,
            out=out,
        )
