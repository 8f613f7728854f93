"""The app of one browser session, on Panel: HTML whose links, forms and buttons change it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import panel as pn
import param
from panel.custom import JSComponent
from tornado.ioloop import IOLoop

from trakdask.explorer.attributions import Attributions
from trakdask.explorer.computing import Abandoned, Job
from trakdask.explorer.html import STYLE, count, plain_message, render
from trakdask.explorer.new_targets import NewTarget
from trakdask.explorer.pages import (
    Section,
    answer,
    document,
    frame,
    page,
    samples_of,
    sections,
)
from trakdask.explorer.view import CONDITION_FIELDS, View, with_condition
from trakdask.variables import SAMPLE

__all__ = ["Session", "in_notebook"]

_PROGRESS_S = 0.25
"""How often the progress of a section is drawn."""


class LinkedHTML(JSComponent):
    """HTML in a page. What a link, form or button asks for is given to ``told``, as a dict.

    The address of the page follows ``query``; parameters in it that are not ours are kept, and the
    browser's button to go back works. A link that is opened in another tab works by itself.
    """

    html = param.String(doc="Escaped HTML; each section of it is replaced on its own.")
    query = param.String(doc="The view, as the part of a URL after '?'.")
    names = param.List([*vars(View()), *CONDITION_FIELDS], doc="Parameters of a URL that are ours.")
    marked = param.List([], doc="Samples with their marks, such as '7 wrong label'.")
    said = param.Dict({}, doc="What happened to which mark, and what can be undone.")
    saved = param.String(doc="What a browser is to save as an HTML file.")
    follows_address = param.Boolean(False, doc="Whether the address of the page is the view's.")

    _esm: ClassVar[Any] = Path(__file__).parent / "app.js"
    _stylesheets: ClassVar[Any] = [STYLE]

    told: Callable[[dict[str, Any]], None] | None = None

    def _handle_msg(self, msg: dict[str, Any]) -> None:
        if self.told is not None:
            self.told(msg)


class SessionMarks:
    """The marks of one session, which undoes its own changes only, the last one first."""

    def __init__(self, attributions: Attributions) -> None:
        self._attributions = attributions
        marks = attributions.marks
        self._marks = None if marks is None else marks.by(marks.who)
        self._changed: list[tuple[int, str]] = []
        """What each change was of: the position of a sample, −1 for several, and words."""

    def set(self, positions: Collection[int], label: str, *, wanted: bool) -> dict[str, Any]:
        """Let samples have a mark or not, as wanted; return what is so now, in words.

        What is wanted is said, and not that it changes: two who want the same do not undo it.
        """
        place = next(iter(positions)) if len(positions) == 1 else -1
        if self._marks is None:
            return self._said(place, "No marks are kept here.")
        try:
            names = self._attributions.sample_ids[list(positions)]
            change = self._marks.mark if wanted else self._marks.unmark
            has_changed = change(names.tolist(), label) > 0
        except Exception as err:
            return self._said(place, plain_message(err))
        what = f"sample {place}" if place >= 0 else count(len(positions), "sample")
        if has_changed:
            self._changed.append((place, what))
        are_marked = f"{'is' if place >= 0 else 'are'} {'' if wanted else 'no longer '}marked"
        return self._said(place, f"{what.capitalize()} {are_marked} as {label}.")

    def undo(self) -> dict[str, Any]:
        """Take back the last change of this session; return what was done, in words."""
        if self._marks is None or not self._changed:
            return self._said(-1, "There is nothing to undo.")
        place, what = self._changed[-1]
        try:
            changed = self._marks.undo()
        except Exception as err:
            return self._said(place, plain_message(err))
        self._changed.pop()
        text = f"The last change of {what} is undone."
        return self._said(place, text if changed else "Somebody else has undone this already.")

    def marked(self) -> list[str]:
        """Return the positions of marked samples with their marks, such as ``"7 remove"``."""
        if self._marks is None:
            return []
        try:
            table = self._attributions.marked()
        except (OSError, ValueError):  # which is said when somebody marks
            return []
        pairs = zip(table["position"], table["mark"], strict=True)
        return [f"{position} {mark}" for position, mark in pairs]

    def _said(self, position: int, text: str) -> dict[str, Any]:
        return {"sample": position, "text": text, "undo": len(self._changed)}


class Session:
    """The state of one browser: its view, the page that shows it, and what computes it.

    Sections are computed in a thread, one after the other. A new view abandons what still runs.
    """

    def __init__(
        self, attributions: Attributions, view: View | None = None, *, in_notebook: bool = False
    ) -> None:
        self.attributions = attributions
        self._document, self._loop = pn.state.curdoc, IOLoop.current(instance=False)
        location = pn.state.location
        if view is None:
            view = View.from_query(location.search if location else "")
        self.view = view
        self.marks = SessionMarks(attributions)
        self.page = LinkedHTML(  # type: ignore[no-untyped-call]
            sizing_mode="stretch_width",
            follows_address=location is not None,
            marked=self.marks.marked(),
        )
        self.page.told = self._told
        self._job = Job()
        self._thread: threading.Thread | None = None
        self._in_notebook = in_notebook
        if in_notebook:
            # What is changed before the browser shows the page is lost: it says when it does.
            self._draw(self._job, _waiting(view, sections(attributions, view)))
        elif self._document is None or self._document.session_context is None:
            self.go(view)
        else:
            pn.state.on_session_destroyed(lambda context: self._job.abandon())
            # Until a browser is connected, changes from another thread would be lost.
            pn.state.onload(lambda: self.go(view))

    def panel(self) -> Any:
        """Return what a browser shows."""
        return pn.Column(self.page, sizing_mode="stretch_width", margin=0)

    def go(self, view: View, more: Sequence[Section] = ()) -> None:
        """Show a view, and more below it; what the view before still computes is given up."""
        self._job.abandon()
        self.view, self._job = view, Job()
        content = [*sections(self.attributions, view), *more]
        parts = _waiting(view, content)
        self._draw(self._job, parts)
        self.page.query = view.to_query()
        self._thread = threading.Thread(
            target=self._answer, args=(self._job, content, parts),
            name="trakdask-explorer", daemon=True,
        )  # fmt: skip
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the page is complete."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _answer(self, job: Job, content: list[Section], parts: list[str]) -> None:
        told: set[str] = set()
        for i, section in enumerate(content):

            def show(html: str, i: int = i, section: Section = section, busy: bool = True) -> None:
                parts[i] = frame(self.view, i, section, html, busy=busy) if busy or html else ""
                self._later(lambda: self._draw(job, parts))

            job.on_progress(_Progress(show))
            try:
                with self.attributions.computing(), job.active():
                    job.require_wanted()
                    html = answer(section, told)
            except Abandoned:
                return
            show(html, busy=False)

    def _draw(self, job: Job, parts: list[str]) -> None:
        if not job.is_abandoned:
            self.page.html = page(self.attributions, self.view, parts)

    def _later(self, change: Callable[[], None]) -> None:
        """Change the page from the thread that its document belongs to."""
        if not self._loop or not self._document or self._document.session_context is None:
            change()
        else:
            # By the loop: from here it could be lost among events that the document holds back.
            self._loop.add_callback(self._document.add_next_tick_callback, change)

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
            self._mark(message)
        elif "undo" in message:
            self._say(self.marks.undo())
        elif 'aria-busy="true"' in self.page.html:
            self._say({"sample": -1, "text": "This view is not complete yet; save it when it is."})
        else:
            self.page.saved = ""
            self.page.saved = document(self.attributions, self.view, self.page.html)

    def _mark(self, message: Mapping[str, Any]) -> None:
        """Mark one sample, or all of a section."""
        label, wanted = str(message["mark"]), bool(message["wanted"])
        if "of" not in message:
            self._say(self.marks.set([int(message["sample"])], label, wanted=wanted))
            return
        try:
            with self.attributions.computing():
                positions = samples_of(self.attributions, self.view, str(message["of"])).tolist()
        except Exception as err:
            self._say({"sample": -1, "text": plain_message(err)})
        else:
            self._say(self.marks.set(positions, label, wanted=wanted))

    def _say(self, said: dict[str, Any]) -> None:
        self.page.marked = self.marks.marked()
        self.page.said = {**self.page.said, **said}
        if self.view.page == "marks":
            self.go(self.view)

    def follow(self, query: str) -> None:
        """Go to the view of a link or form."""
        questions = self.attributions.questions
        view = View.from_query(query)
        if "filter_name=" in query:  # of a form, for which these tables were read
            view = with_condition(query, view, questions.metadata, questions.targets.whole)
        self.go(view)

    def explain(self, content: Mapping[str, str]) -> None:
        """Make a target of what somebody has typed and uploaded, and go to its page."""
        self.go(View(page="new"), [Section("features", lambda: self._featurized(content))])

    def _featurized(self, content: Mapping[str, str]) -> str:
        job, maker = self._job, self.attributions.maker
        if maker is None:
            raise ValueError("There is no model here that could explain it.")
        target = maker.target(content)
        self._later(lambda: self._add(job, target))
        return ""

    def _add(self, job: Job, target: NewTarget) -> None:
        if not job.is_abandoned:
            self.attributions = self.attributions.with_target(target)
            last = int(self.attributions.targets.sizes[SAMPLE]) - 1
            self.go(View(page="target", target=last))


def in_notebook(attributions: Attributions, include: Any, exclude: Any) -> Any:
    """Return what a notebook shows of an explorer: its app, or how to make it possible."""
    if not pn.extension._loaded:
        return {
            "text/plain": "trakdask explorer. To see it here, run `import panel; "
            "panel.extension()` in a cell, and then this cell again. Without a network: "
            "`panel.extension(inline=True)`."
        }
    session = Session(attributions, View(), in_notebook=True)
    return session.panel()._repr_mimebundle_(include, exclude)


def _waiting(view: View, content: Sequence[Section]) -> list[str]:
    return [frame(view, i, section, "", busy=True) for i, section in enumerate(content)]


class _Progress:
    """Tells how far a computation is, not too often."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show, self._shown = show, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown >= _PROGRESS_S and total:
            self._shown = now
            self._show(render("progress", done=done, total=total))
