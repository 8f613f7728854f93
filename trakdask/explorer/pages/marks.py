"""The samples that people have marked."""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING

import pandas as pd

from trakdask.explorer.marks import Marks
from trakdask.explorer.pages.html import link, note
from trakdask.explorer.pages.section import Section
from trakdask.explorer.session_marks import positions
from trakdask.explorer.state import View
from trakdask.variables import SAMPLE

if TYPE_CHECKING:
    from trakdask.explorer.explorer import Explorer

__all__ = ["as_csv", "sections"]

_MOST_ROWS = 200


def sections(explorer: Explorer, view: View) -> list[Section]:
    """Return the section of all marks, if there are any."""
    marks = explorer.marks
    if marks is None or marks.table().empty:
        return []
    what = "Samples that people have marked, newest first, and the file that holds the marks."
    return [Section("Marks", what, lambda: _table(explorer, marks, view))]


def _table(explorer: Explorer, marks: Marks, view: View) -> str:
    table = positions(explorer, marks).iloc[::-1]
    shown = table[:_MOST_ROWS]
    names = ("position", SAMPLE, "mark", "who", "time")
    rows = "".join(_row(view, *row) for row in zip(*(shown[n] for n in names), strict=True))
    head = "".join(f'<th scope="col">{name}</th>' for name in ("sample", "mark", "who", "time"))
    csv = base64.b64encode(as_csv(marks.table()).encode()).decode()
    more = note(f"The newest {_MOST_ROWS}.") if len(table) > _MOST_ROWS else ""
    return (
        f'<p><a download="marks.csv" href="data:text/csv;base64,{csv}">Download all as CSV</a></p>'
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>'
        f"</table></div>{more}{note(f'They are kept in {marks.path}.')}"
    )


def _row(view: View, position: int, name: object, mark: str, who: str, time: pd.Timestamp) -> str:
    sample = link(view.replace(page="sample", sample=position, first=0), name)
    cells = (sample, escape(mark), escape(who), f"{time:%Y-%m-%d %H:%M} UTC")
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def as_csv(table: pd.DataFrame) -> str:
    """Return a table as CSV in which spreadsheets find no formula: a ' comes before it."""
    text = table.select_dtypes(exclude=["number", "datetimetz"])
    safe = text.apply(lambda column: column.str.replace(r"^([=+\-@\t\r])", r"'\1", regex=True))
    return table.assign(**safe).to_csv(index=False)
