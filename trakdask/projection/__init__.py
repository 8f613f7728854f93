"""Random projection of per-sample gradients: exact integer products, counter-based matrices."""

from __future__ import annotations

from trakdask.projection.identity import Identity
from trakdask.projection.protocol import Cost, Projector
from trakdask.projection.rademacher import Rademacher
from trakdask.projection.rows import ROW_ALIGNMENT, ROW_BLOCK, RowMap
from trakdask.projection.stream import ProjectionStream, project

__all__ = [
    "ROW_ALIGNMENT",
    "ROW_BLOCK",
    "Cost",
    "Identity",
    "ProjectionStream",
    "Projector",
    "Rademacher",
    "RowMap",
    "project",
]
