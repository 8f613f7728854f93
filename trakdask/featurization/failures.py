"""Decide which errors are caused by samples, and what is recorded about them."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from trakdask.errors import KernelError

__all__ = ["ERROR_DTYPE", "ModelError", "OnError", "is_of_samples", "not_finite", "reason"]

OnError = Literal["raise", "record"]

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
