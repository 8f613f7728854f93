"""The app of one browser session, on Panel: HTML whose links, forms and buttons change it.

And its server, whose address nobody can guess.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, ClassVar

import panel as pn
import param
from bokeh.server.session import ServerSession
from panel.custom import JSComponent
from panel.io.server import DocHandler, Server, get_server
from tornado.ioloop import IOLoop
from tornado.web import RequestHandler

from trakdask.checks import require_integer
from trakdask.explorer.computing import Computation
from trakdask.explorer.html import STYLE, count, plain_message, render
from trakdask.explorer.marks import Marks
from trakdask.explorer.pages import answer, document, frame, page, sections
from trakdask.explorer.questions import Questions
from trakdask.explorer.view import View

_TOKEN_BYTES = 24


class Session(JSComponent):
    """The state of one browser: its view, the page that shows it, and the running computation.

    Sections are computed in a thread, one after the other. A new view abandons them. Links, forms
    and buttons of the page send messages. The address of the page follows ``query``; other
    parameters in it are kept, and the browser's button to go back works.
    """

    html = param.String(doc="Escaped HTML; each section of it is replaced on its own.")
    query = param.String(doc="The view, as the part of a URL after '?'.")
    names = param.List([*vars(View())], doc="Parameters of the URL of a view.")
    marked = param.List([], doc="Which samples have which marks, as in '7 wrong label'.")
    said = param.Dict({}, doc="A message about a mark, and how many changes can be undone.")
    saved = param.Dict({}, doc="A text, or bytes, for the browser to save as a file, by its name.")
    follows_address = param.Boolean(False, doc="Whether the address of the page is the view's.")

    _esm: ClassVar[Any] = Path(__file__).parent / "app.js"
    _stylesheets: ClassVar[Any] = [STYLE]

    def __init__(self, questions: Questions, view: View | None = None) -> None:
        self._loop, self._doc = IOLoop.current(instance=False), pn.state.curdoc
        context: Any = self._doc and self._doc.session_context
        super().__init__(  # type: ignore[no-untyped-call]
            sizing_mode="stretch_width", margin=0, follows_address=context is not None
        )
        self.questions = questions
        marks = questions.marks
        self._marks = marks and Marks(  # which undoes what was marked in this tab
            marks.path, store=marks.store, storage_options=marks.storage_options
        )
        self._changes: list[str] = []  # what was changed, for each change that is not undone
        self._answered = 0  # when the browser sent the last mark, by its clock
        self._computation = Computation()
        self._thread: threading.Thread | None = None
        self.marked = self._marked()
        self.view = view or questions.view(context.request.query if context else "")
        if self._doc and context:
            self._doc.on_session_destroyed(lambda context: self._give_up())
            self._doc.template_variables["errors"] = self.view.errors  # for the server
        # Changes before a browser shows the page are lost. It says when it does.
        waiting = [frame(self.view, name, "", busy=True) for name in sections(questions, self.view)]
        self.html = page(questions, self.view, waiting)

    def go(self, view: View, more: Mapping[str, Callable[[], str]] | None = None) -> None:
        """Show a view, and more below it; the computation of the view before is given up."""
        self._give_up()
        self.view, self._computation = view, Computation(self.questions.client)
        computation, content = self._computation, {**sections(self.questions, view), **(more or {})}
        parts = {name: frame(view, name, "", busy=True) for name in content}

        def show(name: str, body: str, busy: bool = True) -> None:
            parts[name] = frame(view, name, body, busy=busy) if busy or body else ""
            self._later(lambda: self._draw(computation, parts))

        def answer_all() -> None:
            for name, html in content.items():
                computation.progress = lambda done, total, name=name: show(
                    name, render("progress", done=done, total=total)
                )
                with computation.active():
                    body = answer(html, parts.values())
                if computation.is_abandoned:
                    return
                show(name, body, busy=False)

        self._draw(computation, parts)
        self.query = view.to_query()
        self._thread = threading.Thread(target=answer_all, daemon=True)
        self._thread.start()

    def _give_up(self) -> None:
        self._computation.is_abandoned = True

    def _draw(self, computation: Computation, parts: Mapping[str, str]) -> None:
        if not computation.is_abandoned:
            self.html = page(self.questions, self.view, parts.values())

    def _later(self, change: Callable[[], None]) -> None:
        """Change the page from the thread that its document belongs to; every change comes here."""
        loop, document = self._loop, self._doc
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

    def _handle_msg(self, msg: dict[str, Any]) -> None:
        self._later(lambda: self._do(msg))

    def _do(self, message: dict[str, Any]) -> None:
        if "shown" in message:
            self.go(self.view)
        elif "query" in message:
            self.go(self.questions.view(str(message["query"])))
        elif "new" in message:
            self.go(View(page="new"), {"features": lambda: self._featurized(message["new"])})
        elif "mark" in message:
            self._answered = message.get("at", 0)
            # The page has what was typed already, and perhaps more that is being typed.
            is_typed = bool({"label", "note"} & {*message})
            self._say(lambda: self._mark(message), is_drawn=is_typed)
        elif "undo" in message:
            self._say(self._undo)
        elif message["save"] == "html" and 'aria-busy="true"' in self.html:
            self._say(lambda: "This view is not complete yet; save it when it is.")
        else:
            # A thread, because some of the answers are computed again.
            arguments = self.view, message["save"]
            threading.Thread(target=self._save, args=arguments, daemon=True).start()

    def _featurized(self, content: Mapping[str, Any]) -> str:
        """Make a target of a text or an image that somebody gave, and go to its page."""
        computation, maker = self._computation, self.questions.maker
        if maker is None or not maker.takes_content:
            raise ValueError("There is no model here that could explain it.")
        features, html = maker.target(content)

        def add() -> None:
            if not computation.is_abandoned:
                last = len(self.questions.targets.metadata)
                self.questions = self.questions.with_target(features, html)
                self.go(View(page="target", target=last))

        self._later(add)
        return ""

    def _save(self, view: View, kind: str) -> None:
        """Send a view, or all marks, as a file for the browser to keep."""
        try:
            with Computation(self.questions.client).active():
                if kind == "html":
                    name = f"trakdask {view.name}.html".replace(" ", "-")
                    content = document(self.questions, view)
                else:
                    assert self._marks is not None
                    name, table = f"{PurePath(self._marks.path).stem}.{kind}", self._marks.table()
                    content = getattr(table, f"to_{kind}")(None, index=False)
        except Exception as err:
            message = plain_message(err)
            return self._later(lambda: self._say(lambda: message))

        def send() -> None:
            self.saved = {}  # the same file again is a change, too
            self.saved = {name: content}

        self._later(send)

    def _mark(self, message: Mapping[str, Any]) -> str:
        """Let one sample, or all of a section, have a mark or not; return what was done.

        The message has the state that is wanted, because the same message may come twice. It may
        have the corrected label, or a note, as they were typed.
        """
        mark, wanted = str(message["mark"]), bool(message["wanted"])
        texts = {name: message[name] for name in ("label", "note") if name in message}
        if self._marks is None:
            raise ValueError("No marks are kept here.")
        if "of" in message:
            with Computation(self.questions.client).active():
                positions = self.questions.listed(self.view, str(message["of"])).index.tolist()
        else:
            n = len(self.questions.training.metadata)
            positions = [require_integer("sample", message["sample"], 0, n, remedy="try 0")]
        is_one = len(positions) == 1
        what = f"sample {positions[0]}" if is_one else count(len(positions), "sample")
        ids = self.questions.sample_ids[positions].tolist()
        if (self._marks.mark if wanted else self._marks.unmark)(ids, mark, **texts):
            self._changes.append(what)
        if texts:
            return f"The {' and the '.join(texts)} of {what} is kept."
        marked = f"marked as {mark}" if wanted else f"no longer marked as {mark}"
        return f"{what.capitalize()} {'is' if is_one else 'are'} {marked}."

    def _undo(self) -> str:
        """Take back the last change that was made here; return what was done."""
        if self._marks is None or not self._changes:
            return "There is nothing to undo."
        has_changed = self._marks.undo()
        what = self._changes.pop()
        if not has_changed:
            return "Somebody else has undone this already."
        return f"The last change of {what} is undone."

    def _marked(self) -> list[str]:
        """Return the positions of marked samples with their marks."""
        with suppress(OSError, ValueError):  # the error is shown when somebody marks a sample
            table = self.questions.marked()
            return [f"{position} {mark}" for position, mark in table[["position", "mark"]].values]
        return []

    def _say(self, change: Callable[[], str], *, is_drawn: bool = False) -> None:
        """Change marks, and say what was done, or what went wrong."""
        try:
            text = change()
        except Exception as err:
            text = plain_message(err)
        self.marked = self._marked()
        self.said = {"text": text, "undo": len(self._changes), "answered": self._answered}
        if self.view.page == "marks" and not is_drawn:
            self.go(self.view)


# --------------------------------------------------------------------------------------- server


def server(app: Callable[[], Any], *, host: str = "127.0.0.1", port: int = 0) -> tuple[Server, str]:
    """Return a server of an app that listens, but has not been started, and its address.

    It belongs to the current event loop; see :meth:`trakdask.explorer.Explorer.serve`.
    """
    port = require_integer("port", port, 0, 2**16, remedy="try port=0, which takes a free one")
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    listening = get_server(
        {"/": app}, port, host, title="trakdask", prefix=token, ico_path="none",
        extra_patterns=[("/favicon.ico", _Nothing, {"status": 204})],
        default_handler_class=_Nothing, log_function=_log,
        location=False,  # Panel's parser of addresses fails at some of them; the app reads its own
    )  # fmt: skip
    for rule in listening._tornado.wildcard_router.rules:
        rule.target = _Page if rule.target is DocHandler else rule.target
    # The token protects the websocket, under whatever name of this machine a browser knows it.
    listening._tornado.websocket_origins.add("*")
    all_of_this_machine = ("0.0.0.0", "::")
    name = "127.0.0.1" if host in all_of_this_machine else f"[{host}]" if ":" in host else host
    return listening, f"http://{name}:{listening.port}/{token}/"


class _Page(DocHandler):
    """Answers with the page; with the status 400 where it says what is wrong with its address."""

    async def get_session(self) -> ServerSession:  # type: ignore[override]
        # Panel and Bokeh have parameters of their own, such as the name of somebody's session.
        self.request.arguments.clear()
        session: ServerSession = await super().get_session()  # type: ignore[misc]
        if session.document.template_variables["errors"]:
            self.set_status(400)
        return session


class _Nothing(RequestHandler):
    """Answers requests for an icon, and requests that do not begin with the token."""

    def initialize(self, status: int = 403) -> None:
        self._status = status

    def prepare(self) -> None:
        self.set_status(self._status)
        why = "The address lacks the token that the server printed when it was started.\n"
        self.finish(why if self._status == 403 else None)


def _log(handler: Any) -> None:
    """Log errors of the server, and not each request that was refused."""
    if handler.get_status() >= 500:
        # Without the address, which has the token.
        what = handler.get_status(), type(handler).__name__
        logging.getLogger(__name__).error("the status %s was answered by %s", *what)
