"""Bars: how much of a computation is done, and how long the rest takes."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from trakdask.checks import require_flags
from trakdask.execution import active_client

_COMPUTED = "trakdask-computed"
_INTERVAL_S = 0.5
_EARLIEST_S = 10.0
"""How long a bar measures before anything is estimated."""

_SHARE = 20
"""Times as long as counting takes, the bar waits."""

# Of the process and not of the context: threads of Dask run tasks without the context of the `with`
# body that shows a bar.
_SHARES: dict[str, dict[str, float]] = {}
"""How much of each block is computed, by the names of the graphs whose blocks a bar counts."""

_GRAPHS: ContextVar[list[str] | None] = ContextVar("graphs", default=None)
"""The names of the graphs that the bar of this context counts; None if it has none."""

_log = logging.getLogger(__name__)


def counted(graph: str) -> str:
    """Return the name by which a bar counts the blocks of a graph, "" if no bar does."""
    if (graphs := _GRAPHS.get()) is None:
        return ""
    if graph not in graphs:
        graphs.append(graph)
    # Tasks may come before the first count: of graphs that are not in here, nothing is noted.
    _SHARES.setdefault(graph, {})
    return graph


def skipped(name: str, n_blocks: int) -> None:
    """Tell the bar of this context that some blocks need not be computed."""
    if counted(name):
        _note_here(name, "", n_blocks)


def note_share(graph: str, what: str, share: float) -> None:
    """Tell the bar that counts the blocks of a graph how much of one of them is computed."""
    from distributed import get_worker

    # On a worker the bar is in another process. Elsewhere `get_worker` raises a ValueError.
    with suppress(ValueError):
        get_worker().log_event(_COMPUTED, (graph, what, share))
    _note_here(graph, what, share)


def _note_here(graph: str, what: str, share: float) -> None:
    if graph in _SHARES:  # a block that is computed again begins anew
        _SHARES[graph][what] = max(share, _SHARES[graph].get(what, 0))


def duration(seconds: float) -> str:
    """Return about how long something takes, as people say it.

    Examples
    --------
    >>> duration(0.123), duration(48.3), duration(300), duration(8000)
    ('0.12 s', '48 s', '5 min', '2.2 h')
    """
    # A unit is used from one and a half of it on: 80 seconds are said as such, not as 1.3 minutes.
    units = ("h", 3600), ("min", 60), ("s", 0.0)
    unit, size = next((unit, size or 1) for unit, size in units if seconds >= 1.5 * size)
    value = seconds / size
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


@contextmanager
def polled_bar(
    title: str, total: int, count: Callable[[], float], *, show: bool = True
) -> Iterator[Callable[[str], object]]:
    """Show ``count()`` out of ``total`` while the ``with`` body runs, updated twice a second.

    The count is of completed work in the store, so the bar is the same on threads, processes and a
    cluster, and is correct after a restart. Counting takes at most a twentieth of the time: if
    listing the store is slow, the bar is updated less often. The remaining time is estimated from
    the work completed since the bar appeared. The title counts the blocks that were stored before.
    Gives a function that prints above the bar.
    """
    require_flags(progress=show)
    if not show:
        yield lambda text: None
        return
    done = count()
    title = f"{title} ({done} of {total} were stored before)" if done else title
    stop = threading.Event()
    with _bar(title, total, done) as (update, say):

        def poll() -> None:
            wait = _INTERVAL_S
            while not stop.wait(wait):
                start = time.monotonic()
                try:
                    update(count())
                except Exception as err:  # if it persists, the computation itself fails, too
                    _log.info("could not count the completed work: %s", err)
                wait = max(_INTERVAL_S, _SHARE * (time.monotonic() - start))

        # A thread, because this one waits for Dask in the `with` body.
        poller = threading.Thread(target=poll, daemon=True)
        poller.start()
        try:
            yield say
        finally:
            stop.set()
            poller.join()
            update(count())


@contextmanager
def block_bar(
    title: str,
    total: int,
    *,
    show: bool = True,
    estimate: Callable[[float, float], str] = lambda left_s, block_s: "",
) -> Iterator[None]:
    """Show how many blocks of samples are computed, of the graphs that the ``with`` body builds.

    Their tasks say so after each micro-batch, in this process or through the scheduler, so the bar
    moves as they do, and is the same on threads and on a cluster. What ``estimate`` makes of the
    seconds that are left, and those that a block takes, is printed once, when blocks have been
    computed for ten seconds.
    """
    if not show:
        yield
        return
    graphs: list[str] = []
    is_done, token = threading.Event(), _GRAPHS.set(graphs)
    if (client := active_client()) is not None:
        client.subscribe_topic(_COMPUTED, lambda event: _note_here(*event[1]))
    say, begun = list[Callable[[str], object]](), list[tuple[float, float]]()

    def count() -> float:
        # A copy: threads of tasks add blocks meanwhile. Skipped ones have no name. They are done,
        # but say nothing about the time of a block.
        blocks = [pair for graph in graphs for pair in [*_SHARES[graph].items()]]
        done, computed = (sum(x for what, x in blocks if what or all_) for all_ in (True, False))
        now = time.monotonic()
        if computed and not begun:  # what comes before the first micro-batch comes once
            begun.append((now, computed))
        elif say and begun and now - begun[0][0] >= _EARLIEST_S and computed > begun[0][1]:
            block_s = (now - begun[0][0]) / (computed - begun[0][1])
            if text := estimate((total - done) * block_s, block_s):
                say[0](text)
            say.clear()
        return total if is_done.is_set() else done

    try:
        with polled_bar(title, total, count, show=show) as print_above:
            say.append(print_above)
            yield
            is_done.set()  # what the last tasks said may be on its way
    finally:
        _GRAPHS.reset(token)
        for graph in graphs:
            _SHARES.pop(graph, None)


@contextmanager
def _bar(
    title: str, total: int, done: float
) -> Iterator[tuple[Callable[[float], object], Callable[[str], object]]]:
    """Show a bar, and give a function that updates it, and one that prints above it."""
    # Here, because tasks on workers show no bar, and need not import this.
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = *Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()
    progress = Progress(*columns, speed_estimate_period=math.inf)  # a block may take minutes
    # Set here and not by an update: earlier work would distort the estimated speed.
    task = progress.add_task(title, total=total, completed=int(done))
    if not progress.console.is_jupyter:
        with progress:
            yield lambda done: progress.update(task, completed=done), progress.console.print
        return
    from IPython.display import display  # always installed in a notebook

    # Displayed here, because rich would need ipywidgets for a bar that moves.
    shown = display(progress.make_tasks_table(progress.tasks), display_id=True)

    def update(done: float) -> None:
        progress.update(task, completed=done)
        shown.update(progress.make_tasks_table(progress.tasks))

    yield update, print
