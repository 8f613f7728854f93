"""Pages: their sections one after the other, in a browser or in a file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from contextvars import copy_context
from functools import partial

from markupsafe import Markup, escape

from trakdask.explorer.html import LIVE, STYLE, plain_message, render
from trakdask.explorer.questions import Questions
from trakdask.explorer.sections import PAGES
from trakdask.explorer.view import View

_FIELDS = {
    "targets": {"search", "targets_where"},
    "target": {"where", "k", "targets_where"},
    "sample": {"k", "where"},
    "corpus": {"where"},
}
"""The fields whose errors a page shows itself, most of them beside their form."""

_log = logging.getLogger(__name__)


def sections(questions: Questions, view: View) -> dict[str, Callable[[], str]]:
    """Return the HTML of each section of a page; nothing is computed before it is called."""
    is_there = {
        **dict.fromkeys(("helpful_words", "harmful_words"), questions.has_words),
        "credit": questions.has_credit,
        "confusion": questions.targets.has_confusion,
        "grade": questions.has_grade and questions.known_grade is None,
    }
    all_of_page = {html.__name__: partial(html, questions, view) for html in PAGES[view.page]}
    return {name: html for name, html in all_of_page.items() if is_there.get(name, True)}


def answer(html: Callable[[], str], shown: Iterable[str]) -> str:
    """Return the HTML of a section, or its error; "" if the page shows that error already."""
    try:
        return html()
    except Exception as err:
        message = plain_message(err)
        if escape(message) in "".join(shown):
            return ""
        if not isinstance(err, CancelledError):
            _log.warning("a section of the explorer failed", exc_info=True)
        return render("note", text=message, is_error=True)


def frame(view: View, name: str, body: str, *, busy: bool = False) -> str:
    """Return a section of a page around escaped HTML or, if busy, its progress."""
    return render("frame", view, name=name, body=Markup(body), busy=busy)


def page(questions: Questions, view: View, parts: Iterable[str]) -> str:
    """Return a page: links to all pages, sizes, messages, and its sections."""
    fields = _FIELDS.get(view.page, ())
    errors = {name: text for name, text in view.errors.items() if name not in fields}
    return render("page", questions, view, errors=errors, content=Markup("".join(parts)))


def document(questions: Questions, view: View) -> str:
    """Return the page of a view as a whole file, with the settings of its scores.

    What was computed for the page before is not computed again.
    """
    return copy_context().run(_document, questions, view)


def _document(questions: Questions, view: View) -> str:
    LIVE.set(False)
    bodies = {name: html() for name, html in sections(questions, view).items()}
    parts = [frame(view, name, body) for name, body in bodies.items() if body]
    body = Markup(page(questions, view, parts))
    return render("document", questions, view, body=body, style=Markup(STYLE))
