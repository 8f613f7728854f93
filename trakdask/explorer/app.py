"""The app of one browser session, on Panel: HTML whose links, forms and buttons change it."""

from __future__ import annotations

import threading
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, ClassVar

import panel as pn
import param
from panel.custom import JSComponent
from tornado.ioloop import IOLoop

from trakdask.checks import require_integer
from trakdask.explorer.attributions import Attributions
from trakdask.explorer.common import marked_at_once
from trakdask.explorer.computing import Abandoned, Computation
from trakdask.explorer.html import STYLE, count, plain_message, render
from trakdask.explorer.marks import Marks
from trakdask.explorer.pages import Section, answer, document, frame, page, sections
from trakdask.explorer.view import View
from trakdask.variables import SAMPLE

_PROGRESS_S = 0.25
"""How often the progress of a section is drawn."""


class LinkedHTML(JSComponent):
    """HTML in a page. Links, forms and buttons call ``told`` with a dict.

    The address of the page follows ``query``; other parameters in it are kept, and the
    browser's button to go back works. A link that is opened in another tab works by itself.
    """

    html = param.String(doc="Escaped HTML; each section of it is replaced on its own.")
    query = param.String(doc="The view, as the part of a URL after '?'.")
    names = param.List([*vars(View())], doc="Parameters of the URL of a view.")
    marked = param.List([], doc="Which samples have which marks, as in '7 wrong label'.")
    said = param.Dict({}, doc="A message about a mark, and how many changes can be undone.")
    saved = param.Dict({}, doc="A file that the browser is to save, as base64, by its name.")
    follows_address = param.Boolean(False, doc="Whether the address of the page is the view's.")

    _esm: ClassVar[Any] = Path(__file__).parent / "app.js"
    _stylesheets: ClassVar[Any] = [STYLE]

    told: Callable[[dict[str, Any]], None] | None = None

    def _handle_msg(self, msg: dict[str, Any]) -> None:
        if self.told is not None:
            self.told(msg)


