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
from trakdask.models.curvature import Whitened, whole
from trakdask.models.gradients import out_to_loss_of
from trakdask.models.moments import scaled, scales
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
        Returns a sink of whole gradients for weights of samples, and an array to add to.
    power
        a of the samples' weights q^a (1 - q); None for equal weights.
    """

    total: np.ndarray
    collect: Callable[[Tensor, np.ndarray], Callable[[str, Tensor], None]]
    power: float | None

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
        self.sums, self.n_samples = sums, n_samples
        self.values = np.zeros_like(sums.total)

    def result(self) -> Tensor:
        """Add the sums to those of the block, and return rows without columns."""
        self.sums.total[:] += self.values
        return torch.empty(self.n_samples, 0)


def stream_opener(
    samples: Samples, sums: Sums | None, forward: Forward, checkpoint: Checkpoint
) -> Callable[[Batch], tuple[Stream, Sink]]:
    """Return what gives each micro-batch a stream, and the sink of gradients that fills it."""
    job, device = samples.job, samples.device
    factors = scales(samples.moments, job.row_map.names, device) if samples.moments else None
    shapes, curvature = job.model.shapes, samples.curvature
    whitened = Whitened(curvature, shapes, device) if curvature else None

    def opened(batch: Batch) -> tuple[Stream, Any]:
        n = batch.size
        if sums is not None:
            of_batch = _SumsOfBatch(sums, n)
            h = sums.weights(forward, samples, batch)
            return of_batch, whole(shapes, sums.collect(h, of_batch.values))
        place = job.projector, job.row_map, n, checkpoint.id, device
        if whitened is not None and curvature is not None:
            leading = LeadingStream(*place, curvature.leading)
            return leading, whitened.into(leading.add)
        stream = ProjectionStream(*place)
        return stream, stream

    def opened_for_parts(batch: Batch) -> tuple[Stream, Any]:
        assert job.partition is not None
        assert samples.vectors is not None
        products = job.partition.of(batch).products(samples.vectors, batch.size)
        return products, products

    def opened_and_scaled(batch: Batch) -> tuple[Stream, Any]:
        stream, sink = opened(batch)
        return stream, scaled(sink, factors) if factors else sink

    return opened_and_scaled if samples.vectors is None else opened_for_parts
