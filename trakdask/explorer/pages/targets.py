"""The table of targets."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from trakdask.explorer.pages.section import Section, link
from trakdask.explorer.state import View

if TYPE_CHECKING:
    from trakdask.explorer.explorer import Explorer


def sections(explorer: Explorer, view: View) -> list[Section]:
    return [
        Section("Targets", "Samples whose outputs are explained.", lambda: _table(explorer, view))
    ]


def _table(explorer: Explorer, view: View) -> str:
    page = explorer.questions.targets_page(view)
    head = "".join(f"<th>{escape(str(name))}</th>" for name in ["target", *page.table.columns])
    rows = "".join(
        f"<tr><td>{link(view.replace(page='target', target=int(i)), i)}</td>"
        + "".join(f"<td>{escape(str(value))}</td>" for value in row)
        + "</tr>"
        for i, row in zip(page.table.index, page.table.itertuples(index=False), strict=True)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
