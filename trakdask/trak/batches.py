"""One batch of :meth:`TRAKer.featurize` or :meth:`TRAKer.score`: its rows and its features."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from trakdask.projection import ProjectionStream
from trakdask.trak.projectors import (
    BasicProjector,
    BasicSingleBlockProjector,
    ChunkedCudaProjector,
    CudaProjector,
    NoOpProjector,
    StreamProjector,
)

__all__ = ["projected", "require_within", "row_positions"]

_LAST_BATCH = "try num_samples=len(batch[0]), since the last batch may be smaller"
_TAKE_FLAT = {
    BasicProjector,
    BasicSingleBlockProjector,
    ChunkedCudaProjector,
    CudaProjector,
    NoOpProjector,
}


def row_positions(inds: Iterable[int] | None, num_samples: int | None, cursor: int) -> np.ndarray:
    """Return the rows of a batch: those given, or the next ones from the cursor on."""
    if inds is None and num_samples is not None:
        return np.arange(cursor, cursor + num_samples)
    if inds is None or num_samples is not None:
        given = "neither" if inds is None else "both"
        raise AssertionError(
            "Exactly one of num_samples and inds should be specified: expected one of them, got "
            f"{given}; try num_samples=len(batch[0])"
        )
    rows = inds.numpy(force=True) if isinstance(inds, Tensor) else np.asarray(inds)
    if rows.dtype.kind not in "iu":
        raise TypeError(f"expected integer inds, got {rows.dtype}; try inds=np.arange(0, 32)")
    return rows.reshape(-1)


def require_within(rows: np.ndarray, size: int, name: str) -> None:
    """Reject rows outside [0, size)."""
    if len(rows) and not 0 <= rows.min() <= rows.max() < size:
        raise IndexError(
            f"expected positions below {name}={size}, got {rows.min()} to {rows.max()}; "
            f"{_LAST_BATCH}"
        )


def projected(
    computer: Any, projector: Any, batch: Any, model_id: int, n_rows: int
) -> tuple[Tensor, Tensor | None]:
    """Return the projected gradients of a batch, (batch, proj_dim), and Q if it came with them.

    If both computer and projector are our own, gradients are streamed from layers to projector.
    """
    out_to_loss = None
    if getattr(computer, "can_stream", False) and isinstance(projector, StreamProjector):
        features, out_to_loss = _streamed(computer, projector, batch, model_id)
    elif getattr(computer, "can_stream", False) and type(projector) in _TAKE_FLAT:
        grads, out_to_loss = computer.flat_per_sample_grad(batch)
        features = projector.project(grads, model_id=model_id)
    else:
        grads = computer.compute_per_sample_grad(batch=batch)
        features = projector.project(grads, model_id=model_id)
    if len(features) != n_rows:
        raise ValueError(
            f"expected gradients of {n_rows} samples, got {len(features)}; {_LAST_BATCH}"
        )
    return features, out_to_loss


def _streamed(
    computer: Any, projector: StreamProjector, batch: Any, model_id: int
) -> tuple[Tensor, Tensor | None]:
    streams: list[ProjectionStream] = []

    def sink(name: str, gradient: Tensor, first: int | None = None, /) -> None:
        if not streams:
            streams.append(projector.stream(len(gradient), model_id, gradient.device))
        streams[0].add(name, gradient, first)

    out_to_loss = computer.stream_per_sample_grad(batch, sink)
    return streams[0].result(), out_to_loss
