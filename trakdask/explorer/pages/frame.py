"""What surrounds the answers: the header of a page, and the frame of a section."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from trakdask.explorer.pages.html import link
from trakdask.explorer.pages.section import Section
from trakdask.explorer.state import View
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE

if TYPE_CHECKING:
    from trakdask.explorer.explorer import Explorer

__all__ = ["frame", "header"]


def header(explorer: Explorer, view: View, *, said: str = "", undo: bool = False) -> str:
    """Return the links to all pages, what is explored, and messages."""
    pages = {"targets": "Targets", "corpus": "Training samples"}
    if explorer.maker is not None:
        pages["new"] = "New target"
    current = {"target": "targets", "sample": "corpus"}.get(view.page, view.page)
    links = "".join(
        link(view.replace(page=page, first=0), text).replace(
            "<a ", '<a aria-current="page" ' if page == current else "<a "
        )
        for page, text in pages.items()
    )
    sizes = explorer.features.sizes
    n_new = f" ({len(explorer.added)} new)" if explorer.added else ""
    facts = (
        f"{sizes[SAMPLE]:,} training samples, {explorer.targets.sizes[SAMPLE]:,} targets{n_new}, "
        f"{sizes[CHECKPOINT]} checkpoint{'' if sizes[CHECKPOINT] == 1 else 's'}, "
        f"{sizes[PROJ_DIM]:,} numbers per feature"
    )
    messages = "".join(
        f'<div class="message" role="status">{escape(text)}</div>' for text in view.messages
    )
    if said:
        button = ' <button type="button" data-undo>Undo</button>' if undo else ""
        messages += f'<div class="message" role="status">{escape(said)}{button}</div>'
    return (
        f"<header><strong>trakdask</strong><nav>{links}</nav>"
        '<button type="button" data-save>Save this view</button>'
        f'<span class="quiet">{facts}</span></header><div class="messages">{messages}</div>'
    )


def frame(section: Section, html: str, *, busy: bool = False, level: int = 2) -> str:
    """Return a section with its title, around escaped HTML or, if busy, its progress."""
    body = f"computing … {html}" if busy else html
    return (
        f'<section class="{section.kind}" aria-busy="{str(busy).lower()}">'
        f"<h{level}>{escape(section.title)}</h{level}>"
        f'<p class="help">{escape(section.help)}</p>'
        f'<div class="body">{body}</div></section>'
    )
