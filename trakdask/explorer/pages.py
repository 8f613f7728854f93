"""Pages: each is a list of sections, which ask one question and write its answer as HTML."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from markupsafe import Markup

import trakdask as td
from trakdask.explorer.attributions import Attributions
from trakdask.explorer.computing import Abandoned
from trakdask.explorer.conditions import ConditionError, condition_mask
from trakdask.explorer.html import STYLE, number, plain_message, render, unit_of, value
from trakdask.explorer.maps import chosen_colour, colours, layers
from trakdask.explorer.marks import KINDS, Marks
from trakdask.explorer.questions import LEVEL
from trakdask.explorer.tables import ROWS, facets
from trakdask.explorer.view import LISTS, MeanTrace, View, damping_of
from trakdask.files import Folder, location
from trakdask.variables import SAMPLE

_MOST_ROWS = 60
_MOST_GROUPS = 24
_MOST_DUPLICATES = 100
_MOST_TEXTS = 5
"""How many samples have their words coloured."""

_FIELDS = {
    "targets": {"search", "targets_where", "filter_value"},
    "target": {"where", "filter_value", "k", "estimator", "damping"},
    "sample": {"k", "estimator", "damping"},
    "corpus": {"where", "filter_value", "estimator", "damping"},
    "map": {"where", "filter_value", "target", "estimator", "damping"},
    "new": set[str](),
    "marks": {"marks_where"},
}
"""The fields that a page has a form for, beside which their errors are shown."""

_CLICKED = re.compile(
    r'<(form|nav|button|details|x-live)\b.*?</\1>|<div class="(?:marks|forms)"[^>]*>\s*</div>',
    re.DOTALL,
)
"""Forms, buttons, links to other pages, and advice. Values are escaped, so that none matches."""

_LINK = re.compile(r"<a [^>]*>(.*?)</a>", re.DOTALL)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Section:
    """A part of a page: its name, by which templates know its title, and what writes its HTML."""

    name: str
    html: Callable[[], str]


def sections(attributions: Attributions, view: View) -> list[Section]:
    """Return the sections of the page of a view; nothing is computed before their ``html()``."""
    questions, absent = attributions.questions, set()
    if not questions.has_words(view):
        absent |= {"helpful_words", "harmful_words"}
    if not view.where:
        absent |= {"mapped"}
    if not view.order:
        absent |= {"distribution"}
    if not questions.has_credit(view):
        absent |= {"credit"}
    if not questions.has_grade(view):
        absent |= {"grade"}
    return [
        Section(name, partial(html, attributions, view))
        for name, html in _PAGES[view.page].items()
        if name not in absent
    ]


def answer(html: Callable[[], str], told: set[str]) -> str:
    """Return the HTML of a section, or what went wrong; "" if the page was told so already."""
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
    """Return a page: links to all pages, what is explored, messages, and its sections."""
    messages = [
        f"One part of the address, {name}, was left out. {text}"
        for name, text in view.errors.items()
        if name not in _FIELDS[view.page]
    ]
    content = Markup("".join(parts))
    return render("page", attributions, view, messages=messages, content=content)


def document(attributions: Attributions, view: View, html: str) -> str:
    """Return a page as a file of its own, with what it was made from and nothing to click."""
    html = _CLICKED.sub("", _CLICKED.sub("", html))  # then what forms and buttons have left empty
    body = Markup(_LINK.sub(r"<span>\1</span>", html))
    return render("document", attributions, view, body=body, style=Markup(STYLE))


def save_html(attributions: Attributions, path: str | os.PathLike[str], view: View) -> None:
    """Write one view to an HTML file; see :meth:`trakdask.explorer.Explorer.save_html`."""
    file = Path(location(path))
    if "://" in str(path) or file.is_dir():
        raise ValueError(
            f"expected a file on a disk of this machine, got {str(path)!r}; try 'view.html'"
        )
    content = sections(attributions, view)
    parts = [frame(view, i, section, section.html()) for i, section in enumerate(content)]
    html = document(attributions, view, page(attributions, view, parts))
    Folder(str(file.parent)).write(file.name, html.encode())


def _checked(
    view: View, field: str, table: pd.DataFrame, target: pd.DataFrame | None = None
) -> View:
    """Return a view with the error of its condition, for the form in which it is typed."""
    if field in view.errors:
        return view
    try:
        condition_mask(table[:1], getattr(view, field), target)
    except ConditionError as err:
        return view.replace(errors={**view.errors, field: plain_message(err)})
    return view


def _target_forms(attributions: Attributions, view: View) -> str:
    targets = attributions.questions.targets
    view = _checked(view, "targets_where", targets.whole)
    is_wrong = "targets_where" in view.errors
    counts, n_wrong = ([], 0) if is_wrong else (targets.facets(view), targets.wrong_count(view))
    return render("target_forms", attributions, view, facets=counts, n_wrong=n_wrong)


def _corpus(attributions: Attributions, view: View) -> str:
    view = _checked(view, "where", attributions.questions.first_row)
    counts = [] if "where" in view.errors else attributions.questions.facets(view)
    return render("corpus", attributions, view, facets=counts)


def _shown(table: pd.DataFrame, view: View) -> pd.DataFrame:
    """Return the rows of a table that are on the page of a view."""
    return table.iloc[view.first : view.first + ROWS]


def _grouped(attributions: Attributions, view: View) -> View:
    """Return a view that groups by some column, or by "" if none is fit for it."""
    names = attributions.questions.groupings
    return view if view.group_by in names else view.replace(group_by=(*names, "")[0])


# ------------------------------------------------------------------------ the table of targets


def _target_table(attributions: Attributions, view: View) -> str:
    targets = attributions.questions.targets
    selected, view = targets.selected(view), view.replace(sort=targets.sorted_by(view))
    table = _shown(selected, view)
    contents = attributions.target_samples.html(table.index.tolist(), brief=True)
    return render(
        "target_table", attributions, view, table=table, total=len(selected), contents=contents
    )


def _grade(attributions: Attributions, view: View) -> str:
    return render("grade", grade=attributions.questions.grade(view))


def _credit(attributions: Attributions, view: View) -> str:
    view = _grouped(attributions, view)
    if attributions.questions.targets.selected(view).empty:
        return render("note", text="No target meets the condition.")
    return _bars(attributions, view, attributions.questions.credit(view), is_share=True)


# ------------------------------------------------------------------------------- one target


def _neighbours(positions: np.ndarray, at: int, n: int) -> dict[str, int]:
    """Return which positions come before and after one in a list, and its place there.

    Whatever is not in the list is among all n.
    """
    if at not in positions:
        positions = np.arange(n)
    place = int(np.flatnonzero(positions == at)[0])
    around = {"previous": place - 1, "next": place + 1}
    found = {name: int(positions[i]) for name, i in around.items() if 0 <= i < len(positions)}
    return {**found, "place": place, "total": len(positions)}


def _target(attributions: Attributions, view: View) -> str:
    targets = attributions.questions.targets
    row = targets.row(view.target)
    (content,) = attributions.target_samples.html([view.target])
    is_wrong = "targets_where" in view.errors
    listed = targets.selected(view.replace(targets_where="") if is_wrong else view).index.to_numpy()
    return render(
        "target", attributions, view, row=row, content=content,
        reading=targets.readings([view.target])[0],
        around=_neighbours(listed, view.target, len(targets.whole)),
    )  # fmt: skip


def _filters(attributions: Attributions, view: View) -> str:
    questions = attributions.questions
    target = questions.targets.metadata.iloc[[view.target]]
    view = _checked(view, "where", questions.first_row.assign(score=0.0), target)
    return render("filters", attributions, view)


def _ranked(attributions: Attributions, view: View, *, largest: bool) -> str:
    questions = attributions.questions
    table, scores = questions.top(view, largest=largest), questions.scores(view)
    positions = table["sample"].tolist()
    return render(
        "ranked", attributions, view, table=table, contents=attributions.samples.html(positions),
        readings=questions.training.readings(positions), unit=unit_of(scores),
        kind="helpful" if largest else "harmful", level=_level(attributions, view),
        summary=_summary(table, scores, _grouped(attributions, view).group_by),
    )  # fmt: skip


def _level(attributions: Attributions, view: View) -> float:
    """Return which part of intervals contains the score; 0 where there are standard errors."""
    return LEVEL if attributions.questions.has_intervals(view) else 0.0


def _summary(table: pd.DataFrame, scores: np.ndarray, by: str) -> str:
    """Return in a sentence what the samples of a ranking have in common, and how much they are."""
    is_raising = bool(table["score"].max() > -table["score"].min())
    table = table[(table["score"] > 0) if is_raising else (table["score"] < 0)]
    whole = np.nansum(scores[scores > 0] if is_raising else scores[scores < 0])
    if table.empty:
        return ""
    n, share = len(table), 100 * table["score"].sum() / whole
    common = ""
    if n > 1 and by in table and (counts := table[by].value_counts()).iloc[0] >= n / 2:
        common = f" {counts.iloc[0]} of them have {by} {value(counts.index[0])}."
    verb = "raised" if is_raising else "lowered"
    subject = "This sample makes" if n == 1 else f"These {n} samples make"
    return f"{subject} up {share:.0f} % of all that {verb} its output.{common}"


def _words(attributions: Attributions, view: View, *, largest: bool) -> str:
    questions = attributions.questions
    top = questions.top(view.replace(k=min(view.k, _MOST_TEXTS)), largest=largest)
    if top.empty:
        return render("note", text="No training sample meets the condition.")
    position, unit = top["sample"].to_numpy(), unit_of(questions.scores(view))
    names = [f"sample {number}" for number in position]
    scores = questions.words(view, position).assign_coords(row=("sample", names))
    return dataclasses.replace(td.plots.text(scores, label="row"), unit=unit)._repr_html_()


def _groups(attributions: Attributions, view: View) -> str:
    view = _grouped(attributions, view)
    if not view.group_by:
        return render("group_form", attributions, view)
    return _bars(attributions, view, attributions.questions.groups(view))


def _bars(
    attributions: Attributions, view: View, table: pd.DataFrame, *, is_share: bool = False
) -> str:
    """Return sums of scores by group, or shares, as bars with intervals."""
    half = _MOST_GROUPS // 2
    ends = table if len(table) <= _MOST_GROUPS else pd.concat([table[:half], table[-half:]])
    return render(
        "groups", attributions, view, table=ends, left_out=len(table) - len(ends),
        unit=-2 if is_share else unit_of(attributions.questions.scores(view)), is_share=is_share,
        largest=float((ends["score"].abs() + ends["spread"].fillna(0)).max()),
    )  # fmt: skip


def _damping(attributions: Attributions, view: View) -> str:
    """Return λ of each checkpoint, and the curve it was chosen by, if there is one."""
    questions = attributions.questions
    chosen = questions.setting(view).damping
    if chosen is None:
        return render("note", text="This estimator has no gram matrix, and so no λ.")
    relative, curve = float(chosen["relative"].values), chosen
    if view.damping and not np.isfinite(chosen["curve"].values).any():
        # The curve stays in sight when λ is set by hand.
        asked = damping_of(view.damping)
        relative = asked.value if isinstance(asked, MeanTrace) else np.nan
        curve = questions.setting(view.replace(damping="")).damping or chosen
    values = ", ".join(number(x) for x in chosen["damping"].values)
    text = f"{values}, in the squared units of the features"
    if np.isfinite(relative):
        text = f"{number(relative)} tr(K)/n"
    rho = curve["relative_damping"].values
    marked = int(np.argmin(np.abs(np.log(rho / relative)))) if relative > 0 else -1
    return render("damping", attributions, view, text=text, chosen=curve, marked=marked)


def _histogram(attributions: Attributions, view: View, *, name: str = "") -> str:
    questions = attributions.questions
    name = name or _order(attributions, view, "ranking")
    bins = questions.histogram(view, name)
    unit = unit_of(questions.values(view, name))
    return render("histogram", view, name=name.replace("_", "-"), bins=bins, unit=unit)


# ------------------------------------------------------------------------- one training sample


def _sample(attributions: Attributions, view: View) -> str:
    questions = attributions.questions
    row = questions.sample(view)
    (content,) = attributions.samples.html([view.sample])
    n = attributions.features.sizes[SAMPLE]
    listed = samples_of(attributions, view, view.of) if view.of else np.arange(n)
    around = _neighbours(listed, view.sample, n)
    first = around["place"] // ROWS * ROWS if view.sample in listed else 0
    page = LISTS.get(view.of, "corpus")
    return render(
        "sample", attributions, view, row=row, content=content, around=around,
        reading=questions.training.readings([view.sample])[0],
        back=view.replace(page=page, first=0 if page == "target" else first),
    )  # fmt: skip


def _targets_of_sample(attributions: Attributions, view: View) -> str:
    targets = attributions.questions.targets
    table = attributions.questions.targets_of(view)
    positions = table.index.tolist()
    return render(
        "targets_of_sample", attributions, view, table=table, unit=unit_of(table["score"]),
        contents=attributions.target_samples.html(positions, brief=True),
        readings=targets.readings(positions), names=[*targets.metadata],
        level=_level(attributions, view),
    )  # fmt: skip


# ------------------------------------------------------------------------ all training samples


def _heat(attributions: Attributions, view: View) -> str:
    view = _grouped(attributions, view)
    if not view.group_by:
        return render("group_form", attributions, view)
    names = attributions.questions.targets.groupings
    across = view.group_by if view.group_by in names else (*names, "")[0]
    heat = attributions.questions.heatmap(view, across)
    strongest = heat.abs().max(axis=1).nlargest(_MOST_ROWS).index
    heat = heat[heat.index.isin(strongest)] if len(heat) > _MOST_ROWS else heat
    largest = float(np.nanmax(np.abs(heat.to_numpy()), initial=0.0))
    return render("heat", attributions, view, heat=heat, unit=unit_of(heat), largest=largest)


def _order(attributions: Attributions, view: View, section: str) -> str:
    """Return what a list of training samples is sorted by; "" for their order."""
    if section == "mapped":
        return "score" if chosen_colour(attributions, view) == "score" else ""
    return attributions.questions.training.loss if view.order == "loss" else view.order


def _ranking(attributions: Attributions, view: View, *, section: str) -> str:
    questions, name = attributions.questions, _order(attributions, view, section)
    ranking = questions.ranking(view, name)
    table = _shown(ranking, view)
    positions = table.index.tolist()
    return render(
        "ranking", attributions, view, table=table, total=len(ranking), name=name, section=section,
        contents=attributions.samples.html(positions, brief=True),
        readings=questions.training.readings(positions),
        unit=unit_of(questions.values(view, name)) if name else 0,
    )  # fmt: skip


def _duplicates(attributions: Attributions, view: View) -> str:
    table = attributions.questions.duplicates(view)
    groups = [group.tolist() for _, group in table[:_MOST_DUPLICATES].groupby("group")["sample"]]
    return render("duplicates", attributions, view, table=table, groups=groups)


# -------------------------------------------------------------------------------------- the map


def _map(attributions: Attributions, view: View) -> str:
    questions = attributions.questions
    view = _checked(view, "where", questions.first_row)
    selected = view.replace(where="") if "where" in view.errors else view
    return render(
        "map", attributions, view, layers=[*layers(attributions, selected)],
        colours=colours(attributions), colour=chosen_colour(attributions, view),
        checkpoint=questions.first_checkpoint(view), facets=questions.facets(selected),
        height=questions.map(view)["map_y"].max(), box=_box(selected.where),
    )  # fmt: skip


def _box(where: str) -> dict[str, tuple[float, float]]:
    """Return the rectangle that a condition was dragged to be, by its axes.

    Examples
    --------
    >>> _box("map_x >= 20.0 and map_x <= 35.5 and map_y >= 1 and map_y <= 9")
    {'x': (20.0, 35.5), 'y': (1.0, 9.0)}
    """
    box = {}
    for axis in "xy":
        ends = [re.search(rf"map_{axis} {sign}=? ([\d.]+)", where) for sign in "><"]
        low, high = (float(end[1]) if end else x for end, x in zip(ends, (0.0, 100.0), strict=True))
        box[axis] = low, high
    return box if "map_" in where else {}


def hovered(attributions: Attributions, position: int) -> str:
    """Return what is shown of a sample beside its point on the map."""
    (content,) = attributions.samples.html([position], brief=True)
    (reading,) = attributions.questions.training.readings([position])
    row = attributions.questions.metadata.iloc[position]
    return render("hovered", position, content, reading, row, attributions.questions.training.label)


# ------------------------------------------------------------------------------------- marks


def _all_marks(attributions: Attributions) -> pd.DataFrame:
    """Return all marks, newest first, with times that a condition can name."""
    table = attributions.questions.marked().iloc[::-1].reset_index(drop=True)
    return table.assign(time=table["time"].dt.tz_localize(None))


def _marked(attributions: Attributions, view: View) -> pd.DataFrame:
    """Return the marks that a view selects, newest first."""
    table = _all_marks(attributions)
    return table[condition_mask(table, view.marks_where)]


def _mark_forms(attributions: Attributions, view: View) -> str:
    if attributions.marks is None:
        return render("no_marks")
    table = _all_marks(attributions)
    view = _checked(view, "marks_where", table)
    is_wrong = "marks_where" in view.errors
    counts = [] if is_wrong else facets(table, ["mark", "who"], view.marks_where)
    kinds = [kind for kind in KINDS if (table["mark"] == kind).any()]
    lines = {kind: _line(attributions.marks, kind) for kind in kinds}
    return render("mark_forms", attributions, view, facets=counts, lines=lines)


def _line(marks: Marks, kind: str) -> str:
    """Return the line of Python that leaves out what is marked."""
    where = f"td.explorer.{marks.by('')!r}.where({kind!r})"
    if marks.store is None:
        return f"features.isel(sample=~{where}(features))"
    return f"td.drop({marks.store!r}, where={where})"


def _marks(attributions: Attributions, view: View) -> str:
    if attributions.marks is None:
        return ""
    marked = _marked(attributions, view)
    table = _shown(marked, view)
    contents = attributions.samples.html(table["position"].tolist(), brief=True)
    return render("marks", attributions, view, table=table, total=len(marked), contents=contents)


def samples_of(attributions: Attributions, view: View, name: str) -> np.ndarray:
    """Return the positions of the training samples that a section is about.

    They are in the order of the section.

    Raises
    ------
    ValueError
        If this is no such section.
    """
    questions = attributions.questions
    match name:
        case "helpful" | "harmful":
            return questions.top(view, largest=name == "helpful")["sample"].to_numpy()
        case "ranking" | "mapped":
            ranking = questions.ranking(view, _order(attributions, view, name))
            return ranking.index.to_numpy()
        case "duplicates":
            return questions.duplicates(view)["sample"].to_numpy()
        case "marked":
            return _marked(attributions, view)["position"].unique()
    raise ValueError(f"There are no samples to mark in {name!r:.60}.")


def marked_at_once(attributions: Attributions, view: View, name: str) -> np.ndarray:
    """Return the samples that a button below a section marks: all but the first of duplicates."""
    if name == "duplicates":
        table = attributions.questions.duplicates(view)
        return table["sample"][table["group"].duplicated()].to_numpy()
    return samples_of(attributions, view, name)


_PAGES: dict[str, dict[str, Callable[[Attributions, View], str]]] = {
    "targets": {
        "targets": _target_forms,
        "table": _target_table,
        "grade": _grade,
        "credit": _credit,
    },
    "target": {
        "target": _target,
        "filters": _filters,
        "helpful": partial(_ranked, largest=True),
        "harmful": partial(_ranked, largest=False),
        "helpful_words": partial(_words, largest=True),
        "harmful_words": partial(_words, largest=False),
        "groups": _groups,
        "damping": _damping,
        "scores": partial(_histogram, name="score"),
    },
    "sample": {"sample": _sample, "targets_of_sample": _targets_of_sample},
    "corpus": {
        "corpus": _corpus,
        "ranking": partial(_ranking, section="ranking"),
        "distribution": _histogram,
        "duplicates": _duplicates,
        "heat": _heat,
    },
    "map": {"map": _map, "mapped": partial(_ranking, section="mapped")},
    "new": {"new": partial(render, "new_target")},
    "marks": {"marks": _mark_forms, "marked": _marks},
}
