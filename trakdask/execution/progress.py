"""Show a progress bar on any scheduler by counting completed work, whichever process did it."""

from __future__ import annotations

import logging
import threading
import time
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
    with _bar(title, total, done) as update:
        stop = threading.Event()
        poller = threading.Thread(target=_poll, args=(update, count, stop), daemon=True)
        poller.start()
        try:
            yield
        finally:
            stop.set()
            poller.join()
            update(count())


def _poll(update: Callable[[int], object], count: Callable[[], int], stop: threading.Event) -> None:
    wait = _INTERVAL_S
    while not stop.wait(wait):
        start = time.monotonic()
        try:
            update(count())
        except Exception as err:  # if it persists, the computation itself fails, too
            _log.info("could not count the completed work: %s", err)
        wait = max(_INTERVAL_S, _SHARE * (time.monotonic() - start))


@contextmanager
def _bar(title: str, total: int, done: int) -> Iterator[Callable[[int], object]]:
    """Show a bar, and give the function that updates it."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # Set here and not by an update: earlier work would distort the estimated speed.
    task = progress.add_task(title, total=total, completed=done)
    if not progress.console.is_jupyter:
        with progress:
            yield lambda done: progress.update(task, completed=done)
        return
    from IPython.display import display  # always installed in a notebook

    # Displayed here, because rich would need ipywidgets for a bar that moves.
    shown = display(progress.make_tasks_table(progress.tasks), display_id=True)

    def update(done: int) -> None:
        progress.update(task, completed=done)
        shown.update(progress.make_tasks_table(progress.tasks))

    yield update
