"""The training samples as a whole: self-influence, groups against targets, duplicates."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import pandas as pd

from trakdask.explorer.pages.controls import facts, filter_form, mark_buttons, settings_form, word
from trakdask.explorer.pages.html import (
    form,
    heat_table,
    histogram,
    link,
    note,
    number,
    option_field,
    pager,
    unit_of,
)
from trakdask.explorer.pages.one_target import groups_of
from trakdask.explorer.pages.section import Section
from trakdask.explorer.state import View
from trakdask.explorer.target_table import ROWS

if TYPE_CHECKING:
    from trakdask.explorer.explorer import Explorer

__all__ = ["sections"]

_MOST_ROWS = 60
_MOST_DUPLICATES = 100


def sections(explorer: Explorer, view: View) -> list[Section]:
    """Return what can be asked of all training samples."""
    return [
        Section(
            "Training samples", "How scores are made, and which samples are ranked.",
            lambda: _forms(explorer, view),
        ),
        Section(
            "Groups and targets", "How much the samples of a group, together, raised the output of "
            "a target: sums over the group, averaged over the targets of a column.",
            lambda: _heatmap(explorer, view),
        ),
        Section(
            "Self-influence", "Samples that the model had to memorise come first; wrong labels are "
            "often among them.", lambda: _ranking(explorer, view),
        ),
        Section(
            "Distribution of self-influence", "How many samples have which self-influence.",
            lambda: _histogram(explorer, view), "half",
        ),
        Section(
            "Duplicates", "Samples whose features point the same way, with a cosine above 0.9999: "
            "most often the same content.", lambda: _duplicates(explorer, view), "half",
        ),
    ]  # fmt: skip


def _forms(explorer: Explorer, view: View) -> str:
    forms = settings_form(explorer, view)
    forms += filter_form(view, explorer.questions.metadata, "where")
    return f'<div class="forms">{forms}</div>'


def _heatmap(explorer: Explorer, view: View) -> str:
    by, names = groups_of(explorer, view)
    if not by:
        return note("No coord of the training samples has from 2 to 1,000 different values.")
    choice = form(
        view, option_field("group_by", by, "Group by", names), ["group_by"], button="Show"
    )
    columns_by = explorer.questions.targets.groupings
    across = by if by in columns_by else (columns_by[0] if columns_by else "")
    heat = explorer.questions.heatmap(view.replace(group_by=by), across)
    across = str(heat.columns.name or "")
    strongest = heat.abs().max(axis=1).sort_values(ascending=False).index[:_MOST_ROWS]
    shown = heat.loc[heat.index.isin(strongest)]
    unit = unit_of(shown.to_numpy())
    left_out = len(heat) - len(shown)
    what = f"targets by {across}" if across else "the first targets"
    more = f" The {_MOST_ROWS} groups with the largest sums." if left_out else ""
    corner = f"{by} ↓  target {across} →"
    return (
        choice + f'<p class="note">sum of {word("score")} × 10<sup>{-unit}</sup>; columns: '
        f"{escape(what)}.{more}</p>" + heat_table(shown, unit, corner)
    )


def _ranking(explorer: Explorer, view: View) -> str:
    page = explorer.questions.ranking(view)
    table = page.table
    contents = explorer.samples_html(list(table.index), brief=True)
    cards = "".join(
        _card(explorer, view, position, row, content)
        for position, (_, row), content in zip(
            table.index.tolist(), table.astype(object).iterrows(), contents, strict=True
        )
    )
    pages = pager(view, len(table), page.found, ROWS)
    heading = f'<p class="note">{word("self-influence")}, largest first</p>'
    return f'{heading}{pages}<div class="cards">{cards}</div>{pages}'


def _card(explorer: Explorer, view: View, position: int, row: pd.Series, content: str) -> str:
    name = link(view.replace(page="sample", sample=position, first=0), f"sample {position}")
    return (
        f'<article class="card"><header><strong>{number(row["self_influence"])}</strong>{name}'
        f'</header><div class="content">{content}</div>{facts(row.drop("self_influence"), view)}'
        f"{mark_buttons(explorer, position)}</article>"
    )


def _histogram(explorer: Explorer, view: View) -> str:
    found = explorer.questions.influence_histogram(view)
    if not len(found.counts):
        return note("No sample has a self-influence above 0.")
    made = histogram(found.counts, found.edges, *map(number, found.edges[[0, -1]]))
    return made + note("The axis and the heights are logarithmic.")


def _duplicates(explorer: Explorer, view: View) -> str:
    table = explorer.questions.duplicates(view)
    if table.empty:
        return note("No two samples have features that point the same way.")
    n_groups = table["group"].nunique()
    shown = table[:_MOST_DUPLICATES]
    rows = "".join(
        f"<li>{', '.join(_sample(view, int(i)) for i in group)}</li>"
        for _, group in shown.groupby("group")["sample"]
    )
    more = "" if len(shown) == len(table) else note(f"The first {len(shown):,} samples of them.")
    found = note(f"{len(table):,} samples in {n_groups:,} groups.")
    return f'{found}<ul class="groups">{rows}</ul>{more}'


def _sample(view: View, position: int) -> str:
    return link(view.replace(page="sample", sample=position, first=0), position)
