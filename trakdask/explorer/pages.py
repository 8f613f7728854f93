"""Pages: their sections one after the other, in a browser or in a file.

A section is a macro of the templates, which asks its question. Where that takes more, a function of
its name asks, and gives the macro the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import pandas as pd
from markupsafe import Markup, escape

import trakdask as td
from trakdask.explorer.html import LIVE, STYLE, count, plain_message, render, value
from trakdask.explorer.marks import KINDS
from trakdask.explorer.questions import Questions
from trakdask.explorer.view import View, condition_mask
from trakdask.plots.figures import decimals

_FIELDS = {
    "targets": {"search", "targets_where"},
    "target": {"where", "k", "targets_where"},
    "sample": {"k", "where"},
    "corpus": {"where"},
}
"""The fields whose errors a page shows itself, most of them beside their form."""

_MOST_GROUPS = 24
_MOST_TEXTS = 5
"""How many samples have their words coloured."""

_log = logging.getLogger(__name__)


def sections(questions: Questions, view: View) -> dict[str, Callable[[], str]]:
    """Return the HTML of each section of a page; nothing is computed before it is called."""
    is_there = {
        **dict.fromkeys(("helpful_words", "harmful_words"), questions.has_words),
        "credit": questions.has_credit,
        "confusion": questions.targets.has_confusion,
        "grade": questions.has_grade and questions.known_grade is None,
    }
    return {
        name: partial(_ASKING.get(name, partial(render, name)), questions, view)
        for name in PAGES[view.page]
        if is_there.get(name, True)
    }


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
    return render("page", questions, view, fields=fields, content=Markup("".join(parts)))


def document(questions: Questions, view: View) -> str:
    """Return the page of a view as a whole file, with the settings of its scores.

    What was computed for the page before is not computed again.
    """
    was_live = LIVE.set(False)
    try:
        bodies = {name: html() for name, html in sections(questions, view).items()}
        parts = [frame(view, name, body) for name, body in bodies.items() if body]
        body = Markup(page(questions, view, parts))
        return render("document", questions, view, body=body, style=Markup(STYLE))
    finally:
        LIVE.reset(was_live)


def checked(
    view: View, field: str, table: pd.DataFrame, target: pd.DataFrame | None = None
) -> View:
    """Return a view with the error of its condition, for the form in which it is typed."""
    try:
        # One row: whether the names are known does not depend on the others.
        condition_mask(table[:1], getattr(view, field), target)
    except ValueError as err:
        return view.replace(errors={**view.errors, field: plain_message(err)})
    return view


def _one(
    name: str, questions: Questions, view: View, row: pd.Series[Any], table: Callable[[], Any]
) -> str:
    """Return one sample, whose row has what is said about it, with its place in a list.

    A sample has its place among all samples if it is not in the table that lists it, or if there is
    no such table, with the reason.
    """
    side, problem = questions.targets if name == "target" else questions.training, ""
    # The order of all samples, unless the list is there, and has this one.
    listed = side.metadata.index
    try:
        found = table().index
        listed = found if row.name in found else listed
    except ValueError as err:
        problem = render("note", text=plain_message(err), is_error=True)
    (card,) = side.cards(row.to_frame().T)
    return problem + render(name, questions, view, card=card, listed=listed)


# --------------------------------------------------------------------------------- all targets


def targets(questions: Questions, view: View) -> str:
    """Return the search, the condition and the values by which targets can be filtered."""
    side = questions.targets
    view = checked(view, "targets_where", side.whole)
    is_wrong = "targets_where" in view.errors
    facets, n_wrong = ({}, 0) if is_wrong else (side.facets(view), side.wrong_count(view))
    return render("targets", questions, view, facets=facets, n_wrong=n_wrong)


def credit(questions: Questions, view: View) -> str:
    """Return what each group of training samples did to the loss of these targets, or its share."""
    view = questions.grouped(view)
    if questions.targets.selected(view).empty:
        return render("note", text="No target meets the condition.")
    found = questions.credit(view)
    return _bars(questions, view, found, "their mean loss" if "sum" in found else "")


# --------------------------------------------------------------------------------- one target


def target(questions: Questions, view: View) -> str:
    """Return one target, with links to the targets before and after it."""
    side = questions.targets
    return _one("target", questions, view, side.row(view.target), lambda: side.selected(view))


def filters(questions: Questions, view: View) -> str:
    """Return the forms that say which training samples are ranked, and how."""
    names = questions.first_row.assign(score=0.0)
    view = checked(view, "where", names, questions.targets.one(view.target))
    return render("filters", questions, view, names)


def story(questions: Questions, view: View) -> str:
    """Return in words what the samples that helped and harmed a target most have in common."""
    scores, by, sentences = questions.scores(view), questions.grouped(view).group_by, []
    for sign, verb, effect in ((1, "helped", "raised"), (-1, "harmed", "lowered")):
        # 1. Those that did so: the list of a small store may have others at its end.
        table = questions.listed(view, "helpful" if sign > 0 else "harmful")
        table = table[sign * table["score"] > 0]
        if table.empty:
            continue
        # 2. Their share in all that did so, and the value that half of them or more have.
        n, share = len(table), 100 * table["score"].sum() / scores[sign * scores > 0].sum()
        common = ""
        if n > 1 and by in table and (counts := table[by].value_counts()).iloc[0] >= n / 2:
            common = f"; {counts.iloc[0]} of them have {by} {value(counts.index[0])}"
        most = f"{n} samples that {verb} most make" if n > 1 else f"sample that {verb} most makes"
        sentences.append(f"The {most} up {share:.0f} % of all that {effect} the output{common}.")
    return render("story", sentences=sentences)


def words(questions: Questions, view: View, kind: str) -> str:
    """Return the words of some samples that helped or harmed, coloured by their scores."""
    top = questions.listed(view.replace(k=min(view.k, _MOST_TEXTS)), kind)
    if top.empty:
        return render("note", text="No training sample meets the condition.")
    names = [f"sample {number}" for number in top.index]
    scores = questions.words(view, top.index.to_numpy()).assign_coords(row=("sample", names))
    return td.plots.text(scores, label="row")._repr_html_()


def groups(questions: Questions, view: View) -> str:
    """Return what each group of training samples did to a target: its effect, or its sum."""
    view = questions.grouped(view)
    if not view.group_by:
        return render("group_form", questions, view)
    found = questions.groups(view)
    if found.empty:
        return render("note", text="No training sample meets the condition.")
    is_margin = str(questions.features.attrs.get("loss_kind")).endswith("cross-entropy")
    what = "the right answer's margin" if is_margin else "the output"
    return _bars(questions, view, found, what if "sum" in found else "")


def _bars(questions: Questions, view: View, table: pd.DataFrame, what: str) -> str:
    """Return what groups did, as bars with intervals.

    They are effects on something, which ``what`` says in words. Without it these are sums of
    scores, or of many targets shares.
    """
    by, sentences = view.group_by, []
    # 1. In words the effects of the groups at both ends, and how many are of unknown sign.
    is_sure = table["score"].abs() > table["spread"]
    for sign, way in ((1, "lower"), (-1, "higher")):
        found = table[is_sure & (sign * table["score"] > 0)]
        if found.empty or not what:
            continue
        row = found.iloc[int((sign * found["score"]).argmax())]
        effect, half = abs(row["score"]), row["spread"]
        digits = decimals(half, digits=2)
        low, middle, high = (f"{x:,.{digits}f}" for x in (effect - half, effect, effect + half))
        name = f"{by} {value(row[by])}"
        sentences.append(f"Without {name}, {what} would be {middle} {way} ({low} to {high}).")
    unsure = table.loc[~is_sure & table["score"].notna(), by]
    if what and len(unsure):
        one = f"effect of {by} {value(unsure.iloc[0])}"
        name = one if len(unsure) == 1 else f"effects of {count(len(unsure), 'group')}"
        sentences.append(f"The {name} cannot be told from zero.")
    # 2. Bars of the first and the last groups.
    half = _MOST_GROUPS // 2
    ends = table if len(table) <= _MOST_GROUPS else pd.concat([table[:half], table[-half:]])
    return render("groups", questions, view, ends, len(table) - len(ends), what, sentences)


# ---------------------------------------------------------------------------- training samples


def sample(questions: Questions, view: View) -> str:
    """Return one training sample, with links to the samples before and after it in its list."""
    row = questions.sample(view)
    return _one("sample", questions, view, row, lambda: questions.listed(view, view.of))


def corpus(questions: Questions, view: View) -> str:
    """Return the condition and the values by which training samples can be filtered."""
    view = checked(view, "where", questions.first_row)
    facets = {} if "where" in view.errors else questions.facets(view)
    return render("filters", questions, view, questions.first_row, facets)


def marks(questions: Questions, view: View) -> str:
    """Return lines of Python that leave out marked samples."""
    kept, found, lines = questions.marks, questions.marked()["mark"], {}
    for kind in KINDS:
        if kept is None or not (found == kind).any():
            continue
        where = f"td.explorer.{kept!r}.where({kind!r})"
        lines[kind] = f"td.drop({kept.store!r}, where={where})"
        if kept.store is None:
            lines[kind] = f"features.isel(sample=~{where}(features))"
    return render("marks", questions, lines=lines)


_ASKING: dict[str, Callable[..., str]] = {
    **{f.__name__: f for f in (targets, credit, target, filters, story, groups)},
    **{f.__name__: f for f in (sample, corpus, marks)},
    "helpful_words": partial(words, kind="helpful"),
    "harmful_words": partial(words, kind="harmful"),
}

PAGES = {
    "targets": ("targets", "target_table", "confusion", "credit", "grade"),
    "target": (
        *("target", "filters", "story", "helpful", "harmful", "helpful_words", "harmful_words"),
        *("groups", "grade"),
    ),
    "sample": ("sample", "targets_of_sample", "alike", "grade"),
    "corpus": ("corpus", "ranking", "duplicates", "grade"),
    "new": ("new",),
    "marks": ("marks", "marked"),
}
"""The sections of each page."""
