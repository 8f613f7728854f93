"""A section of a page: a title, what it means, and a function that writes its HTML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Section"]


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Parameters
    ----------
    title, help
        What it is called, and a sentence that says what it shows.
    html
        Computes what it shows, and returns it as escaped HTML.
    kind
        A class of its style: ``"half"`` for half of the width.
    """

    title: str
    help: str
    html: Callable[[], str]
    kind: str = ""
