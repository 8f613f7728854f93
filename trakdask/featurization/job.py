"""The inputs of a task of featurize: the settings, and the samples of its block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trakdask.featurization.failures import OnError
from trakdask.featurization.partition import Partition
from trakdask.featurization.precision import Precision
from trakdask.models.checkpoints import Checkpoint
from trakdask.models.model import Model
from trakdask.models.padding import order_by_length, trimmed
from trakdask.models.tasks import Batch
from trakdask.models.tasks.protocol import SampleError
from trakdask.projection import Projector, RowMap

__all__ = ["Job", "Samples"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The settings of featurize that all tasks share."""

    model: Model
    projector: Projector
    row_map: RowMap
    engine: str
    batch_size: int
    elements_at_once: int
    inputs: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    precision: Precision
    device: str
    on_error: OnError
    checked_as: str
    """Names what a process finds out about the model, so that it does so once."""
    partition: Partition | None = None
    """How gradients are divided into parts; None for whole samples."""

    @property
    def rows_of_sample(self) -> int:
        """Number of features of a sample."""
        return 1 if self.partition is None else self.partition.size


@dataclass(frozen=True)
class Samples:
    """The samples of a block, from which batches for the model are created on a device."""

    job: Job
    positions: np.ndarray
    arrays: tuple[np.ndarray, ...]
    device: torch.device
    moments: Checkpoint | None = None
    """The second moments that scale gradients."""
    trims: bool = False
    """Whether padding that all samples of a batch share is cut."""
    vectors: Mapping[str, Tensor] | None = None
    """By parameter, what gradients are multiplied with, (vector, *shape); None to project them."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def width(self) -> int:
        """Length of a feature, or the number of products in its place."""
        if self.vectors is not None:
            return len(next(iter(self.vectors.values())))
        return self.job.projector.width(self.job.row_map.n_rows)

    def feature_shape(self, n_samples: int) -> tuple[int, ...]:
        """Return the shape of the features of some samples at one checkpoint."""
        partition = self.job.partition
        return n_samples, *(() if partition is None else (partition.size,)), self.width

    def batch(self, part: slice | np.ndarray) -> Batch:
        """Return some of the samples as tensors."""
        # A copy, because torch cannot share read-only memory, such as that of a memory-mapped file.
        inputs = zip(self.job.inputs, self.arrays, strict=True)
        batch = Batch(
            {name: torch.tensor(array[part], device=self.device) for name, array in inputs}
        )
        return trimmed(self.job.model.task, batch) if self.trims else batch

    def by_length(self) -> tuple[Samples, np.ndarray]:
        """Return the samples with the longest sequences first, and where each of them now is."""
        task = self.job.model.task
        order = order_by_length(task, dict(zip(self.job.inputs, self.arrays, strict=True)))
        if order is None:
            return self, np.arange(len(self))
        arrays = tuple(array[order] for array in self.arrays)
        return replace(self, positions=self.positions[order], arrays=arrays), np.argsort(order)

    def named(self, err: Exception, part: slice) -> Exception:
        """Return an error of one of the samples with the sample's position."""
        if not isinstance(err, SampleError):
            return err
        return err.at(int(self.positions[part][err.row]))
