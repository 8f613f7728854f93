"""The app of one browser session, on Panel."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import panel as pn

from trakdask.explorer.links import LinkedHTML
from trakdask.explorer.pages import sections
from trakdask.explorer.state import View

if TYPE_CHECKING:
    from trakdask.explorer.explorer import Explorer

__all__ = ["Session"]


class Session:
    """The state of one browser: its view, and the page that shows it."""

    def __init__(self, explorer: Explorer, view: View | None = None) -> None:
        self.explorer = explorer
        location = pn.state.location
        self.view = view or View.from_query(location.search if location else "")
        self.page = LinkedHTML(sizing_mode="stretch_width")
        self.page.on_link = self._follow
        self.go(self.view)

    def panel(self) -> Any:
        """Return what a browser shows."""
        return pn.Column(self.page, sizing_mode="stretch_width")

    def go(self, view: View) -> None:
        """Show a view."""
        self.view = view
        self.page.query = view.to_query()
        self.page.html = "".join(
            f"<section><h2>{escape(each.title)}</h2>{each.html()}</section>"
            for each in sections(self.explorer, view)
        )

    def _follow(self, query: str) -> None:
        self.go(View.from_query(query))
