"""Sections of pages: each asks its question and writes the answer as HTML."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd

import trakdask as td
from trakdask.explorer.conditions import condition_mask
from trakdask.explorer.html import count, plain_message, render, value
from trakdask.explorer.marks import KINDS
from trakdask.explorer.questions import Questions
from trakdask.explorer.view import LISTS, ROWS, View
from trakdask.plots.figures import decimals

_MOST_DUPLICATES, _MOST_GROUPS = 100, 24

_MOST_TEXTS = 5
"""How many samples have their words coloured."""


def checked(
    view: View, field: str, table: pd.DataFrame, target: pd.DataFrame | None = None
) -> View:
    """Return a view with the error of its condition, for the form in which it is typed."""
    try:
        condition_mask(table[:1], getattr(view, field), target)
    except ValueError as err:
        return view.replace(errors={**view.errors, field: plain_message(err)})
    return view


def _one(
    name: str, questions: Questions, view: View, row: pd.Series[Any], table: Callable[[], Any]
) -> str:
    """Return one sample, whose row has what is said about it, with the samples around it in a list.

    A sample has its place among all samples if it is not in the table that lists it, or if there is
    no such table, with the reason.
    """
    side = questions.targets if name == "target" else questions.training
    at, page, problem = getattr(view, name), LISTS.get(view.of, "corpus"), ""
    listed: Any = ()
    try:
        listed = table().index
    except ValueError as err:
        problem = render("note", text=plain_message(err), is_error=True)
    listed = listed if at in listed else side.metadata.index
    place = listed.get_loc(at)
    around = {
        "text": f"{place + 1:,} of {len(listed):,}",
        "previous": view.replace(**{name: int(listed[place - 1])}) if place else None,
        "next": view.replace(**{name: int(listed[place + 1])}) if place + 1 < len(listed) else None,
    }
    first = 0 if page == "target" else place // ROWS * ROWS
    (card,) = side.cards(row.to_frame(at).T)
    back = view.replace(page=page, first=first)
    return problem + render(name, questions, view, card=card, around=around, back=back)


# --------------------------------------------------------------------------------- all targets


def targets(questions: Questions, view: View) -> str:
    """Return the search, the condition and the values by which targets can be filtered."""
    side = questions.targets
    view = checked(view, "targets_where", side.whole)
    is_wrong = "targets_where" in view.errors
    facets, n_wrong = ({}, 0) if is_wrong else (side.facets(view), side.wrong_count(view))
    return render("targets", questions, view, facets=facets, n_wrong=n_wrong)


def table(questions: Questions, view: View) -> str:
    """Return the table of the targets that a view selects."""
    side, found = questions.targets, questions.targets.selected(view)
    view = view.replace(sort=side.by(view.sort)).within(found)
    return render("target_table", questions, view, table=found)


def confusion(questions: Questions, view: View) -> str:
    """Return how often which class is predicted for which label."""
    side = questions.targets
    return render("confusion", view, table=side.confusion(view), label=side.label)


def grade(questions: Questions, view: View) -> str:
    """Compute the grade, last on its page, whose head then has it; return nothing."""
    questions.grade()
    return ""


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
    return _one("target", questions, view, side.row(view.target), partial(side.selected, view))


def filters(questions: Questions, view: View) -> str:
    """Return the forms that say which training samples are ranked, and how."""
    names = questions.first_row.assign(score=0.0)
    view = checked(view, "where", names, questions.targets.one(view.target))
    return render("filters", questions, view, names)


def helpful(questions: Questions, view: View, kind: str = "helpful") -> str:
    """Return the training samples that helped a target most, or harmed it."""
    table, digits = questions.listed(view, kind), decimals(questions.scores(view))
    how = {"of": kind, "number": "score", "digits": digits, "brief": False}
    return render("cards", questions, view, table, **how)


def harmful(questions: Questions, view: View) -> str:
    """Return the training samples that harmed a target most."""
    return helpful(questions, view, "harmful")


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


def helpful_words(questions: Questions, view: View, kind: str = "helpful") -> str:
    """Return the words of some of these samples, coloured by their scores."""
    top = questions.listed(view.replace(k=min(view.k, _MOST_TEXTS)), kind)
    if top.empty:
        return render("note", text="No training sample meets the condition.")
    names = [f"sample {number}" for number in top.index]
    scores = questions.words(view, top.index.to_numpy()).assign_coords(row=("sample", names))
    return td.plots.text(scores, label="row")._repr_html_()


def harmful_words(questions: Questions, view: View) -> str:
    """Return the words of some of the samples that harmed a target most."""
    return helpful_words(questions, view, "harmful")


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
    half = _MOST_GROUPS // 2
    ends = table if len(table) <= _MOST_GROUPS else pd.concat([table[:half], table[-half:]])
    # An effect on the loss harmed where it is positive.
    sign = -1 if what and view.page == "targets" else 1
    times = 100 if not what and view.page == "targets" else 1  # shares are in per cent
    return render(
        "groups", questions, view, table=ends, left_out=len(table) - len(ends), sign=sign,
        times=times, digits=decimals(times * table["score"]), what=what,
        sentences=_sentences(table, view.group_by, what) if what else [],
        largest=float((ends["score"].abs() + ends["spread"].fillna(0)).max()),
    )  # fmt: skip


def _sentences(table: pd.DataFrame, by: str, what: str) -> list[str]:
    """Return in words the effects of the groups at both ends, and how many are of unknown sign."""
    is_sure, sentences = table["score"].abs() > table["spread"], []
    for sign, way in ((1, "lower"), (-1, "higher")):
        found = table[is_sure & (sign * table["score"] > 0)]
        if found.empty:
            continue
        row = found.iloc[int((sign * found["score"]).argmax())]
        effect, half = abs(row["score"]), row["spread"]
        digits = decimals(half, digits=2)
        low, middle, high = (f"{x:,.{digits}f}" for x in (effect - half, effect, effect + half))
        name = f"{by} {value(row[by])}"
        sentences.append(f"Without {name}, {what} would be {middle} {way} ({low} to {high}).")
    unsure = table.loc[~is_sure & table["score"].notna(), by]
    if len(unsure):
        effects = f"effects of {count(len(unsure), 'group')}"
        one = f"effect of {by} {value(unsure.iloc[0])}"
        name = one if len(unsure) == 1 else effects
        sentences.append(f"The {name} cannot be told from zero.")
    return sentences


# ---------------------------------------------------------------------------- training samples


def sample(questions: Questions, view: View) -> str:
    """Return one training sample, with links to the samples before and after it in its list."""
    listed = partial(questions.listed, view, view.of)
    return _one("sample", questions, view, questions.sample(view), listed)


def targets_of_sample(questions: Questions, view: View) -> str:
    """Return the targets that a training sample helped and harmed most."""
    table = questions.targets_of(view)
    empty = "This sample has no scores: its features could not be computed."
    how = {"number": "score", "digits": decimals(table["score"]), "empty": empty}
    return render("cards", questions, view, table, "target", **how)


def alike(questions: Questions, view: View) -> str:
    """Return the training samples whose features are most like those of one."""
    return render("cards", questions, view, questions.alike(view), number="cosine")


def corpus(questions: Questions, view: View) -> str:
    """Return the condition and the values by which training samples can be filtered."""
    view = checked(view, "where", questions.first_row)
    facets = {} if "where" in view.errors else questions.facets(view)
    return render("filters", questions, view, questions.first_row, facets)


def ranking(questions: Questions, view: View) -> str:
    """Return the training samples that a view selects, in its order."""
    table, name = questions.ranking(view), questions.training.by(view.order)
    return render("ranking", questions, view.within(table), table=table, name=name)


def duplicates(questions: Questions, view: View) -> str:
    """Return groups of samples whose features point the same way."""
    table = questions.duplicates()
    groups = [group.tolist() for _, group in table[:_MOST_DUPLICATES].groupby("group")["sample"]]
    return render("duplicates", questions, view, table=table, groups=groups)


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


def marked(questions: Questions, view: View) -> str:
    """Return the table of marks."""
    table = questions.marked()
    return render("marked", questions, view.within(table), table=table)


def new(questions: Questions, view: View) -> str:
    """Return the form for a text or an image of somebody's own."""
    return render("new_target", questions)


PAGES: dict[str, tuple[Callable[[Questions, View], str], ...]] = {
    "targets": (targets, table, confusion, credit, grade),
    "target": (
        *(target, filters, story, helpful, harmful, helpful_words, harmful_words, groups, grade),
    ),
    "sample": (sample, targets_of_sample, alike, grade),
    "corpus": (corpus, ranking, duplicates, grade),
    "new": (new,),
    "marks": (marks, marked),
}
"""The sections of each page, which have their names."""
