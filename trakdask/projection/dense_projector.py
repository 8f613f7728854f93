"""The base of projectors with a dense random matrix."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from trakdask.projection.cuda import GpuProjector
from trakdask.projection.protocol import ARITHMETIC, ROUNDING_ERROR, Cost, allowed
from trakdask.projection.row_map import ROW_ALIGNMENT


@dataclass(frozen=True)
class DenseProjector(GpuProjector):
    """A projector whose matrix has an independent random entry in every row and column.

    A smaller ``proj_dim`` gives a prefix of the columns of a larger one, up to the scale.
    """

    row_alignment: ClassVar[int] = ROW_ALIGNMENT
    bits_per_entry: ClassVar[int]

    proj_dim: int = field(default=2048, metadata=allowed(range(1, 2**32), 2048))
    seed: int = field(default=0, metadata=allowed(range(2**64), 0))
    arithmetic: str = field(default="int8x2", metadata=allowed(tuple(ARITHMETIC), "int8x2"))

    @property
    def n_digits(self) -> int:
        """Number of 8-bit digits per gradient element."""
        return ARITHMETIC[self.arithmetic]

    @abstractmethod
    def _buffer_bytes(self) -> int:
        """Return the working memory of one thread, for micro-batches of 512 samples."""

    def cost(self, n_rows: int) -> Cost:
        """Return the cost of projecting gradients of ``n_rows`` elements."""
        entries = n_rows * self.proj_dim
        return Cost(
            operations=2 * self.n_digits * entries,
            random_bits=self.bits_per_entry * entries,
            buffer_bytes=self._buffer_bytes(),
            rounding_error=ROUNDING_ERROR[self.arithmetic],
            product_error=self._product_error(),
        )
