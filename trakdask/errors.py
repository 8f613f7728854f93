"""The few exceptions that a caller would catch; everything else is a built-in type."""

from __future__ import annotations

__all__ = [
    "BlockError",
    "CheckpointError",
    "IncompleteFeaturesError",
    "KernelError",
    "StoreBusyError",
    "StoreMismatchError",
    "UnfinishedAppendWarning",
]


class CheckpointError(ValueError):
    """A checkpoint file cannot be read safely, or does not fit the model."""


class StoreMismatchError(ValueError):
    """Two feature sets, or a feature set and a store, were made in different ways."""


class StoreBusyError(RuntimeError):
    """Another process writes the store; the message says which."""


class IncompleteFeaturesError(ValueError):
    """A store lacks blocks that were never completed."""


class UnfinishedAppendWarning(UserWarning):
    """An append to a store was cut short, or goes on: what was there before is what is shown."""


class KernelError(RuntimeError):
    """A GPU cannot run the kernels, or runs them wrongly; no fault of the samples."""


class BlockError(RuntimeError):
    """One task failed; the message names its samples and checkpoint, or its subset and seed.

    It holds a single string so that it survives pickling between processes, whatever was raised
    inside (an exception class that only a worker can import would not).
    """
