"""The app of one browser session, on Panel."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import panel as pn

from trakdask.explorer.computing import Abandoned, Work
from trakdask.explorer.filters import with_filter
from trakdask.explorer.links import LinkedHTML
from trakdask.explorer.messages import plain_message
from trakdask.explorer.new_targets import NewTarget
from trakdask.explorer.pages import Section, sections
from trakdask.explorer.pages.frame import frame, header
from trakdask.explorer.session_marks import SessionMarks
from trakdask.explorer.state import View
from trakdask.explorer.static import document
from trakdask.variables import SAMPLE

if TYPE_CHECKING:
    from trakdask.explorer.explorer import Explorer

__all__ = ["Session", "in_notebook"]

_PROGRESS_S = 0.25
"""How often the progress of a section is drawn."""

_log = logging.getLogger(__name__)


class Session:
    """The state of one browser: its view, the page that shows it, and what computes it.

    Sections are computed in a thread, one after the other. A new view abandons what still runs.
    """

    def __init__(
        self, explorer: Explorer, view: View | None = None, *, in_notebook: bool = False
    ) -> None:
        self.explorer = explorer
        self._document = pn.state.curdoc
        location = pn.state.location
        if view is None:
            view = View.from_query(location.search if location else "")
        self.marks = SessionMarks(explorer)
        self.page = LinkedHTML(
            sizing_mode="stretch_width",
            follows_address=location is not None,
            marked=self.marks.marked(),
        )
        self.page.told = self._told
        self._work = Work()
        self._thread: threading.Thread | None = None
        self.view = view
        self._in_notebook = in_notebook
        if in_notebook:
            # What is changed before the browser shows the page is lost: it says when it does.
            asked = enumerate(sections(explorer, view))
            self._draw(self._work, [_framed(i, each, "", busy=True) for i, each in asked])
        elif self._document is None or self._document.session_context is None:
            self.go(view)
        else:
            pn.state.on_session_destroyed(lambda context: self._work.abandon())
            # Until a browser is connected, changes from another thread would be lost.
            pn.state.onload(lambda: self.go(view))

    def panel(self) -> Any:
        """Return what a browser shows."""
        return pn.Column(self.page, sizing_mode="stretch_width", margin=0)

    def go(self, view: View, more: Sequence[Section] = ()) -> None:
        """Show a view, and more below it; what the view before still computes is given up."""
        self._work.abandon()
        self.view, work = view, Work()
        self._work = work
        asked = [*sections(self.explorer, view), *more]
        parts = [_framed(i, each, "", busy=True) for i, each in enumerate(asked)]
        self._draw(work, parts)
        self.page.query = view.to_query()
        thread = threading.Thread(
            target=self._answer, args=(work, asked, parts), name="trakdask-explorer", daemon=True
        )
        self._thread = thread
        thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the page is complete."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _answer(self, work: Work, asked: list[Section], parts: list[str]) -> None:
        for i, section in enumerate(asked):
            drawn = _Progress(lambda text, i=i, section=section: self._part(  # type: ignore[misc]
                work, parts, i, _framed(i, section, text, busy=True)
            ))  # fmt: skip
            work.on_progress(drawn)
            try:
                with self.explorer.computing(), work.active():
                    work.require_wanted()
                    made = _framed(i, section, section.html())
            except Abandoned:
                return
            except Exception as err:
                if work.is_abandoned:
                    return
                _log.warning("a section of the explorer failed", exc_info=True)
                message = f'<p class="message error" role="alert">{escape(plain_message(err))}</p>'
                made = _framed(i, section, message)
            self._part(work, parts, i, made)

    def _part(self, work: Work, parts: list[str], i: int, made: str) -> None:
        parts[i] = made
        parts = list(parts)
        self._later(lambda: self._draw(work, parts))

    def _draw(self, work: Work, parts: list[str]) -> None:
        if not work.is_abandoned:
            self.page.html = header(self.explorer, self.view) + "".join(parts)

    def _later(self, change: Callable[[], None]) -> None:
        """Change the page from the thread that its document belongs to."""
        document = self._document
        if document is None or document.session_context is None:
            change()
        else:
            document.add_next_tick_callback(change)

    # ------------------------------------------------------------------------- what a browser says

    def _told(self, message: dict[str, Any]) -> None:
        if "shown" in message:
            if self._in_notebook:
                self.go(self.view)
        elif "query" in message:
            self.follow(str(message["query"]))
        elif "new" in message:
            self.explain({str(name): str(text) for name, text in message["new"].items()})
        elif "mark" in message:
            position, label, wanted = (message[name] for name in ("sample", "mark", "wanted"))
            self._say(self.marks.set(int(position), str(label), wanted=bool(wanted)), undo=True)
        elif "undo" in message:
            self._say(self.marks.undo())
        elif 'aria-busy="true"' in self.page.html:
            self._say("This view is not complete yet; save it when it is.")
        else:
            self.page.saved = ""
            self.page.saved = document(self.view, self.page.html)

    def follow(self, query: str) -> None:
        """Go to the view of a link or form."""
        questions = self.explorer.questions
        view = View.from_query(query)
        self.go(with_filter(query, view, questions.metadata, questions.targets.metadata))

    def explain(self, given: Mapping[str, str]) -> None:
        """Make a target of what somebody has typed and uploaded, and go to its page."""
        help_text = "Its gradients at each checkpoint, projected as those of the other targets."
        self.go(View(page="new"), [Section("Features", help_text, lambda: self._featurized(given))])

    def _featurized(self, given: Mapping[str, str]) -> str:
        work, maker = self._work, self.explorer.maker
        if maker is None:
            raise ValueError("expected a model, got none; try td.explore(..., model=model)")
        target = maker.made(given)
        self._later(lambda: self._add(work, target))
        return ""

    def _add(self, work: Work, target: NewTarget) -> None:
        if not work.is_abandoned:
            self.explorer = self.explorer.with_target(target)
            last = int(self.explorer.targets.sizes[SAMPLE]) - 1
            self.go(View(page="target", target=last))

    def _say(self, text: str, *, undo: bool = False) -> None:
        self.page.marked = self.marks.marked()
        said = header(self.explorer, self.view, said=text, undo=undo)
        rest = self.page.html.partition("<section")
        self.page.html = said + rest[1] + rest[2]


def in_notebook(explorer: Explorer, include: Any, exclude: Any) -> Any:
    """Return what a notebook shows of an explorer: its app, or how to make it possible."""
    if not pn.extension._loaded:
        return {
            "text/plain": "trakdask explorer. To see it here, run `import panel; "
            "panel.extension()` in a cell, and then this cell again. Without a network: "
            "`panel.extension(inline=True)`."
        }
    return Session(explorer, View(), in_notebook=True).panel()._repr_mimebundle_(include, exclude)


def _framed(i: int, section: Section, html: str, *, busy: bool = False) -> str:
    return frame(section, html, busy=busy, level=2 if i else 1)


class _Progress:
    """Tells how far a computation is, not too often."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show, self._shown = show, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown >= _PROGRESS_S and total:
            self._shown = now
            self._show(
                f'<progress max="{total}" value="{done}" aria-label="Progress"></progress> '
                f"{100 * done // total} %"
            )
