"""Where the gradients of a micro-batch go: into features, products with vectors, or sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from trakdask.arrays.weights import gram_weights
from trakdask.featurization.job import Samples
from trakdask.models.checkpoints import Checkpoint
from trakdask.models.curvature import Rotations, factors_by_name, rotations
from trakdask.models.gradients import out_to_loss_of
from trakdask.models.kept_checkpoints import scaled, scales
from trakdask.models.tasks import Batch, Forward
from trakdask.projection import ProjectionStream
from trakdask.projection.leading import LeadingStream

Sink = Callable[..., None]


class Stream(Protocol):
    """What a micro-batch's gradients are turned into."""

    def result(self) -> Tensor:
        """Return a row per sample, once all gradients have been received."""


@dataclass(frozen=True)
class Sums:
    """What is added up over the gradients of a block, of which no rows are kept.

    Parameters
    ----------
    total
        The sums of the micro-batches that are complete.
    collect
        Returns a sink of gradients for weights of samples, and an array to add to.
    power
        a of the samples' weights q^a (1 - q); None for equal weights.
    rotations
        The coordinates of the gradients.
    """

    total: np.ndarray
    collect: Callable[[Tensor, np.ndarray], Sink]
    power: float | None
    rotations: Rotations | None = None

    def weights(self, forward: Forward, samples: Samples, batch: Batch) -> Tensor:
        """Return h of a micro-batch; Q takes a forward pass of its own, before the gradients."""
        if self.power is None:
            return torch.ones(batch.size, device=samples.device)
        q = out_to_loss_of(forward, samples.job.model.task, batch).numpy(force=True)
        return torch.tensor(gram_weights(q, self.power), dtype=torch.float32, device=samples.device)


class _SumsOfBatch:
    """The sums of one micro-batch, which count once all of its gradients are there.

    A micro-batch that runs out of memory is divided and starts again.
    """

    def __init__(self, sums: Sums, n_samples: int) -> None:
        self._total, self._n_samples = sums.total, n_samples
        self.values = np.zeros_like(sums.total)

    def result(self) -> Tensor:
        """Add the sums to those of the block, and return rows without columns."""
        self._total[:] += self.values
        return torch.empty(self._n_samples, 0)


class Streams:
    """Gives each micro-batch of a block a stream, and the sink of gradients that fills it.

    Parameters
    ----------
    samples, forward, checkpoint
        Of the block.
    sums
        What gradients are added up to, if no rows are kept.
    """

    def __init__(
        self, samples: Samples, forward: Forward, checkpoint: Checkpoint, sums: Sums | None
    ) -> None:
        self._samples, self._forward, self._sums = samples, forward, sums
        self._checkpoint_id = checkpoint.id
        curvature, shapes, device = samples.curvature, samples.job.model.shapes, samples.device
        self.rotations: Rotations | None = sums.rotations if sums else None
        self._factors: dict[str, Tensor] | None = None
        if samples.moments:
            self._factors = scales(samples.moments, samples.job.row_map.names, device)
        elif curvature:
            self.rotations = rotations(curvature.eigenvectors, shapes, device)
            self._factors = factors_by_name(curvature, shapes, device)

    def open(self, batch: Batch) -> tuple[Stream, Sink]:
        """Return what becomes of the gradients of a micro-batch."""
        stream, sink = self._open(batch)
        # Vectors that gradients are multiplied with are scaled instead, once.
        is_scaled = self._factors is not None and self._samples.vectors is None
        return stream, scaled(sink, self._factors or {}) if is_scaled else sink

    def _open(self, batch: Batch) -> tuple[Stream, Any]:
        samples, job, n = self._samples, self._samples.job, batch.size
        if self._sums is not None:
            of_batch = _SumsOfBatch(self._sums, n)
            weights = self._sums.weights(self._forward, samples, batch)
            return of_batch, self._sums.collect(weights, of_batch.values)
        if samples.vectors is not None:
            assert job.partition is not None
            products = job.partition.of(batch).products(samples.vectors, n)
            return products, products
        place = job.projector, job.row_map, n, self._checkpoint_id, samples.device
        stream: Any = ProjectionStream(*place)
        if samples.curvature:
            stream = LeadingStream(*place, samples.curvature.leading)
        return stream, stream
