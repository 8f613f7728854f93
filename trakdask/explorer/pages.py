"""Pages: lists of sections. A section asks one question and writes the answer as HTML."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup

from trakdask.explorer import target_pages as targets
from trakdask.explorer import training_pages as training
from trakdask.explorer.attributions import Attributions
from trakdask.explorer.computing import Abandoned
from trakdask.explorer.conditions import ConditionError
from trakdask.explorer.html import STYLE, nothing_to_click, plain_message, render
from trakdask.explorer.view import View
from trakdask.files import Folder, location

_FIELDS = {
    "targets": {"search", "targets_where"},
    "target": {"where", "k"},
    "sample": {"k"},
    "corpus": {"where"},
}
"""The fields that a page has a form for, beside which their errors are shown."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Section:
    """A part of a page: its name, by which templates know its title, and its HTML as a function."""

    name: str
    html: Callable[[], str]


def sections(attributions: Attributions, view: View) -> list[Section]:
    """Return the sections of the page of a view; nothing is computed before their ``html()``."""
    questions = attributions.questions
    is_there = {
        **dict.fromkeys(("helpful_words", "harmful_words"), questions.has_words),
        "credit": questions.has_credit,
        "confusion": questions.targets.label in questions.targets.groupings,
        "grade": questions.has_grade,
        "graded": questions.has_grade and questions.known_grade is None,
    }
    return [
        Section(name, partial(html, attributions, view))
        for name, html in _PAGES[view.page].items()
        if is_there.get(name, True)
    ]


def answer(html: Callable[[], str], told: set[str]) -> str:
    """Return the HTML of a section, or its error; "" if the page shows that error already."""
    try:
        return html()
    except Abandoned:
        raise
    except ConditionError:
        return render("note", text="Correct the condition to see this.")
    except Exception as err:
        message = plain_message(err)
        if message in told:
            return ""
        told.add(message)
        _log.warning("a section of the explorer failed", exc_info=True)
        return render("error", text=message)


def frame(view: View, i: int, section: Section, body: str, *, busy: bool = False) -> str:
    """Return the i-th section of a page around escaped HTML or, if busy, its progress."""
    level = 2 if i else 1
    return render("frame", view, name=section.name, body=Markup(body), busy=busy, level=level)


def page(attributions: Attributions, view: View, parts: Iterable[str]) -> str:
    """Return a page: links to all pages, sizes, messages, and its sections."""
    messages = [
        f"One part of the address, {name}, was left out. {text}"
        for name, text in view.errors.items()
        if name not in _FIELDS.get(view.page, ())
    ]
    content = Markup("".join(parts))
    return render("page", attributions, view, messages=messages, content=content)


def document(attributions: Attributions, view: View) -> str:
    """Return the page of a view as a whole file, with the settings of its scores.

    What was computed for the page before is not computed again.
    """
    content = sections(attributions, view)
    with nothing_to_click():
        bodies = [section.html() for section in content]
        parts = [frame(view, i, content[i], body) for i, body in enumerate(bodies) if body]
        body = Markup(page(attributions, view, parts))
        return render("document", attributions, view, body=body, style=Markup(STYLE))


def save_html(attributions: Attributions, path: str | os.PathLike[str], view: View) -> None:
    """Write one view to an HTML file; see :meth:`trakdask.explorer.Explorer.save_html`."""
    folder, _, name = location(path).rpartition("/")
    if os.path.isdir(f"{folder}/{name}"):
        raise ValueError(f"expected a file, got the folder {str(path)!r}; try 'view.html'")
    Folder.at(folder or "/").write(name, document(attributions, view).encode())


_PAGES: dict[str, dict[str, Callable[[Attributions, View], str]]] = {
    "targets": {
        "targets": targets.forms,
        "table": targets.table,
        "grade": targets.grade,
        "confusion": targets.confusion,
        "credit": targets.credit,
    },
    "target": {
        "target": targets.target,
        "filters": targets.filters,
        "story": targets.story,
        "helpful": partial(targets.ranked, largest=True),
        "harmful": partial(targets.ranked, largest=False),
        "helpful_words": partial(targets.words, largest=True),
        "harmful_words": partial(targets.words, largest=False),
        "groups": targets.groups,
        "graded": targets.graded,
    },
    "sample": {
        "sample": training.sample,
        "targets_of_sample": training.targets_of_sample,
        "alike": training.alike,
        "graded": targets.graded,
    },
    "corpus": {
        "corpus": training.forms,
        "ranking": training.ranking,
        "duplicates": training.duplicates,
        "graded": targets.graded,
    },
    "new": {"new": partial(render, "new_target")},
    "marks": {"marks": training.mark_lines, "marked": training.mark_table},
}
