"""Pages: each is a list of sections, which ask one question and write its answer as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trakdask.explorer.pages import corpus, marks, new_target, one_sample, one_target, targets
from trakdask.explorer.pages.section import Section

if TYPE_CHECKING:
    from trakdask.explorer.explorer import Explorer
    from trakdask.explorer.state import View

__all__ = ["Section", "sections"]

_PAGES = {
    "targets": targets.sections,
    "target": one_target.sections,
    "sample": one_sample.sections,
    "corpus": corpus.sections,
    "new": new_target.sections,
}


def sections(explorer: Explorer, view: View) -> list[Section]:
    """Return the sections of the page of a view; nothing is computed before their ``html()``."""
    made = _PAGES[view.page](explorer, view)
    return made + marks.sections(explorer, view) if view.page == "corpus" else made
