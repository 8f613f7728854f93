"""Sessions of the app without a browser, for tests of what a click changes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from html import unescape
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

import trakdask as td
from tests.waiting import PATIENCE_S
from trakdask.explorer import Explorer
from trakdask.explorer.app import Session
from trakdask.explorer.view import View

N, M = 60, 30


TRAK = td.Trak(damping=0.1)


SCRIPT = "<script>alert(1)</script>"


def data(n: int, seed: int) -> xr.Dataset:
    features = td.testing.simulate_features(n, 8, 3, seed=seed)
    source = np.array([SCRIPT, "web & co", "'book\""])[np.arange(n) % 3]
    return features.assign_coords(source=("sample", source))


def wait(session: Session) -> None:
    """Wait until the page is complete."""
    session._thread.join(PATIENCE_S)


def opened(explorer: Explorer, view: View) -> Session:
    session = Session(explorer, view)
    assert session._thread is None  # what it changed before a browser shows it would be lost
    assert 'aria-busy="true"' in session.html
    session._handle_msg({"shown": True})
    wait(session)
    assert 'aria-busy="true"' not in session.html
    return session


def show(session: Session, view: View) -> None:
    """Show another page, and wait until it is complete."""
    session.go(view)
    wait(session)


def links(html: str) -> list[tuple[View, str]]:
    """Return the views that a page links to, and the texts of the links."""
    found = re.findall(r'<a [^>]*href="\?([^"]*)"[^>]*>(.*?)</a>', html, re.DOTALL)
    plain = [(href, re.sub("<[^>]*>", "", text)) for href, text in found]
    return [(View.from_query(unescape(href)), unescape(text)) for href, text in plain]


def best(target: int) -> list[int]:
    """Return the ten samples that helped a target most."""
    scores = td.score(data(N, 0), data(M, 1), TRAK).values[:, target]
    return [int(i) for i in np.argsort(-scores)[:10]]


def cards(session: Session) -> list[int]:
    return [int(i) for i in re.findall(r"<a [^>]*>sample (\d+)</a></header>", session.html)]


def through(function: Callable[..., Any], features: xr.Dataset, *arguments: Any) -> xr.Dataset:
    """Return features whose blocks go through a function."""
    x = features.feature.data
    lazy = da.map_blocks(function, x, *arguments, dtype=x.dtype, meta=x._meta)
    return features.assign(feature=(features.feature.dims, lazy))


class Gate:
    """Lets a function of blocks or images begin, and waits until the test opens the gate."""

    def __init__(self, function: Callable[[Any], Any] = np.copy) -> None:
        self._function = function
        self.started, self._opened = threading.Event(), threading.Event()

    def __call__(self, value: Any) -> Any:
        self.started.set()
        assert self._opened.wait(PATIENCE_S)
        return self._function(value)

    def open(self) -> None:
        self._opened.set()

    def before(self, features: xr.Dataset) -> xr.Dataset:
        """Return features whose blocks wait."""
        return through(self, features)


def go(session: Session, message: dict[str, Any]) -> str:
    """Send what a browser would, and return the page when it is complete."""
    session._handle_msg(message)
    wait(session)
    return str(session.html)
