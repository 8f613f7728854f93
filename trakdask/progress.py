"""One progress bar for every scheduler: it counts what is done, whoever does it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol

import rich
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["polled_bar"]

_INTERVAL_S = 0.5


@contextmanager
def polled_bar(
    title: str, total: int, count: Callable[[], int], *, show: bool = True
) -> Iterator[None]:
    """Show ``count()`` of ``total`` while the block runs, asked for twice a second.

    The count is of completed work in the store, so the bar is the same on threads, processes and a
    cluster, and right after a restart.
    """
    if not show:
        yield
        return
    with _bar(title, total) as bar:
        bar.update(count())
        stop = threading.Event()
        poller = threading.Thread(target=_poll, args=(bar, count, stop), daemon=True)
        poller.start()
        try:
            yield
        finally:
            stop.set()
            poller.join()
            bar.update(count())


class _Bar(Protocol):
    def update(self, done: int) -> None: ...

    def __enter__(self) -> _Bar: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def _poll(bar: _Bar, count: Callable[[], int], stop: threading.Event) -> None:
    while not stop.wait(_INTERVAL_S):
        bar.update(count())


def _bar(title: str, total: int) -> _Bar:
    is_notebook = rich.get_console().is_jupyter
    return _NotebookBar(title, total) if is_notebook else _TerminalBar(title, total)


class _TerminalBar:
    def __init__(self, title: str, total: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns)
        self._task = self._progress.add_task(title, total=total)

    def update(self, done: int) -> None:
        self._progress.update(self._task, completed=done)

    def __enter__(self) -> _TerminalBar:
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()


class _NotebookBar:
    """An HTML bar that is updated in place; rich needs ipywidgets for that."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = title, total
        self._start = time.monotonic()
        self._handle: Any = None

    def update(self, done: int) -> None:
        from IPython.display import HTML, display  # there is a notebook, so there is IPython

        elapsed = timedelta(seconds=round(time.monotonic() - self._start))
        bar = f'<progress value="{done}" max="{self._total}"></progress>'
        shown = HTML(f"{self._title} {bar} {done}/{self._total} {elapsed}")
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def __enter__(self) -> _NotebookBar:
        return self

    def __exit__(self, *_: Any) -> None: ...
