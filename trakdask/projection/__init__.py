"""Random projection of per-sample gradients: exact integer products, counter-based matrices."""

from __future__ import annotations

from trakdask.projection.projectors import Identity, Projector, Rademacher
from trakdask.projection.rows import ROW_ALIGNMENT, ROW_BLOCK, RowMap
from trakdask.projection.stream import ProjectionStream, project

__all__ = [
    "ROW_ALIGNMENT",
    "ROW_BLOCK",
    "Identity",
    "ProjectionStream",
    "Projector",
    "Rademacher",
    "RowMap",
    "project",
]
