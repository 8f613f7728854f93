"""A local server for the explorer, whose address nobody can guess."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

from panel.io.server import Server, get_server
from tornado.web import RequestHandler

from trakdask.checks import require_integer, shown
from trakdask.files import explained

__all__ = ["server"]

_TOKEN_BYTES = 24
_NOTHING = 204


def server(app: Callable[[], Any], *, host: str = "127.0.0.1", port: int = 0) -> tuple[Server, str]:
    """Return a server of an app that listens, but has not been started, and its address.

    It belongs to the current event loop; see :meth:`trakdask.explorer.Explorer.serve`.
    """
    if not isinstance(host, str):
        raise TypeError(f"expected host as text, got {shown(host)}; try host='127.0.0.1'")
    port = require_integer("port", port, 0, 2**16, remedy="try port=0, which takes a free one")
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    try:
        listening = get_server(
            {"/": app}, port, host, title="trakdask", prefix=token, ico_path="none",
            extra_patterns=[("/favicon.ico", _NoIcon)], default_handler_class=_Refused,
            log_function=_log,
        )  # fmt: skip
    except OSError as err:
        text = (
            f"expected an address of this machine and a free port, got {host}:{port} ({err}); try "
            "host='127.0.0.1', port=0"
        )
        raise explained(err, text) from err
    # The token protects the websocket, under whatever name of this machine a browser knows it.
    listening._tornado.websocket_origins.add("*")
    return listening, f"http://{_in_url(host)}:{listening.port}/{token}/"


def _in_url(host: str) -> str:
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1"
    return f"[{host}]" if address.version == 6 else host


class _Refused(RequestHandler):
    """Answers whatever does not begin with the token."""

    def prepare(self) -> None:
        self.set_status(403)
        self.finish("The address lacks the token that the server printed when it was started.\n")


class _NoIcon(RequestHandler):
    def get(self) -> None:
        self.set_status(_NOTHING)


def _log(handler: Any) -> None:
    """Log errors of the server, and not each request that was refused."""
    if handler.get_status() >= 500:
        # Without the address, which has the token.
        what = handler.get_status(), type(handler).__name__
        logging.getLogger(__name__).error("the status %s was answered by %s", *what)
