"""Warnings that a process shows once, however many queries give cause for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

__all__ = ["forget", "warn_once"]

_shown: set[Hashable] = set()


def warn_once(kind: Hashable, message: str, warn: Callable[[str], object] | None = None) -> None:
    """Warn, unless this process has shown a warning of this kind.

    Parameters
    ----------
    kind
        What the warning is about, whatever numbers its text has.
    message
        Its text.
    warn
        What shows it, :func:`warnings.warn` by default.

    Notes
    -----
    A warning that a filter turns into an error was not shown, and is raised again.

    Examples
    --------
    >>> forget()
    >>> warn_once("few", "there are 2", print), warn_once("few", "there are 3", print)
    there are 2
    (None, None)
    >>> forget()
    """
    if kind in _shown:
        return
    if warn is None:
        warnings.warn(message, UserWarning, stacklevel=3)
    else:
        warn(message)
    _shown.add(kind)


def forget() -> None:
    """Show every kind of warning once more."""
    _shown.clear()
