"""A browser and a server for tests that click: see test_in_browser.py."""

from __future__ import annotations

import asyncio
import queue
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.waiting import PATIENCE_S
from trakdask.explorer import Explorer
from trakdask.explorer.app import server

CHROMIUM = "chromium"


@contextmanager
def served(explorer: Explorer, port: int = 0) -> Iterator[str]:
    """Serve an explorer in a thread of this process; yield its address."""
    started: queue.Queue[Any] = queue.Queue()

    def run() -> None:
        asyncio.set_event_loop(asyncio.new_event_loop())
        made, url = server(explorer.app, port=port)
        made.start()
        started.put((made, url))
        made.io_loop.start()
        made.stop()
        made.io_loop.close(all_fds=True)

    thread = threading.Thread(target=run)
    thread.start()
    made, url = started.get(timeout=PATIENCE_S)
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
    """A tab of a user of its own.

    At its end it fails if the page has asked another host for anything, or had an error.
    """

    def __init__(self, browser: Any, *, width: int = 1280, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE_S)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(dialog.message))
        self.page.on("console", self._listen)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.context.close()
        if kind is None:
            assert self.errors == []
            allowed = ("http://127.0.0.1:", "data:", "blob:", "file:")
            assert [url for url in self.requests if not url.startswith(allowed)] == []

    def _listen(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def open(self, url: str, title: str = "") -> None:
        """Go to an address, and wait until the page is complete."""
        self.page.goto(url)
        self.wait(title)

    def wait(self, title: str = "") -> None:
        """Wait until every section of the page with this title is computed."""
        self.page.wait_for_selector(f"h1:has-text('{title}')")
        self.page.wait_for_function(
            f"() => {{ {ROOT}; const all = [...root.querySelectorAll('section')];"
            " return all.length && all.every(section => section.ariaBusy !== 'true') }"
        )

    def cards(self, title: str) -> list[int]:
        """Return the positions of the samples in a section, in their order."""
        section = self.page.locator(f"section:has(h2:text-is('{title}'))")
        texts = section.locator("article header").all_inner_texts()
        return [int(re.search(r"sample (\d+)", text)[1]) for text in texts]  # type: ignore[index]

    def press_until(self, kind: str, text: str) -> None:
        """Press the tabulator until the focus is on what has this text, or has come round."""
        self.page.evaluate("window.first = undefined")
        comes_round = False
        while not comes_round:
            self.page.keyboard.press("Tab")
            comes_round, focused = self.page.evaluate(
                f"""() => {{ {ROOT}
                let at = document.activeElement
                while (at.shadowRoot?.activeElement) at = at.shadowRoot.activeElement
                const round = at === window.first
                window.first ??= at
                return [round, root.contains(at) ? [at.localName, at.innerText] : null] }}"""
            )
            if focused == [kind, text]:
                return
        raise AssertionError(f"the keyboard does not reach {kind} {text!r}")

    def violations(self) -> list[str]:
        """Return what axe-core calls critical or serious, such as text of too little contrast."""
        rules = Axe().run(self.page).response["violations"]
        return [
            f"{rule['id']}: {node['html']}"
            for rule in rules
            if rule["impact"] in ("critical", "serious")
            for node in rule["nodes"]
        ]


ROOT = """
const find = node => {
  for (const each of node.querySelectorAll("*")) {
    if (each.matches(".trakdask")) return each
    const inner = each.shadowRoot && find(each.shadowRoot)
    if (inner) return inner
  }
}
const root = find(document)
"""
"""Finds the page, which is inside the shadow trees of Panel."""
