"""One progress bar for every scheduler: it counts what is done, whoever does it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    stop = threading.Event()
    with bar:
        task = bar.add_task(title, total=total, completed=count())
        poller = threading.Thread(target=_poll, args=(bar, task, count, stop), daemon=True)
        poller.start()
        try:
            yield
        finally:
            stop.set()
            poller.join()
            bar.update(task, completed=count())


def _poll(bar: Progress, task: object, count: Callable[[], int], stop: threading.Event) -> None:
    while not stop.wait(_INTERVAL_S):
        bar.update(task, completed=count())  # type: ignore[arg-type]
