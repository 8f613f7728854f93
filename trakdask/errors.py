"""Exceptions that callers may want to catch; all other errors are of built-in types."""

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
    """A checkpoint file cannot be read safely or does not match the model."""


class StoreMismatchError(ValueError):
    """Two feature sets, or a feature set and a store, were made in different ways."""


class StoreBusyError(RuntimeError):
    """Another process is writing to the store; the message names the process."""


class IncompleteFeaturesError(ValueError):
    """Blocks of a store were never completed."""


class UnfinishedAppendWarning(UserWarning):
    """An append to a store is unfinished; only the data from before the append are shown."""


class KernelError(RuntimeError):
    """A GPU cannot run the kernels or returns wrong results; the samples are not the cause."""


class BlockError(RuntimeError):
    """A task failed; the message names its samples and checkpoint, or its subset and seed.

    The original error is included as text only, because its class may exist on the worker alone,
    and then could not be unpickled in another process.
    """
