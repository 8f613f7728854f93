"""The table of targets."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from trakdask.explorer.pages.controls import filter_form, word
from trakdask.explorer.pages.html import form, link, pager, text_field, value
from trakdask.explorer.pages.section import Section
from trakdask.explorer.pages.words import MEANINGS
from trakdask.explorer.state import View
from trakdask.explorer.target_table import ROWS

if TYPE_CHECKING:
    from trakdask.explorer.explorer import Explorer

__all__ = ["sections", "thumbnail"]


def sections(explorer: Explorer, view: View) -> list[Section]:
    """Return the search and the table."""
    meaning = "Samples whose outputs are explained. Choose one to see what made it so."
    return [Section("Targets", meaning, lambda: _content(explorer, view))]


def _content(explorer: Explorer, view: View) -> str:
    search = text_field("search", view.search, "Search", "text in the metadata")
    forms = form(view, search, ["search"], kind="where", button="Search")
    forms += filter_form(view, explorer.questions.targets.metadata, "targets_where")
    page = explorer.questions.targets.page(view)
    table = page.table
    contents = explorer.target_samples_html(list(table.index), brief=True)
    with_content = any(contents)
    head = '<th scope="col">target</th>' + ('<th scope="col">sample</th>' if with_content else "")
    head += "".join(_heading(view, str(name)) for name in table)
    rows = "".join(
        f"<tr>{_first(explorer, view, position)}"
        f"{thumbnail(view, position, html) if with_content else ''}"
        f"{''.join(_cell(x) for x in row)}</tr>"
        for position, html, row in zip(
            table.index, contents, table.itertuples(index=False), strict=True
        )
    )
    return (
        f'<div class="forms">{forms}</div>{pager(view, len(table), page.found, ROWS)}'
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{pager(view, len(table), page.found, ROWS)}"
    )


def _heading(view: View, name: str) -> str:
    is_sorted = view.sort == name
    ascending = not view.ascending if is_sorted else name not in ("loss", "disagreement")
    arrow = (" ↑" if view.ascending else " ↓") if is_sorted else ""
    order = ("ascending" if view.ascending else "descending") if is_sorted else "none"
    sort = view.replace(sort=name, ascending=ascending, first=0)
    shown = link(sort, f"{name}{arrow}", label=f"Sort by {name}")
    about = f" {word(name, '?')}" if name in MEANINGS else ""
    return f'<th scope="col" aria-sort="{order}">{shown}{about}</th>'


def _first(explorer: Explorer, view: View, position: int) -> str:
    badge = ' <span class="badge">new</span>' if explorer.is_new(position) else ""
    return f'<th scope="row">{link(_target(view, position), position)}{badge}</th>'


def thumbnail(view: View, position: int, html: str) -> str:
    """Return the cell of what a target looks like."""
    is_image = html.startswith("<img")
    if not is_image:
        return f'<td class="excerpt">{html}</td>'
    shown = link(_target(view, position), "", html=html, label=f"Target {position}")
    return f'<td class="thumbnail">{shown}</td>'


def _target(view: View, position: int) -> View:
    return view.replace(page="target", target=int(position), first=0)


def _cell(x: object) -> str:
    is_number = isinstance(x, (int, float)) and not isinstance(x, bool)
    return f'<td class="{escape("num" if is_number else "")}">{value(x)}</td>'
