"""Random projection of per-sample gradients by exact integer sums and counter-based matrices."""

from __future__ import annotations

from trakdask.projection.fast_jl import FastJL
from trakdask.projection.identity import Identity
from trakdask.projection.mask import Mask
from trakdask.projection.protocol import Cost, Projector
from trakdask.projection.rademacher import Rademacher
from trakdask.projection.rows import ROW_ALIGNMENT, ROW_BLOCK, RowMap
from trakdask.projection.sjlt import SJLT
from trakdask.projection.stream import ProjectionStream, project

__all__ = [
    "ROW_ALIGNMENT",
    "ROW_BLOCK",
    "SJLT",
    "Cost",
    "FastJL",
    "Identity",
    "Mask",
    "ProjectionStream",
    "Projector",
    "Rademacher",
    "RowMap",
    "project",
]
