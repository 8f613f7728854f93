"""Inputs and results of a task of featurize: settings, samples, their values, and failures."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trakdask.errors import KernelError
from trakdask.featurization.devices import is_out_of_memory
from trakdask.models.checkpoints import Checkpoint
from trakdask.models.gradients import number_of_tokens
from trakdask.models.model import Model
from trakdask.models.padding import order_by_length, trimmed
from trakdask.models.products import Products
from trakdask.models.tasks import Batch
from trakdask.models.tasks.protocol import SampleError
from trakdask.projection import RowMap
from trakdask.projection.fitted import Fitted
from trakdask.tensors import float64_device

ERROR_DTYPE = np.dtypes.StringDType()

_LONGEST_REASON = 200
_NAMES = ("gradient", "output", "out_to_loss")
_OF_DEVICES = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)  # since torch 2.8

_log = logging.getLogger(__name__)


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
    has_others
        Whether the last part stands for the layers that do not see tokens.
    """

    dim: str
    size: int
    groups: Mapping[str, int] | None = None
    names: tuple[str, ...] = ()
    has_others: bool = False

    def of(self, batch: Batch) -> Partition:
        """Return the parts of a batch, whose padding may have been cut."""
        size = number_of_tokens(batch) + self.has_others
        return self if self.groups else replace(self, size=size)

    def products(self, vectors: Mapping[str, Tensor], n_samples: int) -> Products:
        """Return the stream that multiplies the gradients of some samples with vectors."""
        # One row for each token, and, apart from them, one row of a sample for layers without
        # tokens.
        if self.groups is None:
            n_others = n_samples if self.has_others else 0
            return Products(vectors, n_samples * self.size - n_others, n_others=n_others)
        return Products(vectors, n_samples, self.groups, self.size)

    def spec(self) -> dict[str, Any]:
        """Return a JSON-able value that describes the parts."""
        return {"dim": self.dim, "groups": None if self.groups is None else dict(self.groups)}


@dataclass(frozen=True, kw_only=True)
class FeaturizeJob:
    """The settings of featurize that all tasks share."""

    model: Model
    projector: Fitted
    row_map: RowMap
    proj_dim: int
    engines: tuple[str, ...]
    """Engines that are tried in this order, until one runs the model right."""
    batch_size: int
    elements_at_once: int
    """Elements of the gradient of a sample that the first of the engines holds at once."""
    inputs: tuple[str, ...]
    """Names of the variables that the model reads."""
    torch_settings: Mapping[str, str]
    """Settings of torch that change gradients, as they were when featurize was called."""
    device: str
    on_error: str
    partition: Partition | None = None
    """How gradients are divided into parts; None for whole samples."""
    counted_as: str = ""
    """The name by which a bar counts the blocks; empty if no bar does."""

    def feature_shape(self, n_samples: int, width: int) -> tuple[int, ...]:
        """Return the shape of the features of some samples at one checkpoint."""
        return n_samples, *(() if self.partition is None else (self.partition.size,)), width


@dataclass(frozen=True)
class BlockSamples:
    """The samples of a block, from which batches for the model are created on a device."""

    job: FeaturizeJob
    positions: np.ndarray
    arrays: tuple[np.ndarray, ...]
    device: torch.device
    what: str = ""
    """What errors call the block."""
    trims: bool = False
    """Whether padding that all samples of a batch share is cut."""

    def __len__(self) -> int:
        return len(self.positions)

    def batch(self, part: slice | np.ndarray) -> Batch:
        """Return some of the samples as tensors."""
        # A copy, because torch cannot share read-only memory, such as a memory-mapped file.
        inputs = zip(self.job.inputs, self.arrays, strict=True)
        batch = Batch({name: torch.tensor(array[part]) for name, array in inputs})
        # Before it moves, so that padding is not sent to a device.
        batch = trimmed(self.job.model.task, batch) if self.trims else batch
        if float64_device(self.device).type != self.device.type:  # it has no float64
            batch = Batch(
                {n: t.float() if t.dtype == torch.float64 else t for n, t in batch.items()}
            )
        return Batch({name: value.to(self.device) for name, value in batch.items()})

    def by_length(self) -> tuple[BlockSamples, np.ndarray]:
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


class ModelError(ValueError):
    """A model that an engine does not run correctly, whatever the samples.

    Its cause is a :class:`SampleError` if f or Q of a sample depends on the batch. This is a
    property of the model, and another engine would only hide it.
    """


