"""The default projector: a dense matrix of random signs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from trakdask.projection.cuda import Kernels
from trakdask.projection.cuda import dense as dense_on_gpu
from trakdask.projection.dense_products import accumulate_rademacher, dense_buffer_bytes
from trakdask.projection.dense_projector import DenseProjector


@dataclass(frozen=True)
class Rademacher(DenseProjector):
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
    bits_per_entry: ClassVar[int] = 1

    def _buffer_bytes(self) -> int:
        return dense_buffer_bytes(self.n_digits)

    def project_on_cpu(self, block: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of one row block to ``out``, both on the CPU.

        Notes
        -----
        Cost: see :func:`~trakdask.projection.dense_products.accumulate_rademacher`.
        """
        accumulate_rademacher(
            block,
            row_offset,
            seed=self.seed,
            checkpoint=checkpoint,
            n_digits=self.n_digits,
            out=out,
        )

    def project_on_gpu(
        self, kernels: Kernels, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor
    ) -> None:
        """Add the projection of consecutive row blocks to ``out``, on their GPU.

        Notes
        -----
        Cost: see :func:`trakdask.projection.cuda.dense.accumulate_rademacher`.
        """
        dense_on_gpu.accumulate_rademacher(
            kernels,
            rows,
            row_offset,
            seed=self.seed,
            checkpoint=checkpoint,
            n_digits=self.n_digits,
            out=out,
        )
