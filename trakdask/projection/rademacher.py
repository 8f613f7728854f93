"""The dense matrix of random signs: the default projector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from trakdask.projection.cuda import GpuProjector, Kernels
from trakdask.projection.cuda import dense as dense_on_gpu
from trakdask.projection.dense import accumulate_rademacher, dense_buffer_bytes
from trakdask.projection.protocol import (
    ARITHMETIC,
    DEFINITION_VERSION,
    ROUNDING_ERROR,
    Cost,
    check_arithmetic,
    check_integer,
)
from trakdask.projection.rows import ROW_ALIGNMENT, ROW_BLOCK


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
        If an argument is not of its kind, or outside its range.

    Notes
    -----
    Exactness: products are sums of integers, hence bitwise independent of batch, tile and thread
    count; the rounding of the gradients to digits is the only error. Per sample and block of 16384
    rows, an element is off by at most 2**-7 (``int8x1``; 2**-6 for the largest), 2**-14 or 2**-22
    times the largest magnitude of the block, so the relative error of a block is at most that times
    largest / root mean square: outliers cost accuracy, most of all with ``int8x1``. Zeros and
    subnormals are exact, as far as the digits reach; a sample with NaN or infinity becomes NaN.

    References
    ----------
    Achlioptas 2003, "Database-friendly random projections". Park et al. 2023, "TRAK", step 2.

    Examples
    --------
    >>> Rademacher(proj_dim=512).width(n_rows=10**6)
    512
    """

    proj_dim: int = 2048
    seed: int = 0
    arithmetic: str = "int8x2"

    row_alignment: ClassVar[int] = ROW_ALIGNMENT

    def __post_init__(self) -> None:
        check_integer("proj_dim", self.proj_dim, 1, 2**32, "proj_dim=2048")
        check_integer("seed", self.seed, 0, 2**64, "seed=0")
        check_arithmetic(self.arithmetic)

    def width(self, n_rows: int) -> int:
        """Return ``proj_dim``."""
        return self.proj_dim

    def scale(self, n_rows: int) -> float:
        """Return ``proj_dim**-0.5``, which makes feature products estimate gradient products."""
        return float(self.proj_dim**-0.5)

    def spec(self) -> dict[str, Any]:
        """Return a JSON-able value that determines the map completely."""
        return {
            "kind": "rademacher",
            "proj_dim": self.proj_dim,
            "seed": self.seed,
            "arithmetic": self.arithmetic,
            "row_alignment": self.row_alignment,
            "row_block": ROW_BLOCK,
            "definition": DEFINITION_VERSION,
        }

    def cost(self, n_rows: int) -> Cost:
        """Return what projecting gradients of ``n_rows`` elements takes."""
        entries = n_rows * self.proj_dim
        return Cost(
            operations=2 * ARITHMETIC[self.arithmetic] * entries,
            random_bits=entries,
            buffer_bytes=dense_buffer_bytes(ARITHMETIC[self.arithmetic]),
            rounding_error=ROUNDING_ERROR[self.arithmetic],
            product_error=(self.proj_dim**-0.5, (2 / self.proj_dim) ** 0.5),
        )

    def project_on_cpu(self, block: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of one row block to ``out``, by way of the CPU.

        Notes
        -----
        Cost: see :func:`~trakdask.projection.dense.accumulate_rademacher`.
        """
        on_cpu = block.device.type == "cpu"
        target = out if on_cpu else torch.zeros(out.shape, dtype=torch.float64)
        accumulate_rademacher(
            block.cpu(),
            row_offset,
            seed=self.seed,
            checkpoint=checkpoint,
            n_digits=ARITHMETIC[self.arithmetic],
            out=target,
        )
        if not on_cpu:
            out += target.to(out.device)

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
            n_digits=ARITHMETIC[self.arithmetic],
            out=out,
        )
