"""Warnings that a process shows only once, however often their cause occurs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

__all__ = ["forget", "warn_once"]

_shown: set[Hashable] = set()


def warn_once(kind: Hashable, message: str, warn: Callable[[str], object] | None = None) -> None:
    """Issue a warning, unless this process has already issued one of this kind.

    Parameters
    ----------
    kind
        What identifies the warning, independently of the numbers in its text.
    message
        The text of the warning.
    warn
        The function that issues it; :func:`warnings.warn` by default.

    Notes
    -----
    A warning that a filter turns into an error does not count, so it is raised again.

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
    """Forget which warnings were issued, so that each of them can be issued once more."""
    _shown.clear()
