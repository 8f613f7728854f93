"""The projector that keeps the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trakdask.projection.protocol import Cost, Projector
from trakdask.projection.rows import RowMap


@dataclass(frozen=True)
class Identity(Projector):
    """Use the whole gradient, for small models and exact results; columns are rows of the map."""

    kind: ClassVar[str] = "identity"

    def width(self, n_rows: int) -> int:
        """Return ``n_rows``."""
        return n_rows

    def scale(self, n_rows: int) -> float:
        """Return 1."""
        return 1.0

    def cost(self, n_rows: int) -> Cost:
        """Return the cost of a copy, without errors."""
        return Cost(0, 0, 0, rounding_error=0.0, product_error=(0.0, 0.0))

    def project_block(self, block: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add one row block to its own columns of ``out``; see ``Projector``."""
        block = block.float()  # a float64 value such as 1e300 is infinite as a float32 feature
        block = block.to(out.device)
        out[:, row_offset : row_offset + block.shape[1]].add_(block)
        # As with other projectors, one value that is not finite spoils all columns of its sample.
        out.masked_fill_(~torch.isfinite(block).all(1, keepdim=True), torch.nan)

    def multiply_vectors(self, row_map: RowMap, checkpoint: int, vectors: Tensor) -> Tensor:
        """Return the vectors; see ``Projector``."""
        return vectors