class Session:
    """The state of one browser: its view, the page that shows it, and the running computation.

    Sections are computed in a thread, one after the other. A new view abandons them.
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
        marks = attributions.marks
        self._marks = marks and Marks(  # which undoes what was marked in this tab
            marks.path, store=marks.store, storage_options=marks.storage_options
        )
        # For each change of marks that is not undone: the position of its sample or −1, and words.
        self._changes: list[tuple[int, str]] = []
        self._answered = 0  # when the browser sent the last mark, by its clock
        self.page = LinkedHTML(  # type: ignore[no-untyped-call]
            sizing_mode="stretch_width",
            follows_address=location is not None,
            marked=self._marked(),
        )
        self.page.told = self._told
        self._computation = Computation()
        self._thread: threading.Thread | None = None
        self._in_notebook = in_notebook
        if in_notebook:
            # Changes before the browser shows the page are lost. It says when it does.
            self._draw(self._computation, _waiting(view, sections(attributions, view)))
        elif self._document is None or self._document.session_context is None:
            self.go(view)
        else:
            pn.state.on_session_destroyed(lambda context: self._give_up())
            # Until a browser is connected, changes from another thread would be lost.
            pn.state.onload(lambda: self._later(lambda: self.go(view)))

    def panel(self) -> Any:
        """Return the Panel object that a browser shows."""
        return pn.Column(self.page, sizing_mode="stretch_width", margin=0)

    def go(self, view: View, more: Sequence[Section] = ()) -> None:
        """Show a view, and more below it; the computation of the view before is given up."""
        self._give_up()
        self.view, self._computation = view, Computation()
        content = [*sections(self.attributions, view), *more]
        parts = _waiting(view, content)
        self._draw(self._computation, parts)
        self.page.query = view.to_query()
        self._thread = threading.Thread(
            target=self._answer, args=(self._computation, content, parts),
            name="trakdask-explorer", daemon=True,
        )  # fmt: skip
        self._thread.start()

    def _give_up(self) -> None:
        self._computation.is_abandoned = True

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the page is complete."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _answer(self, computation: Computation, content: list[Section], parts: list[str]) -> None:
        told: set[str] = set()
        for i, section in enumerate(content):

            def show(html: str, i: int = i, section: Section = section, busy: bool = True) -> None:
                parts[i] = frame(self.view, i, section, html, busy=busy) if busy or html else ""
                self._later(lambda: self._draw(computation, parts))

            computation.progress = _progress(show)
            try:
                with self.attributions.computing(), computation.active():
                    computation.require_wanted()
                    html = answer(section.html, told)
            except Abandoned:
                return
            show(html, busy=False)

    def _draw(self, computation: Computation, parts: list[str]) -> None:
        if not computation.is_abandoned:
            self.page.html = page(self.attributions, self.view, parts)

    def _later(self, change: Callable[[], None]) -> None:
        """Change the page from the thread that its document belongs to; every change comes here."""
        loop, document = self._loop, self._document
        if not loop or not document or document.session_context is None:
            change()
            return

        def held() -> None:
            # Held back, changes are sent by Bokeh, under its lock and in order. Panel sends changes
            # that are not held itself, and can forget those that come while it sends others.
            document.hold("combine")
            try:
                change()
            finally:
                document.unhold()

        # By the loop: from here it could be lost among events that the document holds back.
        loop.add_callback(document.add_next_tick_callback, held)

    # ---------------------------------------------------------------------- messages of a browser

    def _told(self, message: dict[str, Any]) -> None:
        self._later(lambda: self._do(message))

    def _do(self, message: dict[str, Any]) -> None:
        if "shown" in message:
            if self._in_notebook:
                self.go(self.view)
        elif "query" in message:
            self.go(View.from_query(str(message["query"])))
        elif "new" in message:
            self.explain({str(name): str(text) for name, text in message["new"].items()})
        elif "mark" in message:
            self._answered = message.get("at", 0)
            self._mark(message)
        elif "undo" in message:
            self._undo()
        elif message["save"] == "html" and 'aria-busy="true"' in self.page.html:
            self._say(-1, "This view is not complete yet; save it when it is.")
        else:
            arguments = self.view, message["save"]
            threading.Thread(target=self._save, args=arguments, daemon=True).start()

    def _save(self, view: View, kind: str) -> None:
        """Send a view, or all marks, as a file for the browser to keep."""
        try:
            with self.attributions.computing():
                if kind == "html":
                    name = f"trakdask {view.name}.html".replace(" ", "-")
                    content = document(self.attributions, view).encode()
                else:
                    assert self._marks is not None
                    name = f"{PurePath(self._marks.path).stem}.{kind}"
                    content = self._marks.table().to_parquet(index=False)
                    if kind == "csv":
                        content = self._marks.table().to_csv(index=False).encode()
        except Exception as err:
            message = plain_message(err)
            return self._later(lambda: self._say(-1, message))

        def send() -> None:
            self.page.saved = {}  # the same file again is a change, too
            self.page.saved = {name: b64encode(content).decode()}

        self._later(send)

    def _mark(self, message: Mapping[str, Any]) -> None:
        """Let one sample, or all of a section, have a mark or not; say so.

        The message has the state that is wanted, because the same message may come twice. It may
        have the corrected label, or a note, as they were typed.
        """
        mark, wanted = str(message["mark"]), bool(message["wanted"])
        texts = {name: message[name] for name in ("label", "note") if name in message}
        place, what, be = -1, "", "are"
        n = self.attributions.features.sizes[SAMPLE]
        try:
            if self._marks is None:
                raise ValueError("No marks are kept here.")
            with self.attributions.computing():
                positions = (
                    marked_at_once(self.attributions, self.view, str(message["of"])).tolist()
                    if "of" in message
                    else [require_integer("sample", message["sample"], 0, n, remedy="try 0")]
                )
            what = count(len(positions), "sample")
            if len(positions) == 1:
                place, what, be = positions[0], f"sample {positions[0]}", "is"
            ids = self.attributions.questions.sample_ids[positions].tolist()
            change = self._marks.mark if wanted else self._marks.unmark
            if change(ids, mark, **texts):
                self._changes.append((place, what))
        except Exception as err:
            self._say(place, plain_message(err))
        else:
            marked = f"marked as {mark}" if wanted else f"no longer marked as {mark}"
            text = f"{what.capitalize()} {be} {marked}."
            if texts:  # the page has them already, and perhaps more that is being typed
                text = f"The {' and the '.join(texts)} of {what} is kept."
            self._say(place, text, is_drawn=bool(texts))

    def _undo(self) -> None:
        """Take back the last change that was made here, and say so."""
        if self._marks is None or not self._changes:
            self._say(-1, "There is nothing to undo.")
            return
        place, what = self._changes[-1]
        try:
            has_changed = self._marks.undo()
        except Exception as err:
            self._say(place, plain_message(err))
            return
        self._changes.pop()
        text = f"The last change of {what} is undone."
        self._say(place, text if has_changed else "Somebody else has undone this already.")

    def _marked(self) -> list[str]:
        """Return the positions of marked samples with their marks."""
        with suppress(OSError, ValueError):  # the error is shown when somebody marks a sample
            table = self.attributions.questions.marked()
            return [f"{position} {mark}" for position, mark in table[["position", "mark"]].values]
        return []

    def _say(self, position: int, text: str, *, is_drawn: bool = False) -> None:
        self.page.marked = self._marked()
        undo, answered = len(self._changes), self._answered
        self.page.said = {"sample": position, "text": text, "undo": undo, "answered": answered}
        if self.view.page == "marks" and not is_drawn:
            self.go(self.view)

    def explain(self, content: Mapping[str, str]) -> None:
        """Make a target of a text or an image that somebody gave, and go to its page."""
        self.go(View(page="new"), [Section("features", lambda: self._featurized(content))])

    def _featurized(self, content: Mapping[str, str]) -> str:
        computation, maker = self._computation, self.attributions.maker
        if maker is None:
            raise ValueError("There is no model here that could explain it.")
        features, html = maker.target(content)

        def add() -> None:
            if not computation.is_abandoned:
                last = int(self.attributions.targets.sizes[SAMPLE])
                self.attributions = self.attributions.with_target(features, html)
                self.go(View(page="target", target=last))

        self._later(add)
        return ""


def in_notebook(attributions: Attributions, include: Any, exclude: Any) -> Any:
    """Return the app of an explorer for a notebook, or a text that says how to show it."""
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


def _progress(show: Callable[[str], None]) -> Callable[[int, int], None]:
    """Return a function that shows how far a computation is, not too often."""
    shown = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal shown
        if total and time.monotonic() - shown >= _PROGRESS_S:
            shown = time.monotonic()
            show(render("progress", done=done, total=total))

    return tell
