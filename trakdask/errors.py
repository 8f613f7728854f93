"""Exceptions that callers may want to catch, and warnings that a process issues only once.

All other errors are of built-in types.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable

__all__ = [
    "BlockError",
    "CheckpointError",
    "IncompleteFeaturesError",
    "StoreBusyError",
    "StoreMismatchError",
]

_shown: set[Hashable] = set()
# Reentrant: a hook that shows warnings may come back here in the same thread.
_showing = threading.RLock()


class CheckpointError(ValueError):
    """A checkpoint file cannot be read safely or does not match the model."""


class StoreMismatchError(ValueError):
    """Two feature sets, or a feature set and a store, were made in different ways."""


class StoreBusyError(RuntimeError):
    """Another process is writing to the store; the message names the process."""


class IncompleteFeaturesError(ValueError):
    """Blocks of a store were never completed."""


class KernelError(RuntimeError):
    """A GPU cannot run the kernels or returns wrong results; the samples are not the cause."""


class BlockError(RuntimeError):
    """A task failed; the message names its samples and checkpoint, or its subset and seed.

    The original error is included as text only, because its class may exist on the worker alone,
    and then could not be unpickled in another process.
    """


def warn_once(kind: Hashable, message: str, warn: Callable[[str], object] | None = None) -> None:
    """Issue a warning, unless this process has already issued one of this kind.

    Parameters
    ----------
    kind
        Values that identify the warning, independently of the numbers in its text.
    message
        The text of the warning.
    warn
        The function that issues it; :func:`warnings.warn` by default.

    Notes
    -----
    A warning that a filter turns into an error does not count, so it is raised again.

    Examples
    --------
    >>> forget_warnings()
    >>> warn_once("few", "there are 2", print), warn_once("few", "there are 3", print)
    there are 2
    (None, None)
    >>> forget_warnings()
    """
    with _showing:  # threads may have the same reason at the same time
        if kind in _shown:
            return
        if warn is None:
            warnings.warn(message, UserWarning, stacklevel=3)
        else:
            warn(message)
        _shown.add(kind)


def forget_warnings() -> None:
    """Forget which warnings were issued, so that each of them can be issued once more."""
    _shown.clear()
