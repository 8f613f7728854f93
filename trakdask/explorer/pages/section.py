"""A section of a page: a title, what its words mean, and a function that writes its HTML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from trakdask.explorer.state import View

if TYPE_CHECKING:
    from trakdask.explorer.explorer import Explorer

__all__ = ["Section", "link", "sections"]


@dataclass(frozen=True)
class Section:
    """A part of a page. ``html`` computes what it shows, and returns it escaped."""

    title: str
    help: str
    html: Callable[[], str]


def link(view: View, text: object) -> str:
    """Return a link to a view."""
    return f'<a href="?{escape(view.to_query())}">{escape(str(text))}</a>'


def sections(explorer: Explorer, view: View) -> list[Section]:
    """Return the sections of the page of a view; nothing is computed before their ``html()``."""
    from trakdask.explorer.pages import one_target, targets

    if view.page == "target":
        return one_target.sections(explorer, view)
    return targets.sections(explorer, view)
