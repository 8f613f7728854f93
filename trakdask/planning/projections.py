"""The cost of a projector, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class PlannedProjection:
    """The cost of one projector for the samples and checkpoints of a plan.

    Parameters
    ----------
    projector
        Its ``repr``.
    proj_dim
        Feature columns.
    n_rows
        Elements of one gradient: the parameters, and the padding between tensors.
    sample_operations
        Arithmetic operations of the projection per sample and checkpoint; a multiplication and an
        addition count as two.
    random_bits
        Bits of the random matrix, drawn once per micro-batch and checkpoint.
    gram_operations
        Operations for the gram matrices of all checkpoints; twice as many with weights.
    decomposition_operations
        Operations for their eigenvectors.
    feature_bytes
        Bytes of all features, float32: samples × proj_dim × checkpoints × 4.
    store_bytes
        Bytes that :func:`~trakdask.save` writes, without metadata: features, their norms, output,
        out_to_loss, gram matrices, their eigenvectors above ``proj_dim`` 1024, and the values of a
        fitted projector. What is compressed may take 15 % less.
    buffer_bytes
        Working memory of one thread, in addition to gradients and features, for micro-batches of
        512 samples.
    save_bytes
        The most memory of a task of :func:`~trakdask.save`, beside gradients: it stores a block, or
        sums a gram matrix, or decomposes it.
    query_bytes
        The most memory of a task that ranks all samples for 100 targets, read from a store.
    rounding_error
        Relative error of the features of Gaussian gradients against exact arithmetic.
    product_error
        Standard deviation of the error of φ·φ' for two gradients of norm 1 that are spread over
        many rows.
    worst_product_error
        The same in the worst case.
    """

    projector: str
    proj_dim: int
    n_rows: int
    sample_operations: int
    gram_operations: int
    decomposition_operations: int
    random_bits: int
    feature_bytes: int
    store_bytes: int
    buffer_bytes: int
    save_bytes: int
    query_bytes: int
    rounding_error: float
    product_error: float
    worst_product_error: float


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
) -> PlannedProjection:
    """Return the cost of a projector for some samples, in blocks of up to so many rows."""
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
    return PlannedProjection(
        projector=repr(projector),
        proj_dim=width,
        n_rows=row_map.n_rows,
        sample_operations=cost.operations,
        gram_operations=n_samples * width**2 * n_checkpoints,
        decomposition_operations=decomposition * n_checkpoints,
        random_bits=cost.random_bits,
        feature_bytes=feature_bytes,
        store_bytes=feature_bytes + output_bytes + matrix_bytes + eigenvector_bytes + fit_bytes,
        buffer_bytes=cost.buffer_bytes,
        save_bytes=max(memory.stored(sizes), memory.gram(sizes), decomposition_bytes),
        query_bytes=max(memory.score(sizes, targets, ranked=True), memory.solve(targets, width)),
        rounding_error=cost.rounding_error,
        product_error=cost.product_error[0],
        worst_product_error=cost.product_error[1],
    )
