"""One view as an HTML file, which needs neither a server nor a network."""

from __future__ import annotations

import os
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from trakdask.explorer.pages import sections
from trakdask.explorer.pages.frame import frame, header
from trakdask.explorer.state import View
from trakdask.files import Folder, location

if TYPE_CHECKING:
    from trakdask.explorer.explorer import Explorer

__all__ = ["document", "save_html"]

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""A browser runs no script of the page, and asks no network for anything."""

_CLICKED = re.compile(
    r'<(form|nav|button)\b.*?</\1>|<div class="marks">.*?</div>|<div class="forms"></div>',
    re.DOTALL,
)
"""Forms, buttons and links to other pages. Values are escaped, so that none of them matches."""

_LINK = re.compile(r"<a (?!download)[^>]*>(.*?)</a>", re.DOTALL)


def save_html(explorer: Explorer, path: str | os.PathLike[str], view: View) -> None:
    """Write one view to an HTML file: what it shows, without what can be clicked.

    Parameters
    ----------
    explorer
        What :func:`explore` returned.
    path
        The file, on a disk of this machine; it is written whole or not at all.
    view
        What to show.

    Raises
    ------
    ValueError
        If the path is that of a folder or a URL.
    OSError
        If the file cannot be written.
    """
    file = Path(location(path))
    if "://" in str(path) or file.is_dir():
        raise ValueError(
            f"expected a file on a disk of this machine, got {str(path)!r}; try 'view.html'"
        )
    parts = [
        frame(each, each.html(), level=2 if i else 1)
        for i, each in enumerate(sections(explorer, view))
    ]
    html = header(explorer, view) + "".join(parts)
    Folder(str(file.parent)).write(file.name, document(view, html).encode())


def document(view: View, html: str) -> str:
    """Return the HTML of a page as a file of its own, with nothing to click."""
    unlinked = _LINK.sub(r"<span>\1</span>", _CLICKED.sub("", html))
    style = (Path(__file__).parent / "explorer.css").read_text("utf-8")
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>trakdask: {escape(view.page)}</title><style>body {{ margin: 0 }}\n{style}</style>"
        f'</head><body><div class="trakdask">{unlinked}</div></body></html>\n'
    )
