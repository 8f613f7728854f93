"""The server: nothing without the token, nothing beyond this machine unless asked."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

import psutil
import pytest

import trakdask as td
from tests.explorer.browser import served
from tests.explorer.sessions import data
from tests.waiting import PATIENCE_S
from trakdask.explorer import Explorer
from trakdask.explorer.app import server


def explorer() -> Explorer:
    return td.explore(data(12, 0), data(12, 1), estimator=td.Trak(damping=0.1))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(explorer()) as url:
        yield url


def answer(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as err:
        with err:
            return err.code, err.read()


FILES = ["static/js/bokeh.min.js", "static/extensions/panel/panel.min.js"]
PATHS = ["", "ws", "metadata", "autoload.js", "components/x", "rest", "x/", *FILES]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"target": "9" * 5000}, 400), ({"k": ["3", "3"]}, 400), ({"search": b"\xff"}, 400),
        ({"sort": "output", "group_by": "label", "search": "²", "other": "9" * 5000}, 200),
        ({"theme": b"\xff", "bokeh-session-id": b"\xff"}, 200),  # which Bokeh and Panel would read
    ],
)  # fmt: skip
def test_server__answers_addresses_that_cannot_be_understood_with_400(
    url: str, query: dict[str, Any], expected: int
) -> None:
    status, content = answer(f"{url}?{urlencode(query, doseq=True)}")
    assert status == expected
    assert b"<script" in content  # the page, which says what is wrong


def test_server__refuses_whoever_has_it_not(url: str) -> None:
    base, token = url.rsplit("/", 2)[:2]
    for prefix in ("", "wrong/", f"{token[:-1]}/", f"{token.swapcase()}/"):
        for path in PATHS:
            status, content = answer(f"{base}/{prefix}{path}")
            assert status == 403, (prefix, path)
            assert token.encode() not in content
    for path in FILES:
        assert answer(url + path)[0] == 200


def test_server__websocket_needs_the_token(url: str) -> None:
    parts = urlsplit(url)
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Origin": f"http://{parts.netloc}",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Protocol": "bokeh, none",
        "Sec-WebSocket-Version": "13",
    }

    def status(path: str) -> int:
        with closing(HTTPConnection(parts.netloc, timeout=PATIENCE_S)) as connection:
            connection.request("GET", f"{path}ws", headers=headers)
            with connection.getresponse() as response:
                return response.status

    assert status("/") == 403
    assert status("/wrong/") == 403
    assert status(parts.path) == 101


def test_server__listens_on_this_machine_only_and_has_another_token_each_time(url: str) -> None:
    with served(explorer()) as other:
        assert urlsplit(other).path != urlsplit(url).path
        ports = {urlsplit(address).port for address in (url, other)}
        hosts = {
            socket.laddr.ip
            for socket in psutil.Process().net_connections("tcp")
            if socket.status == psutil.CONN_LISTEN and socket.laddr.port in ports
        }
    assert hosts == {"127.0.0.1"}
    assert len(urlsplit(url).path.strip("/")) == 32  # 192 bits


# Tornado leaves a socket that it could not bind to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_server__of_a_port_that_is_taken_and_an_address_of_no_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        server(explorer().app, port=taken.getsockname()[1])
    with pytest.raises(OSError, match="known"):
        server(explorer().app, host="no-such-host.invalid")
    with pytest.raises(ValueError, match="got 65536"):
        server(explorer().app, port=65536)
