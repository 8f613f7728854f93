"""Pages: each is a list of sections, which ask one question and write its answer as HTML."""

from __future__ import annotations

import base64
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
from markupsafe import Markup

import trakdask as td
from trakdask.attribution.estimators import Absolute, Estimator, Rule
from trakdask.explorer.attributions import Attributions
from trakdask.explorer.computing import Abandoned
from trakdask.explorer.html import (
    count,
    document,
    number,
    plain_message,
    render,
    scaled,
    unit_of,
    value,
)
from trakdask.explorer.marks import KINDS
from trakdask.explorer.new_targets import MOST_BYTES
from trakdask.explorer.tables import ROWS, ConditionError
from trakdask.explorer.view import MeanTrace, View, damping_of, joined
from trakdask.files import Folder, location
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE

__all__ = ["Section", "answer", "as_csv", "frame", "page", "save_html", "saved_page", "sections"]

_MOST_ROWS = 60
_MOST_GROUPS = 24
_MOST_DUPLICATES = 100
_MOST_MARKS = 200
_MOST_TEXTS = 5
"""How many samples have their words coloured."""

_NO_GROUPS = "No column of the training samples has from 2 to 1,000 different values."
_NO_SAMPLE = "No training sample meets the condition."

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Parameters
    ----------
    title, help
        What it is called, and a sentence that says what it shows; or neither.
    html
        Computes what it shows, and returns it as escaped HTML.
    kind
        A class of its style: ``"half"`` for half of the width.
    """

    title: str
    help: str
    html: Callable[[], str]
    kind: str = ""


def sections(attributions: Attributions, view: View) -> list[Section]:
    """Return the sections of the page of a view; nothing is computed before their ``html()``."""
    return _PAGES[view.page](attributions, view)


def answer(section: Section, told: set[str]) -> str:
    """Return the HTML of a section, or what went wrong; "" if the page was told so already."""
    try:
        return section.html()
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


def frame(i: int, section: Section, body: str, *, busy: bool = False) -> str:
    """Return the i-th section of a page around escaped HTML or, if busy, its progress."""
    return render(
        "section", title=section.title, help=section.help, kind=section.kind, body=Markup(body),
        busy=busy, level=2 if i else 1,
    )  # fmt: skip


def page(attributions: Attributions, view: View, parts: Iterable[str]) -> str:
    """Return a page: links to all pages, what is explored, messages, and its sections."""
    pages = {"targets": "Targets", "corpus": "Training samples"}
    if attributions.maker is not None:
        pages["new"] = "New target"
    sizes = attributions.features.sizes
    n_new = len(attributions.target_samples.added)
    facts = [
        count(sizes[SAMPLE], "training sample"),
        count(attributions.targets.sizes[SAMPLE], "target") + (f" ({n_new} new)" if n_new else ""),
        count(sizes[CHECKPOINT], "checkpoint"),
        f"{count(sizes[PROJ_DIM], 'number')} per feature",
    ]
    messages = [
        f"One part of the address, {name}, was left out. {text}"
        for name, text in view.errors.items()
        if name not in _FIELDS[view.page]
    ]
    content = Markup("".join(parts))
    return render(
        "page", view=view, pages=pages, facts=", ".join(facts), messages=messages, sections=content
    )


def saved_page(attributions: Attributions, view: View, html: str) -> str:
    """Return a page that was shown as a file of its own: what it is of, and nothing to click."""
    preparation = attributions.questions.preparation
    damping = preparation.damping
    opened = f"absolute {damping.value:g}" if isinstance(damping, Absolute) else damping
    facts = {
        "Condition on training samples": view.where or "none",
        "Condition on targets": view.targets_where or "none",
        "Estimator": view.estimator or preparation.estimator,
        "Damping λ": view.damping
        or (f"{opened}" if isinstance(opened, (str, float, int)) else "one for each checkpoint"),
        "Checkpoints": ", ".join(view.checkpoints or attributions.questions.checkpoints),
        "Training samples": _source(attributions.features),
        "Targets": _source(attributions.targets),
    }
    return document(view, html, facts)


def _source(features: Any) -> str:
    return str(features.encoding.get("source", "in memory"))


def save_html(attributions: Attributions, path: str | os.PathLike[str], view: View) -> None:
    """Write one view to an HTML file; see :meth:`trakdask.explorer.Explorer.save_html`."""
    file = Path(location(path))
    if "://" in str(path) or file.is_dir():
        raise ValueError(
            f"expected a file on a disk of this machine, got {str(path)!r}; try 'view.html'"
        )
    parts = [frame(i, s, s.html()) for i, s in enumerate(sections(attributions, view))]
    html = saved_page(attributions, view, page(attributions, view, parts))
    Folder(str(file.parent)).write(file.name, html.encode())


# --------------------------------------------------------------------------- what pages share


def _settings(attributions: Attributions, view: View) -> dict[str, Any]:
    """Return what the form of estimator, λ and checkpoints offers."""
    preparation = attributions.questions.preparation
    estimators = {"": f"as opened ({preparation.estimator})"}
    estimators |= {name: name for name in get_args(Estimator)}
    if preparation.learning_rates is None:
        del estimators["tracin"]
    names = ("estimator", "damping", "k", "checkpoints")
    return {
        "estimators": estimators,
        "rules": (*get_args(Rule), "0.03", "absolute 1"),
        "checkpoints": attributions.questions.checkpoints,
        "are_changed": bool(view.to_pairs(set(vars(view)) - {*names}) or {*names} & {*view.errors}),
    }


def _checked(attributions: Attributions, view: View, field: str) -> View:
    """Return a view with what is wrong with its condition, for the form that it is typed in."""
    if field in view.errors or not (error := attributions.questions.condition_error(view)):
        return view
    return view.replace(errors={**view.errors, field: plain_message(error)})


def _columns(table: pd.DataFrame) -> dict[str, str]:
    """Return the columns that a condition can name."""
    return {str(name): str(name) for name in table if str(name).isidentifier()}


def _facts(row: pd.Series) -> list[dict[str, Any]]:
    return [
        {"name": name, "text": value(x), "condition": _equals(str(name), x)}
        for name, x in row.items()
    ]


def _equals(name: str, x: Any) -> str | None:
    """Return the condition that a column has a value; None for values without one."""
    x = getattr(x, "item", lambda: x)()
    if not name.isidentifier() or not isinstance(x, (bool, int, float, str)) or x != x:
        return None
    return f"{name} == {x!r}"


def _rows(table: pd.DataFrame) -> Iterable[pd.Series]:
    """Return the rows of a table, in which integers are still integers."""
    return (row for _, row in table.astype(object).iterrows())


def _sample_card(
    view: View, position: int, content: str, row: pd.Series, **text: str
) -> dict[str, Any]:
    return {
        "view": view.replace(page="sample", sample=position, first=0),
        "name": f"sample {position}", "label": f"Training sample {position}",
        "position": position, "content": Markup(content), "facts": _facts(row),
        "kind": "", "spread": "", **text,
    }  # fmt: skip


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _kinds(attributions: Attributions) -> Sequence[str]:
    """Return the marks that a sample may have here."""
    return () if attributions.marks is None else KINDS


def _kind(x: float) -> str:
    return "helpful" if x > 0 else "harmful"


def _share(x: float, largest: float) -> str:
    return f"{abs(x) / largest:.4f}" if np.isfinite(x) else "0"


def _histogram(name: str, counts: np.ndarray, edges: np.ndarray, unit: int) -> str:
    """Return bars whose heights are logarithms of counts between neighbouring edges."""
    ends = [number(edge / 10.0**unit).replace("-", "−", 1) for edge in edges]
    heights = np.log1p(counts)
    bars = [
        {"share": _share(height, heights.max()), "view": None, "is_marked": False,
         "label": f"{count(n, 'sample')} from {low} to {high}"}
        for n, height, low, high in zip(counts, heights, ends[:-1], ends[1:], strict=True)
    ]  # fmt: skip
    return render("histogram", name=name, unit=unit, bars=bars, low=ends[0], high=ends[-1])


def _groupings(attributions: Attributions, view: View) -> tuple[str, dict[str, str]]:
    """Return the column to group by, "" if none is fit for it, and all that are."""
    names = attributions.questions.groupings
    chosen = view.group_by if view.group_by in names else (names[0] if names else "")
    return chosen, {name: name for name in names}


# ------------------------------------------------------------------------ the table of targets


def _targets_page(attributions: Attributions, view: View) -> list[Section]:
    what = "Samples whose outputs are explained. Choose one to see what made it so."
    return [
        Section("Targets", what, lambda: _target_forms(attributions, view)),
        Section("", "", lambda: _target_table(attributions, view)),
    ]


def _target_forms(attributions: Attributions, view: View) -> str:
    columns = _columns(attributions.questions.targets.metadata)
    view = _checked(attributions, view, "targets_where")
    return render("target_forms", view=view, columns=columns)


def _target_table(attributions: Attributions, view: View) -> str:
    page = attributions.questions.targets.page(view)
    contents = attributions.target_samples.html(list(page.table.index), brief=True)
    has_content = any(contents)
    rows = [
        {
            "position": position,
            "view": view.replace(page="target", target=int(position), first=0),
            "is_new": position in attributions.target_samples.added,
            "is_image": content.startswith("<img"),
            "content": Markup(content) if has_content else None,
            "cells": [{"text": value(x), "is_number": _is_number(x)} for x in row],
        }
        for position, content, row in zip(
            page.table.index, contents, page.table.itertuples(index=False), strict=True
        )
    ]
    columns = [_heading(view, str(name)) for name in page.table]
    return render(
        "target_table", view=view, columns=columns, rows=rows, found=page.found, rows_of_page=ROWS
    )


def _heading(view: View, name: str) -> dict[str, Any]:
    is_sorted = view.sort == name
    ascending = not view.ascending if is_sorted else name not in ("loss", "disagreement")
    arrow = (" ↑" if view.ascending else " ↓") if is_sorted else ""
    return {
        "name": name,
        "text": name + arrow,
        "order": ("ascending" if view.ascending else "descending") if is_sorted else "none",
        "view": view.replace(sort=name, ascending=ascending, first=0),
    }


# ------------------------------------------------------------------------------- one target


def _target_page(attributions: Attributions, view: View) -> list[Section]:
    is_new = view.target in attributions.target_samples.added
    return [
        Section(
            f"Target {view.target}", "A new target, whose output is explained; it is kept in this "
            "tab only." if is_new else "The sample whose output is explained.",
            lambda: _target(attributions, view),
        ),
        Section(
            "Most helpful", "Training on these samples raised the output of the target most.",
            lambda: _ranked(attributions, view, largest=True), "half",
        ),
        Section(
            "Most harmful", "Training on these samples lowered the output of the target most.",
            lambda: _ranked(attributions, view, largest=False), "half",
        ),
        *_words_sections(attributions, view),
        Section(
            "Sums by group", "Scores of this target, added up over the training samples of a group."
            " Choose a group to see its samples only.", lambda: _groups(attributions, view), "half",
        ),
        Section(
            "Damping", "How λ was chosen: with the right λ, the scores of a sample add up to its "
            "output, so λ is one at which sums and outputs go together. Choose a bar to use its λ.",
            lambda: _damping(attributions, view), "half",
        ),
        Section(
            "All scores", "How many training samples have which score for this target.",
            lambda: _scores(attributions, view), "half",
        ),
    ]  # fmt: skip


def _target(attributions: Attributions, view: View) -> str:
    questions = attributions.questions
    row = questions.targets.row(view.target)
    (content,) = attributions.target_samples.html([view.target])
    neighbours = [("← Previous", view.target - 1), ("Next →", view.target + 1)]
    n_targets = attributions.targets.sizes[SAMPLE]
    return render(
        "target",
        view=_checked(attributions, view, "where"),
        neighbours=[(text, i) for text, i in neighbours if 0 <= i < n_targets],
        content=Markup(content),
        sentences=[],
        items=_facts(row),
        settings=_settings(attributions, view),
        columns=_columns(questions.metadata),
    )


def _ranked(attributions: Attributions, view: View, *, largest: bool) -> str:
    table = attributions.questions.top(view, largest=largest)
    if table.empty:
        return render("note", text=_NO_SAMPLE)
    unit = unit_of(attributions.questions.scores(view))
    contents = attributions.samples.html(table["sample"].tolist())
    cards = [
        _sample_card(
            view, int(row["sample"]), content, row.drop(["sample", "score", "spread"]),
            number=scaled(row["score"], unit), kind="helpful" if largest else "harmful",
            spread="" if np.isnan(row["spread"]) else scaled(row["spread"], unit, ""),
        )
        for row, content in zip(_rows(table), contents, strict=True)
    ]  # fmt: skip
    remark = render("spread") if table["spread"].notna().any() else ""
    kinds = _kinds(attributions)
    return render("ranked", view=view, items=cards, unit=unit, remark=remark, kinds=kinds)


def _words_sections(attributions: Attributions, view: View) -> list[Section]:
    """Return the sections of words, if tokens have features."""
    if not attributions.questions.has_words(view):
        return []
    return [
        Section(
            f"Words that {kind}", f"The words of the samples that {kind} most, coloured by their "
            "own scores, which add up to those of the samples.",
            partial(_words, attributions, view, largest=kind == "helped"), "half",
        )
        for kind in ("helped", "harmed")
    ]  # fmt: skip


def _words(attributions: Attributions, view: View, *, largest: bool) -> str:
    questions = attributions.questions
    top = questions.top(view.replace(k=min(view.k, _MOST_TEXTS)), largest=largest)
    positions = top["sample"].to_numpy()
    if not len(positions):
        return render("note", text=_NO_SAMPLE)
    scores, unit = questions.words(view, positions), unit_of(questions.scores(view))
    plot = td.plots.text(scores)
    titles = [
        f"sample {position}   {scaled(float(total), unit)}"
        for position, total in zip(positions, np.nansum(scores.values, axis=1), strict=True)
    ]
    rows = tuple((title, words) for title, (_, words) in zip(titles, plot.rows, strict=True))
    html: str = dataclasses.replace(plot, rows=rows, unit=unit)._repr_html_()
    return html


def _groups(attributions: Attributions, view: View) -> str:
    by, names = _groupings(attributions, view)
    if not by:
        return render("note", text=_NO_GROUPS)
    table = attributions.questions.groups(view.replace(group_by=by))
    half = _MOST_GROUPS // 2
    ends = table if len(table) <= _MOST_GROUPS else pd.concat([table[:half], table[-half:]])
    unit, largest = unit_of(attributions.questions.scores(view)), ends["score"].abs().max() or 1
    rows = [
        {
            "name": _group_link(view, by, row[by]), "kind": _kind(row["score"]),
            "number": scaled(row["score"], unit), "share": _share(row["score"], largest),
            "remark": count(row["samples"], "sample"),
        }
        for row in _rows(ends)
    ]  # fmt: skip
    left_out = len(table) - len(ends)
    return render("groups", view=view, by=by, names=names, rows=rows, unit=unit, left_out=left_out)


def _group_link(view: View, by: str, group: object) -> str:
    condition = _equals(by, group)
    if condition is None:
        return value(group)
    return render("link", view=view.replace(where=joined(view.where, condition)), text=value(group))


def _damping(attributions: Attributions, view: View) -> str:
    """Return λ of each checkpoint, and the curve it was chosen by, if there is one."""
    questions = attributions.questions
    chosen = questions.damping(view)
    if chosen is None:
        return render("note", text="This estimator has no gram matrix, and so no λ.")
    values = ", ".join(number(x) for x in chosen["damping"].values)
    relative, rule = float(chosen["relative"].values), chosen["rule"].values
    if view.damping and not np.isfinite(chosen["curve"].values).any():
        # The curve stays in sight when λ is set by hand.
        asked = damping_of(view.damping)
        relative = asked.value if isinstance(asked, MeanTrace) else np.nan
        chosen = questions.damping(view.replace(damping="")) or chosen
    text = (
        f"{number(relative)} tr(K)/n"
        if np.isfinite(relative)
        else f"{values}, in the squared units of the features"
    )
    curve = chosen["curve"].values
    if not np.isfinite(curve).any():
        remark = f"The rule was {rule}, which does not look at outputs, so there is no curve."
        return render("damping", text=text, bars=[], low="", high="", remark=remark)
    rho = chosen["relative_damping"].values
    marked = int(np.argmin(np.abs(np.log(rho / relative)))) if relative > 0 else -1
    largest = max(np.nanmax(curve), 0) or 1
    bars = [
        {
            "share": _share(max(c, 0), largest), "is_marked": i == marked,
            "label": f"λ = {number(r)} tr(K)/n: correlation {number(c)}",
            "view": view.replace(damping=f"{r:.4g} tr(K)/n"),
        }
        for i, (r, c) in enumerate(zip(rho, curve, strict=True))
    ]  # fmt: skip
    peak = number(float(chosen["peak"].values))
    return render(
        "damping", text=text, bars=bars,
        low=f"λ = {number(rho[0])} tr(K)/n", high=f"{number(rho[-1])} tr(K)/n",
        remark=f"Height: correlation of sums of scores with outputs, at most {peak}.",
    )  # fmt: skip


def _scores(attributions: Attributions, view: View) -> str:
    histogram = attributions.questions.score_histogram(view)
    if not len(histogram.counts):
        text = "This target has no scores: its features could not be computed."
        return render("note", text=text)
    unit = unit_of(attributions.questions.scores(view))
    return _histogram("score", histogram.counts, histogram.edges, unit)


# ------------------------------------------------------------------------- one training sample


def _sample_page(attributions: Attributions, view: View) -> list[Section]:
    return [
        Section(
            f"Training sample {view.sample}", "A sample that the model was trained on.",
            lambda: _sample(attributions, view),
        ),
        Section(
            "Targets it helped and harmed", "Targets whose output training on this sample raised "
            "or lowered most.", lambda: _targets_of_sample(attributions, view),
        ),
    ]  # fmt: skip


def _sample(attributions: Attributions, view: View) -> str:
    row = attributions.questions.sample(view)
    (content,) = attributions.samples.html([view.sample])
    return render(
        "sample",
        view=view,
        content=Markup(content),
        influence=number(float(row["self_influence"])),
        items=[{**item, "condition": None} for item in _facts(row.drop("self_influence"))],
        kinds=_kinds(attributions),
        settings=_settings(attributions, view),
    )


def _targets_of_sample(attributions: Attributions, view: View) -> str:
    table = attributions.questions.targets_of(view)
    if table.empty:
        text = "This sample has no scores: its features could not be computed."
        return render("note", text=text)
    contents = attributions.target_samples.html(list(table.index), brief=True)
    unit = unit_of(table["score"])
    cards = [
        {
            "view": view.replace(page="target", target=int(position), where=""),
            "name": f"target {position}", "label": "", "position": position,
            "number": scaled(row["score"], unit), "spread": "", "kind": _kind(row["score"]),
            "content": Markup(content),
            "facts": [{**item, "condition": None} for item in _facts(row.drop("score"))],
        }
        for position, row, content in zip(table.index, _rows(table), contents, strict=True)
    ]  # fmt: skip
    return render("ranked", view=view, items=cards, unit=unit, remark=", best first", kinds=())


# ------------------------------------------------------------------------ all training samples


def _corpus_page(attributions: Attributions, view: View) -> list[Section]:
    about_all = [
        Section(
            "Training samples", "All samples that the model was trained on.",
            lambda: _corpus(attributions, view),
        ),
        Section(
            "Groups and targets", "How much the samples of a group, together, raised the output of "
            "a target: sums over the group, averaged over the targets of a column.",
            lambda: _heat(attributions, view),
        ),
        Section(
            "Self-influence", "Samples that the model had to memorise come first; wrong labels are "
            "often among them.", lambda: _ranking(attributions, view),
        ),
        Section(
            "Distribution of self-influence", "How many samples have which self-influence. The "
            "axis is logarithmic, too.", lambda: _influences(attributions, view), "half",
        ),
        Section(
            "Duplicates", "Samples whose features point the same way, with a cosine above 0.9999: "
            "most often the same content.", lambda: _duplicates(attributions, view), "half",
        ),
    ]  # fmt: skip
    if attributions.marks is None:
        return about_all
    what = "Samples that people have marked, newest first, and the file that holds the marks."
    return [*about_all, Section("Marks", what, lambda: _marks(attributions, view))]


def _corpus(attributions: Attributions, view: View) -> str:
    return render(
        "corpus",
        view=_checked(attributions, view, "where"),
        settings=_settings(attributions, view),
        columns=_columns(attributions.questions.metadata),
    )


def _heat(attributions: Attributions, view: View) -> str:
    by, names = _groupings(attributions, view)
    if not by:
        return render("note", text=_NO_GROUPS)
    columns_by = attributions.questions.targets.groupings
    across = by if by in columns_by else (columns_by[0] if columns_by else "")
    heat = attributions.questions.heatmap(view.replace(group_by=by), across)
    across = str(heat.columns.name or "")
    strongest = heat.abs().max(axis=1).nlargest(_MOST_ROWS).index
    heat = heat.loc[heat.index.isin(strongest)] if len(heat) > _MOST_ROWS else heat
    unit, largest = unit_of(heat), float(np.nanmax(np.abs(heat.to_numpy()), initial=0.0)) or 1.0
    rows = [
        {
            "name": value(name),
            "cells": [
                {"kind": _kind(x), "share": _share(x, largest), "number": scaled(x, unit)}
                for x in row
            ],
        }
        for name, row in zip(heat.index, heat.to_numpy(), strict=True)
    ]
    what = f"columns: targets by {across}" if across else "columns: the first targets"
    return render(
        "heat", view=view, by=by, names=names, corner=f"{by} ↓  target {across} →", what=what,
        unit=unit, columns=[value(name) for name in heat.columns], rows=rows,
    )  # fmt: skip


def _ranking(attributions: Attributions, view: View) -> str:
    page = attributions.questions.ranking(view)
    unit = unit_of(attributions.questions.influences(view))
    contents = attributions.samples.html(list(page.table.index), brief=True)
    cards = [
        _sample_card(
            view, int(position), content, row.drop("self_influence"),
            number=number(row["self_influence"] / 10.0**unit),
        )
        for position, row, content in zip(
            page.table.index, _rows(page.table), contents, strict=True
        )
    ]  # fmt: skip
    return render(
        "ranking", view=view, items=cards, found=page.found, rows=ROWS, unit=unit,
        kinds=_kinds(attributions),
    )  # fmt: skip


def _influences(attributions: Attributions, view: View) -> str:
    histogram = attributions.questions.influence_histogram(view)
    if not len(histogram.counts):
        return render("note", text="No sample has a self-influence above 0.")
    unit = unit_of(attributions.questions.influences(view))
    return _histogram("self-influence", histogram.counts, histogram.edges, unit)


def _duplicates(attributions: Attributions, view: View) -> str:
    table = attributions.questions.duplicates(view)
    if table.empty:
        return render("note", text="No two samples have features that point the same way.")
    shown = table[:_MOST_DUPLICATES]
    return render(
        "duplicates", view=view, n_samples=len(table), n_groups=table["group"].nunique(),
        groups=[group.tolist() for _, group in shown.groupby("group")["sample"]],
        left_out=len(table) > len(shown),
    )  # fmt: skip


def _marks(attributions: Attributions, view: View) -> str:
    assert attributions.marks is not None
    table = attributions.marked().iloc[::-1]
    if table.empty:
        return render("note", text="Nobody has marked a sample yet.")
    csv = base64.b64encode(as_csv(attributions.marks.table()).encode()).decode()
    return render(
        "marks", view=view, rows=table[:_MOST_MARKS].to_dict("records"),
        left_out=len(table) > _MOST_MARKS, csv=csv, path=str(attributions.marks.path),
    )  # fmt: skip


def as_csv(table: pd.DataFrame) -> str:
    """Return a table as CSV in which spreadsheets find no formula: a ' comes before it."""
    text = table.select_dtypes(exclude=["number", "datetimetz"])
    safe = text.apply(lambda column: column.str.replace(r"^([=+\-@\t\r])", r"'\1", regex=True))
    return table.assign(**safe).to_csv(index=False)


# ------------------------------------------------------------------------------- a new target


def _new_page(attributions: Attributions, view: View) -> list[Section]:
    what = (
        "A text or image of your own. The model says what it makes of it, and its page shows why."
    )
    return [Section("New target", what, lambda: _new_target(attributions))]


def _new_target(attributions: Attributions) -> str:
    if attributions.maker is None:
        text = (
            "The model is not at hand: open the explorer with td.explore(..., model=model, "
            "preprocess=transform) or tokenizer=, or with trakdask explore --model."
        )
        return render("note", text=text)
    return render("new_target", maker=attributions.maker, most_bytes=MOST_BYTES)


_PAGES = {
    "targets": _targets_page,
    "target": _target_page,
    "sample": _sample_page,
    "corpus": _corpus_page,
    "new": _new_page,
}

_SETTINGS = ("estimator", "damping", "k", "checkpoints")
_FIELDS = {
    "targets": ("search", "targets_where", "filter_value"),
    "target": ("where", "filter_value", *_SETTINGS),
    "sample": _SETTINGS,
    "corpus": ("where", "filter_value", *_SETTINGS),
    "new": (),
}
"""The fields that a page has a form for, beside which their errors are shown."""
