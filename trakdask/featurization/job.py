"""The inputs of a task of featurize: the settings, and the samples of its block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trakdask.models.gradients import number_of_tokens
from trakdask.models.independence import order_by_length, trimmed
from trakdask.models.model import Model
from trakdask.models.rules import Products
from trakdask.models.tasks import Batch
from trakdask.models.tasks.protocol import SampleError
from trakdask.projection import Projector, RowMap

OnError = Literal["raise", "record"]
DType = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Precision:
    """Settings of torch that affect gradients, to be applied in tasks as in the caller.

    Parameters
    ----------
    dtype
        The dtype to which weights and inputs are cast; None to leave them unchanged.
    autocast
        The dtype of ``torch.autocast``, for GPUs or else for the CPU; None if it is off. It applies
        on any device that tasks run on.
    matmul
        ``torch.get_float32_matmul_precision()``: "highest" is float32, others allow TF32 or
        bfloat16 inside float32 products.
    """

    dtype: DType | None
    autocast: str | None
    matmul: str

    @contextmanager
    def applied(self, device: str = "cpu") -> Iterator[None]:
        """Apply these settings on a type of device while the ``with`` body runs."""
        before = torch.get_float32_matmul_precision()
        # This is a setting of the whole process, so it is changed only if necessary.
        if before != self.matmul:
            torch.set_float32_matmul_precision(self.matmul)
        dtype = getattr(torch, self.autocast) if self.autocast else None
        try:
            with torch.autocast(device, dtype=dtype, enabled=self.autocast is not None):
                yield
        finally:
            if before != self.matmul:
                torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Partition:
    """The parts of a sample.

    Parameters
    ----------
    dim
        Name of their dimension.
    size
        Their number.
    groups
        Number of the part of each parameter; None if every parameter has a term for every part.
    names
        Names of the parts, if they have some.
    """

    dim: str
    size: int
    groups: Mapping[str, int] | None = None
    names: tuple[str, ...] = ()

    def of(self, batch: Batch) -> Partition:
        """Return the parts of a batch, of which padding may have been cut."""
        return self if self.groups else replace(self, size=number_of_tokens(batch))

    def products(self, vectors: Mapping[str, Tensor], n_samples: int) -> Products:
        """Return what multiplies the gradients of some samples with vectors."""
        if self.groups is None:
            return Products(vectors, n_samples * self.size)
        return Products(vectors, n_samples, self.groups, self.size)

    def spec(self) -> dict[str, Any]:
        """Return a JSON-able value that says what the parts are."""
        return {"dim": self.dim, "groups": None if self.groups is None else dict(self.groups)}


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

    def feature_shape(self, n_samples: int, width: int) -> tuple[int, ...]:
        """Return the shape of the features of some samples at one checkpoint."""
        return n_samples, *(() if self.partition is None else (self.partition.size,)), width


@dataclass(frozen=True)
class Samples:
    """The samples of a block, from which batches for the model are created on a device."""

    job: Job
    positions: np.ndarray
    arrays: tuple[np.ndarray, ...]
    device: torch.device
    trims: bool = False
    """Whether padding that all samples of a batch share is cut."""

    def __len__(self) -> int:
        return len(self.positions)

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
