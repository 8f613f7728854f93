"""Random projection of per-sample gradients: exact integer products, counter-based matrices."""

from __future__ import annotations

from trakdask.projection.projectors import (
    Identity,
    ProjectionStream,
    Projector,
    Rademacher,
    project,
)
from trakdask.projection.rows import ROW_ALIGNMENT, ROW_BLOCK, RowMap

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
