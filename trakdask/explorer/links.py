"""HTML whose links, forms and buttons change the app, without loading its page again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import param
from panel.custom import JSComponent

from trakdask.explorer.filters import FORM_FIELDS
from trakdask.explorer.state import View

__all__ = ["LinkedHTML"]

_FOLDER = Path(__file__).parent


class LinkedHTML(JSComponent):
    """HTML in a page. What a link, form or button asks for is given to ``told``, as a dict.

    The address of the page follows ``query``; parameters in it that are not ours are kept, and the
    browser's button to go back works. A link that is opened in another tab works by itself.
    """

    html = param.String(doc="Escaped HTML; each of its outermost elements is replaced on its own.")
    query = param.String(doc="The view, as the part of a URL after '?'.")
    names = param.List([*vars(View()), *FORM_FIELDS], doc="Parameters of a URL that are ours.")
    marked = param.List([], doc="Samples with their marks, such as '7 wrong label'.")
    saved = param.String(doc="What a browser is to save as an HTML file.")
    follows_address = param.Boolean(False, doc="Whether the address of the page is the view's.")

    _esm: ClassVar[Any] = _FOLDER / "links.js"
    _stylesheets: ClassVar[Any] = [(_FOLDER / "explorer.css").read_text()]

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)  # type: ignore[no-untyped-call]
        self.told: Callable[[dict[str, Any]], None] | None = None

    def _handle_msg(self, msg: dict[str, Any]) -> None:
        if self.told is not None:
            self.told(msg)
