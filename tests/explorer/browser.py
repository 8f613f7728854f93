"""A browser and a server for tests that click: see test_in_browser.py."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from trakdask.explorer import Explorer
from trakdask.explorer.server import server

CHROMIUM = "chromium"
PATIENCE_MS = 60_000
"""No test may fail because the machine is slow."""


@contextmanager
def served(explorer: Explorer) -> Iterator[str]:
    """Serve an explorer in a thread of this process; yield its address."""
    started: list[Any] = []
    ready = threading.Event()

    def run() -> None:
        asyncio.set_event_loop(asyncio.new_event_loop())
        try:
            made, url = server(explorer)
            made.start()
            started.extend([made, url])
        finally:
            ready.set()
        made.io_loop.start()
        made.stop()
        made.io_loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    made, url = started
    try:
        yield url
    finally:
        made.io_loop.add_callback(made.io_loop.stop)
        thread.join()


@contextmanager
def chromium() -> Iterator[Any]:
    """Start the installed Chromium, without its network; skip where it or Playwright is absent."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = shutil.which(CHROMIUM)
    if path is None:
        pytest.skip(f"no browser: {CHROMIUM} is not installed")
    with playwright.sync_playwright() as started:
        # Without a sandbox, as root may not have one; pages are our own.
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A tab of its own user; fails at its end if the page asked another host or had an error."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog {dialog.message}"))
        self.page.on("console", self._console)

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def foreign(self) -> list[str]:
        """Return what was asked of another host than this one."""
        own = ("http://127.0.0.1:", "data:", "blob:", "file:")
        return [url for url in self.requests if not url.startswith(own)]
