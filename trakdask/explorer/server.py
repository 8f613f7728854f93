"""The server of the explorer, whose address nobody can guess."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Any

from bokeh.server.session import ServerSession
from panel.io.server import DocHandler, Server, get_server
from tornado.web import RequestHandler

from trakdask.checks import require_integer

_TOKEN_BYTES = 24


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
