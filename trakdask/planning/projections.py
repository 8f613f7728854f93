"""The cost of a projector, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from trakdask.arrays import memory, spectra
from trakdask.checks import shown
from trakdask.derived import LEAST_DIM, MOST_DIM
from trakdask.projection import Projector, RowMap
from trakdask.projection.fitted import Fitted

MOST_PER_COLUMN = 2
"""With more samples than this per random column, every task that was measured lost 0.04 or more of
its LDS with one checkpoint (``tests/benchmarks/results/2026-11-23-columns.txt``)."""
_TARGETS = 100
"""The number of targets of the query whose memory a plan has."""


def checked(projectors: Projector | Iterable[Projector] | None) -> list[Projector]:
    """Return projectors in a list; raise if something else is among them."""
    listed = [projectors] if isinstance(projectors, Projector | str) else list(projectors or ())
    for projector in listed:
        if not isinstance(projector, Projector):
            raise TypeError(
                f"expected projectors only, got {shown(projector)} in projectors; try "
                "projectors=[td.SJLT(proj_dim=2048)]"
            )
    return listed


def wider(projector: Projector, rank: int) -> list[Projector]:
    """Return projectors with more columns, if a gram matrix of this rank has too few."""
    columns: int | None = getattr(projector, "proj_dim", None)
    if columns is None or rank <= MOST_PER_COLUMN * columns:
        return []
    widths = [factor * columns for factor in (2, 4) if factor * columns <= MOST_DIM]
    return [replace(projector, proj_dim=width) for width in widths]  # type: ignore[call-arg]


def planned(
    projector: Fitted,
    shapes: Mapping[str, Any],
    n_samples: int,
    block_rows: int,
    n_checkpoints: int,
    fit_bytes: int,
) -> dict[str, Any]:
    """Return the cost of a projector for some samples, in blocks of up to so many rows.

    The numbers are those that :class:`~trakdask.planning.Plan` explains.
    """
    row_map = RowMap.from_shapes(shapes, alignment=projector.projector.row_alignment)
    bound = projector.bind(row_map)
    cost, width = bound.projector.cost(row_map.n_rows), bound.width(row_map.n_rows)
    feature_bytes = 4 * n_samples * width * n_checkpoints
    matrix_bytes = 4 * (width * (width + 1) // 2) * n_checkpoints  # its other half is zeros
    output_bytes = (4 + 4 + 8) * n_samples * n_checkpoints  # norms are float64
    k = 0
    if width <= MOST_DIM:
        k = spectra.component_count(n_samples, width, np.dtype(np.float32))
    sizes = memory.Sizes(n_samples, block_rows, width, n_checkpoints, read=True)
    targets = replace(sizes, n_samples=_TARGETS, rows=_TARGETS, read=False)
    eigenvector_bytes = (4 * width + 8) * k * n_checkpoints * (width > LEAST_DIM)  # and eigenvalues
    decomposition = 9 * width**3 if k == width else 4 * width * k**2 + 9 * k**3
    decomposition_bytes = memory.eigenvectors(width, k) if k else 0
    return {
        "projector": repr(projector),
        "proj_dim": width,
        "n_rows": row_map.n_rows,
        "sample_operations": cost.operations,
        "gram_operations": n_samples * width**2 * n_checkpoints,
        "decomposition_operations": decomposition * n_checkpoints,
        "random_bits": cost.random_bits,
        "feature_bytes": feature_bytes,
        "store_bytes": feature_bytes + output_bytes + matrix_bytes + eigenvector_bytes + fit_bytes,
        "buffer_bytes": cost.buffer_bytes,
        "save_bytes": max(memory.stored(sizes), memory.gram(sizes), decomposition_bytes),
        "query_bytes": max(memory.score(sizes, targets, ranked=True), memory.solve(targets, width)),
        "rounding_error": cost.rounding_error,
        "product_error": cost.product_error[0],
        "worst_product_error": cost.product_error[1],
    }