_NOT_OF_SAMPLES = (
    ModelError,
    OSError,
    MemoryError,
    ImportError,
    KernelError,
    torch.OutOfMemoryError,
    _OF_DEVICES,
)
"""Errors of the machine or of the model: other samples would fail as well."""


def is_of_samples(err: Exception) -> bool:
    """Return whether an error of a micro-batch may be caused by its samples."""
    return not isinstance(err, _NOT_OF_SAMPLES) and not is_out_of_memory(err)


def is_of_engine(err: Exception) -> bool:
    """Return whether an error of a micro-batch may be one that another engine does not have."""
    of_sample = isinstance(err, SampleError) or isinstance(err.__cause__, SampleError)
    return not of_sample and (is_of_samples(err) or isinstance(err, ModelError))


def reason(err: Exception) -> str:
    """Return a one-line description of an error.

    Examples
    --------
    >>> reason(IndexError("label 10  is out of bounds"))
    'IndexError: label 10 is out of bounds'
    """
    text = " ".join(f"{type(err).__name__}: {err}".split())
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."


def not_finite(*arrays: np.ndarray) -> dict[int, str]:
    """Return the rows that are not finite, and which of gradient, output and out_to_loss is not.

    Examples
    --------
    >>> not_finite(np.ones((2, 3)), np.array([1, np.nan]), np.array([np.inf, np.nan]))
    {0: 'out_to_loss', 1: 'output'}
    """
    finite = [np.isfinite(array).reshape(len(array), -1).all(axis=1) for array in arrays]
    bad = np.flatnonzero(~np.logical_and.reduce(finite))
    # A non-finite output causes a non-finite gradient, so the output is named first.
    order = [(_NAMES[i], finite[i]) for i in (1, 0, 2)]
    return {int(row): next(name for name, good in order if not good[row]) for row in bad}


class BlockResults:
    """The results of a block so far, and the samples of it that failed."""

    def __init__(self, samples: BlockSamples, checkpoint: Checkpoint, width: int) -> None:
        n = len(samples)
        self._on_error, self._positions = samples.job.on_error, samples.positions
        self._checkpoint = checkpoint.name
        shapes = samples.job.feature_shape(n, width), n, n
        self.arrays = tuple(np.full(shape, np.nan, np.float32) for shape in shapes)
        """Arrays of feature, output and out_to_loss."""
        self._raised: list[Exception] = []
        self._reasons: dict[int, str] = {}

    def put(self, part: slice, block: tuple[np.ndarray, ...]) -> None:
        """Store the results of a micro-batch; non-finite samples raise an error or become NaN."""
        bad = not_finite(*block)
        if bad and self._on_error == "raise":
            row, name = next(iter(bad.items()))
            position = self._positions[part.start + row]
            more = f" and {len(bad) - 1} more of this batch" if len(bad) > 1 else ""
            raise ValueError(
                f"expected finite numbers, got NaN or infinity as the {name} of sample {position}"
                f"{more} at checkpoint {self._checkpoint!r}; try td.featurize(..., "
                "on_error='record'), which leaves such samples out, and "
                f"samples.isel(sample={position}) to inspect it"
            )
        for array, values in zip(self.arrays, block, strict=True):
            array[part] = values
            # ``array[part]`` is a view, so this writes to the array.
            array[part][list(bad)] = np.nan
        for row, name in bad.items():
            self._record(part.start + row, f"the {name} is NaN or infinite")

    def fail(self, row: int, err: Exception) -> None:
        """Record the error that the model raised for a sample, whose results stay NaN."""
        # Only the first traceback is stored, because each one keeps the tensors of its frames.
        self._raised.append(err.with_traceback(None) if self._raised else err)
        self._record(row, reason(err))

    def _record(self, row: int, why: str) -> None:
        self._reasons[row] = why
        where = self._positions[row], self._checkpoint
        _log.warning("sample %d failed at checkpoint %r: %s", *where, why)

    def result(self) -> tuple[np.ndarray, ...]:
        """Return the block, or raise the first error if all of several samples failed."""
        n = len(self._positions)
        # Only where the model raised an error each time, which is a mistake in the setup. Numbers
        # that are not finite are results of a model that runs.
        if 1 < n == len(self._raised):
            raise self._raised[0]
        block = tuple(array[..., None] for array in self.arrays)
        if self._on_error == "raise":
            return block
        error = np.full((n, 1), "", ERROR_DTYPE)
        for row, why in self._reasons.items():
            error[row] = why
        return *block, error
