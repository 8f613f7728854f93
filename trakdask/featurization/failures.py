"""Results of a block: which errors are caused by samples, and what is recorded about them."""

from __future__ import annotations

import logging

import numpy as np
import torch

from trakdask.errors import KernelError
from trakdask.featurization.job import Samples
from trakdask.models.checkpoints import Checkpoint

Block = tuple[np.ndarray, ...]
"""Feature, output and out_to_loss, followed by error if failures are recorded."""

_log = logging.getLogger(__name__)

ERROR_DTYPE = np.dtypes.StringDType()
_LONGEST_REASON = 200
_NAMES = ("gradient", "output", "out_to_loss")
_OF_DEVICES = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)  # since torch 2.8


class ModelError(ValueError):
    """A model that an engine does not run correctly, whatever the samples."""


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
    return not isinstance(err, _NOT_OF_SAMPLES)


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

    def __init__(self, samples: Samples, checkpoint: Checkpoint, width: int) -> None:
        n = len(samples)
        self._on_error, self._positions = samples.job.on_error, samples.positions
        self._checkpoint = checkpoint.name
        shapes = samples.job.feature_shape(n, width), n, n
        self.arrays = tuple(np.full(shape, np.nan, np.float32) for shape in shapes)
        """Of feature, output and out_to_loss."""
        self._raised: list[Exception] = []
        self._reasons: dict[int, str] = {}

    def put(self, part: slice, block: Block) -> None:
        """Store the results of a micro-batch; non-finite samples raise an error or become NaN."""
        bad = not_finite(*block)
        if bad and self._on_error == "raise":
            raise self._not_finite(part.start, bad)
        for array, values in zip(self.arrays, block, strict=True):
            array[part] = values
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

    def _not_finite(self, start: int, bad: dict[int, str]) -> ValueError:
        row, name = next(iter(bad.items()))
        position = self._positions[start + row]
        more = f" and {len(bad) - 1} more of this batch" if len(bad) > 1 else ""
        return ValueError(
            f"expected finite numbers, got NaN or infinity as the {name} of sample {position}"
            f"{more} at checkpoint {self._checkpoint!r}; try on_error='record', which leaves "
            f"such samples out, and samples.isel(sample={position}) to inspect it"
        )

    def result(self) -> Block:
        """Return the block, or raise the first error if all of several samples failed."""
        n = len(self._positions)
        if 1 < n == len(self._raised):
            raise self._raised[0]
        block = tuple(array[..., None] for array in self.arrays)
        if self._on_error == "raise":
            return block
        error = np.full((n, 1), "", ERROR_DTYPE)
        for row, why in self._reasons.items():
            error[row] = why
        return *block, error
