"""One training sample: its self-influence, and which targets it helps and harms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from trakdask.explorer.pages.controls import facts, mark_buttons, settings_form, word
from trakdask.explorer.pages.html import link, note, number, signed
from trakdask.explorer.pages.section import Section
from trakdask.explorer.state import View

if TYPE_CHECKING:
    from trakdask.explorer.explorer import Explorer

__all__ = ["sections"]


def sections(explorer: Explorer, view: View) -> list[Section]:
    """Return the sample and its targets."""
    return [
        Section(
            f"Training sample {view.sample}", "A sample that the model was trained on.",
            lambda: _sample(explorer, view),
        ),
        Section(
            "Targets it helped and harmed", "Targets whose output training on this sample raised "
            "or lowered most.", lambda: _targets(explorer, view),
        ),
    ]  # fmt: skip


def _sample(explorer: Explorer, view: View) -> str:
    facts_of_sample = explorer.questions.sample(view)
    (content,) = explorer.samples_html([view.sample])
    influence = number(float(facts_of_sample["self_influence"]))
    metadata = facts(facts_of_sample.drop("self_influence"))
    return (
        f'<div class="one"><div class="content">{content}</div>'
        f"<div><p>{word('self-influence')}: <strong>{influence}</strong></p>{metadata}"
        f"{mark_buttons(explorer, view.sample)}</div></div>"
        f'<div class="forms">{settings_form(explorer, view)}</div>'
    )


def _targets(explorer: Explorer, view: View) -> str:
    table = explorer.questions.targets_of(view)
    if table.empty:
        return note("This sample has no scores: its features could not be computed.")
    contents = explorer.target_samples_html(list(table.index), brief=True)
    cards = "".join(
        _card(view, position, row, content)
        for position, (_, row), content in zip(
            table.index.tolist(), table.astype(object).iterrows(), contents, strict=True
        )
    )
    return f'<p class="note">{word("score")}, best first</p><div class="cards">{cards}</div>'


def _card(view: View, position: int, row: pd.Series, content: str) -> str:
    kind = "helpful" if row["score"] > 0 else "harmful"
    name = link(view.replace(page="target", target=position, where=""), f"target {position}")
    return (
        f'<article class="card {kind}"><header><strong>{signed(row["score"])}</strong>'
        f'{name}</header><div class="content">{content}</div>{facts(row.drop("score"))}</article>'
    )
