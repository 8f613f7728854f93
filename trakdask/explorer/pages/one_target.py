"""One target: the training samples that helped and harmed it most, and their sums by group."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

import trakdask as td
from trakdask.explorer.filters import joined
from trakdask.explorer.pages.controls import (
    equals,
    facts,
    filter_form,
    mark_buttons,
    settings_form,
    word,
)
from trakdask.explorer.pages.html import (
    bars,
    columns,
    form,
    histogram,
    link,
    note,
    number,
    option_field,
    signed,
    value,
)
from trakdask.explorer.pages.section import Section
from trakdask.explorer.state import MeanTrace, View, damping_of
from trakdask.variables import SAMPLE

if TYPE_CHECKING:
    from trakdask.explorer.explorer import Explorer

__all__ = ["groups_of", "sections"]

_TEXTS = 5
"""How many samples have their words coloured."""

_SHOWN_GROUPS = 24

_STORED = "The sample whose output is explained."
_NEW = "A new target, whose output is explained; it is kept in this tab only."


def sections(explorer: Explorer, view: View) -> list[Section]:
    """Return the target, its settings, and what helped and harmed it."""
    return [
        Section(
            f"Target {view.target}", _NEW if explorer.is_new(view.target) else _STORED,
            lambda: _target(explorer, view),
        ),
        Section(
            "Most helpful", "Training on these samples raised the output of the target most.",
            lambda: _ranked(explorer, view, largest=True), "half",
        ),
        Section(
            "Most harmful", "Training on these samples lowered the output of the target most.",
            lambda: _ranked(explorer, view, largest=False), "half",
        ),
        *_words_sections(explorer, view),
        Section(
            "Sums by group", "Scores of this target, added up over the training samples of a group."
            " Choose a group to see its samples only.", lambda: _groups(explorer, view), "half",
        ),
        Section(
            "Damping", "How λ was chosen: with the right λ, the scores of a sample add up to its "
            "output, so λ is one at which sums and outputs go together. Choose a bar to use its λ.",
            lambda: damping_curve(explorer, view), "half",
        ),
        Section(
            "All scores", "How many training samples have which score for this target.",
            lambda: _histogram(explorer, view), "half",
        ),
    ]  # fmt: skip


def _target(explorer: Explorer, view: View) -> str:
    row = explorer.questions.targets.row(view.target)
    (content,) = explorer.target_samples_html([view.target])
    last = len(explorer.questions.targets.metadata) - 1
    neighbours = [("← Previous", view.target - 1), ("Next →", view.target + 1)]
    links = "".join(
        link(view.replace(target=i, first=0), text) for text, i in neighbours if 0 <= i <= last
    )
    forms = settings_form(explorer, view)
    forms += filter_form(view, explorer.questions.metadata, "where")
    return (
        f'<nav class="pager" aria-label="Targets">{links}</nav>'
        f'<div class="one"><div class="content">{content}</div>{facts(row)}</div>'
        f'<div class="forms">{forms}</div>'
    )


def _ranked(explorer: Explorer, view: View, *, largest: bool) -> str:
    table = explorer.questions.top(view, largest=largest)
    if table.empty:
        return note("No training sample meets the condition.")
    contents = explorer.samples_html(table["sample"].tolist())
    kind = "helpful" if largest else "harmful"
    cards = "".join(
        _card(explorer, view, row, content, kind)
        for (_, row), content in zip(table.astype(object).iterrows(), contents, strict=True)
    )
    spread = f", {word('±')} its standard error" if table["spread"].notna().any() else ""
    return f'<p class="note">{word("score")}{spread}</p><div class="cards">{cards}</div>'


def _words_sections(explorer: Explorer, view: View) -> list[Section]:
    """Return the sections of words, if tokens have features."""
    if not explorer.questions.has_words(view):
        return []
    return [
        Section(
            f"Words that {kind}", f"The words of the samples that {kind} most, coloured by their "
            "own scores, which add up to those of the samples.",
            lambda largest=largest: _words(explorer, view, largest=largest), "half",  # type: ignore[misc]
        )
        for kind, largest in (("helped", True), ("harmed", False))
    ]  # fmt: skip


def _words(explorer: Explorer, view: View, *, largest: bool) -> str:
    shown = view.replace(k=min(view.k, _TEXTS))
    position = explorer.questions.top(shown, largest=largest)["sample"].to_numpy()
    if not len(position):
        return note("No training sample meets the condition.")
    scores = explorer.questions.words(view, position)
    named = scores.assign_coords(shown_as=(SAMPLE, [f"sample {i}" for i in position]))
    made: str = td.plots.text(named, label="shown_as")._repr_html_()
    return made


def _card(explorer: Explorer, view: View, row: pd.Series, content: str, kind: str) -> str:
    position = int(row["sample"])
    spread = "" if np.isnan(row["spread"]) else f"± {number(row['spread'], 2)}"
    sample = view.replace(page="sample", sample=position, first=0)
    metadata = facts(row.drop(["sample", "score", "spread"]), view)
    name = link(sample, f"sample {position}", label=f"Training sample {position}")
    return (
        f'<article class="card {kind}"><header><span><strong>{signed(row["score"])}</strong> '
        f'<span class="quiet">{spread}</span></span>{name}</header>'
        f'<div class="content">{content}</div>{metadata}{mark_buttons(explorer, position)}'
        "</article>"
    )


def groups_of(explorer: Explorer, view: View) -> tuple[str, dict[str, str]]:
    """Return the coord to group by, "" if none is fit for it, and all that are."""
    names = explorer.questions.groupings
    chosen = view.group_by if view.group_by in names else (names[0] if names else "")
    return chosen, {name: name for name in names}


def _groups(explorer: Explorer, view: View) -> str:
    by, names = groups_of(explorer, view)
    if not by:
        return note("No coord of the training samples has from 2 to 1,000 different values.")
    choice = form(
        view, option_field("group_by", by, "Group by", names), ["group_by"], button="Show"
    )
    table = explorer.questions.groups(view.replace(group_by=by))
    if table.empty:
        return choice + note("No training sample meets the condition.")
    half = _SHOWN_GROUPS // 2
    ends = table if len(table) <= _SHOWN_GROUPS else pd.concat([table[:half], table[-half:]])
    rows = [
        (_group_link(view, by, row[by]), float(row["score"]), f"{row['samples']:,} samples")
        for _, row in ends.astype(object).iterrows()
    ]
    left_out = len(table) - len(ends)
    more = note(f"{left_out:,} groups between them are not shown.") if left_out else ""
    heading = f'<p class="note">sum of {word("score")}</p>'
    return choice + heading + bars(rows) + more


def _group_link(view: View, by: str, group: object) -> str:
    condition = equals(by, group) if by.isidentifier() else None
    if condition is None:
        return value(group)
    return link(view.replace(where=joined(view.where, condition)), "", html=value(group))


def damping_curve(explorer: Explorer, view: View) -> str:
    """Return λ of each checkpoint, and the curve it was chosen by, if there is one."""
    chosen = explorer.questions.damping(view)
    if chosen is None:
        return note("This estimator has no gram matrix, and so no λ.")
    values = ", ".join(number(x) for x in chosen["damping"].values)
    text = f"λ = {values} ({chosen['rule'].values}), in the squared units of the features."
    made = f"<p>{word('λ')}: {escape(text.removeprefix('λ = '))}</p>"
    relative = float(chosen["relative"].values)
    if view.damping and not np.isfinite(chosen["curve"].values).any():
        # The curve stays in sight when λ is set by hand.
        asked = damping_of(view.damping)
        relative = asked.value if isinstance(asked, MeanTrace) else np.nan
        chosen = explorer.questions.damping(view.replace(damping="")) or chosen
    curve = chosen["curve"].values
    if not np.isfinite(curve).any():
        return made + note("It was not chosen by outputs, so there is no curve; try completeness.")
    rho = chosen["relative_damping"].values
    labels = [
        f"λ = {number(r)} tr(K)/n: correlation {number(c)}" for r, c in zip(rho, curve, strict=True)
    ]
    marked = int(np.argmin(np.abs(np.log(rho / relative)))) if relative > 0 else -1
    low, high = f"λ = {number(rho[0])} tr(K)/n", f"{number(rho[-1])} tr(K)/n"
    views = [view.replace(damping=f"{r:.4g} tr(K)/n") for r in rho]
    made += columns(curve.tolist(), labels, low, high, marked=marked, views=views)
    peak = float(chosen["peak"].values)
    return made + note(
        f"Height: correlation of sums of scores with outputs, at most {number(peak)}. "
        + (f"Chosen: {number(relative)} tr(K)/n." if np.isfinite(relative) else "")
    )


def _histogram(explorer: Explorer, view: View) -> str:
    found = explorer.questions.score_histogram(view)
    if not len(found.counts):
        return note("This target has no scores: its features could not be computed.")
    scale = f'<p class="note">{word("score")}; heights are logarithms of counts</p>'
    return scale + histogram(found.counts, found.edges, *map(signed, found.edges[[0, -1]]))
