"""One target: the training samples that helped and harmed it most."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from trakdask.explorer.pages.section import Section
from trakdask.explorer.state import View

if TYPE_CHECKING:
    from trakdask.explorer.explorer import Explorer


def sections(explorer: Explorer, view: View) -> list[Section]:
    return [
        Section(
            "Most helpful",
            "Training on them raised the output.",
            lambda: _top(explorer, view, True),
        ),
        Section(
            "Most harmful",
            "Training on them lowered the output.",
            lambda: _top(explorer, view, False),
        ),
    ]


def _top(explorer: Explorer, view: View, largest: bool) -> str:
    table = explorer.questions.top(view, largest=largest)
    head = "".join(f"<th>{escape(str(name))}</th>" for name in table.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>"
        for row in table.itertuples(index=False)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
