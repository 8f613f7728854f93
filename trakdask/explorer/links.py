"""HTML whose links change the view of the app, without loading its page again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import param
from panel.custom import JSComponent

__all__ = ["LinkedHTML"]


class LinkedHTML(JSComponent):
    """HTML in a page. Clicks on links that begin with ``?`` are told to ``on_link``.

    The address of the page follows ``query``; parameters in it that are not ours are kept, and the
    browser's button to go back works. A link that is opened in another tab works by itself.
    """

    html = param.String(doc="Escaped HTML.")
    query = param.String(doc="The view, as the part of a URL after '?'.")

    _esm = """
    export function render({ model }) {
      const root = document.createElement("div")
      const draw = () => { root.innerHTML = model.html }
      model.on("html", draw)
      draw()
      root.addEventListener("click", (event) => {
        const link = event.target.closest("a[href^='?']")
        if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return
        event.preventDefault()
        model.send_msg({ query: link.getAttribute("href") })
      })
      return root
    }
    """
    on_link: Callable[[str], None] | None = None

    def _handle_msg(self, msg: Any) -> None:
        if self.on_link is not None:
            self.on_link(str(msg["query"]))
