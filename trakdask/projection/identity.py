"""No projection: the whole gradient as a feature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from trakdask.projection.protocol import DEFINITION_VERSION, Cost, Projector


@dataclass(frozen=True)
class Identity(Projector):
    """Keep the whole gradient, for small models and exact answers: columns are rows of the map."""

    row_alignment: ClassVar[int] = 1

    def width(self, n_rows: int) -> int:
        """Return ``n_rows``."""
        return n_rows

    def scale(self, n_rows: int) -> float:
        """Return 1."""
        return 1.0

    def spec(self) -> dict[str, Any]:
        """Return a JSON-able value that determines the map completely."""
        return {
            "kind": "identity",
            "row_alignment": self.row_alignment,
            "definition": DEFINITION_VERSION,
        }

    def cost(self, n_rows: int) -> Cost:
        """Return what it takes: a copy, and no error."""
        return Cost(0, 0, 0, rounding_error=0.0, product_error=(0.0, 0.0))

    def project_block(self, block: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add one row block to its own columns of ``out``; see :class:`Projector`."""
        block = block.float()  # 1e300 is infinite as a feature, whole block or not
        out[:, row_offset : row_offset + block.shape[1]].add_(block)
        out.masked_fill_(~torch.isfinite(block).all(1, keepdim=True), torch.nan)
