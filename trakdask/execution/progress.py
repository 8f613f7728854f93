"""Show a progress bar on any scheduler by counting completed work, whichever process did it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol

import rich
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["polled_bar"]

_INTERVAL_S = 0.5
_SHARE = 20

_log = logging.getLogger(__name__)


@contextmanager
def polled_bar(
    title: str, total: int, count: Callable[[], int], *, show: bool = True
) -> Iterator[None]:
    """Show ``count()`` out of ``total`` while the ``with`` body runs, updated twice a second.

    The count is of completed work in the store, so the bar is the same on threads, processes and a
    cluster, and is correct after a restart. Counting takes at most a twentieth of the time: if
    listing the store is slow, the bar is updated less often. The remaining time is estimated from
    the work completed since the bar appeared. The title says what is resumed.
    """
    if not show:
        yield
        return
    done = count()
    title = f"{title} ({done} of {total} were stored before)" if 0 < done < total else title
    with _bar(title, total, done) as bar:
        stop = threading.Event()
        poller = threading.Thread(target=_poll, args=(bar, count, stop), daemon=True)
        poller.start()
        try:
            yield
        finally:
            stop.set()
            poller.join()
            bar.update(count())


def _clock(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))


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
    wait = _INTERVAL_S
    while not stop.wait(wait):
        start = time.monotonic()
        try:
            bar.update(count())
        except Exception as err:  # if it persists, the computation itself fails, too
            _log.info("could not count the completed work: %s", err)
        wait = max(_INTERVAL_S, _SHARE * (time.monotonic() - start))


def _bar(title: str, total: int, done: int) -> _Bar:
    is_notebook = rich.get_console().is_jupyter
    return _NotebookBar(title, total, done) if is_notebook else _TerminalBar(title, total, done)


class _TerminalBar:
    def __init__(self, title: str, total: int, done: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns)
        # Set here and not by an update: earlier work would distort the estimated speed.
        self._task = self._progress.add_task(title, total=total, completed=done)

    def update(self, done: int) -> None:
        self._progress.update(self._task, completed=done)

    def __enter__(self) -> _TerminalBar:
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()


class _NotebookBar:
    """An HTML progress bar, updated in place; rich would need ipywidgets for that."""

    def __init__(self, title: str, total: int, done: int) -> None:
        self._title, self._total, self._before = title, total, done
        self._start = time.monotonic()
        self._handle: Any = None
        self.update(done)

    def update(self, done: int) -> None:
        from IPython.display import HTML, display  # always installed in a notebook

        seconds = time.monotonic() - self._start
        rate = (done - self._before) / seconds if seconds else 0
        left = f", {_clock((self._total - done) / rate)} left" if rate else ""
        bar = f'<progress value="{done}" max="{self._total}"></progress>'
        shown = HTML(f"{self._title} {bar} {done}/{self._total} {_clock(seconds)}{left}")
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def __enter__(self) -> _NotebookBar:
        return self

    def __exit__(self, *_: Any) -> None: ...
