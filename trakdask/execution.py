"""Run work on the active scheduler: retries, resources, errors that name a block, a bar."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import dask
import xarray as xr
from dask.base import get_scheduler
from dask.utils import format_bytes

from trakdask.checks import require_integer
from trakdask.errors import BlockError

if TYPE_CHECKING:  # functions import distributed, which takes half a second and threads do not need
    from distributed import Client, KilledWorker
    from distributed.diagnostics.plugin import SchedulerPlugin

GRADIENTS, ON_CPU = "featurize-", "featurize-cpu-"
"""What the keys of tasks contain that take gradients, and of those that do so on a CPU in any case.

The key of a task that Dask has fused of several has all of their names.
"""

_STARTED, _COMPUTED = "trakdask-started", "trakdask-computed"
_INTERVAL_S = 0.5
_EARLIEST_S = 10.0
"""How long a bar measures before anything is estimated."""

_SHARE = 20
"""Times as long as counting takes, the bar waits."""

_LEAST_WORKER = 2**28
"""No worker has less memory, so that nobody need be asked for its limit."""

_KNOWN: WeakSet[Client] = WeakSet()
"""Clients whose schedulers send gradient tasks to GPU workers."""

_SHARES: dict[str, dict[str, float]] = {}
"""How much of each block is computed, by the names of the graphs whose blocks a bar counts."""

_GRAPHS: ContextVar[list[str] | None] = ContextVar("graphs", default=None)
"""The names of the graphs that the bar of this context counts; None if it has none."""

_log = logging.getLogger(__name__)


def run(
    submission: Callable[[], Any],
    *,
    retries: int,
    compute: Callable[..., Any] = dask.compute,
) -> Any:
    """Compute the tasks that are still missing, and retry after transient errors.

    Parameters
    ----------
    submission
        Builds the tasks that are still missing; returns None if there are none.
    retries
        Number of further attempts. On a cluster each task is retried on its own; elsewhere all
        tasks that are still missing are submitted again.
    compute
        Computes the tasks; called with ``retries=`` on a cluster.

    Returns
    -------
    The result of ``compute``, or None if no task was missing.

    Raises
    ------
    BlockError
        If a block kills every worker process that computes it.
    """
    from distributed import KilledWorker

    require_integer("retries", retries, 0, remedy="try retries=0")
    cluster = active_client()
    attempts = 1 if cluster else retries + 1
    for left in reversed(range(attempts)):
        work = submission()
        if work is None:
            return None
        try:
            return compute(work, **({"retries": retries} if cluster else {}))
        except KilledWorker as err:
            raise BlockError(_killed(err, cluster)) from err
        except Exception as err:
            if not left:
                raise
            _log.warning("%s: %s; %d more attempts", type(err).__name__, err, left)
    raise AssertionError("the last attempt returns or raises")


def active_client() -> Client | None:
    """Return the client that dask would compute on, if any.

    From then on, its scheduler sends gradient tasks to workers that declare a GPU, whoever computes
    them and whenever. Annotations could not do that: Dask drops those of the tasks that it fuses.
    """
    if "distributed" not in sys.modules:  # dask would import it to ask
        return None
    client = getattr(get_scheduler(), "__self__", None)
    if client is None:
        return None
    from distributed import Client

    if not isinstance(client, Client):
        return None
    if client not in _KNOWN and not client.asynchronous:
        _KNOWN.add(client)
        client.register_plugin(_gradients_to_gpus())
    return client


def _gradients_to_gpus() -> SchedulerPlugin:
    """Return a plugin for the scheduler, which need not have trakdask: it is sent by value."""
    from distributed.diagnostics.plugin import SchedulerPlugin

    class GradientsToGPUs(SchedulerPlugin):
        name = "trakdask-gradients-to-gpus"
        idempotent = True

        def update_graph(self, scheduler: Any, *, tasks: Any, **_: Any) -> None:
            if not any(worker.resources.get("GPU") for worker in scheduler.workers.values()):
                return  # they would wait for one
            for key in tasks:
                task = scheduler.tasks[key]
                if task.state == "released" and GRADIENTS in str(key) and ON_CPU not in str(key):
                    task.resource_restrictions = task.resource_restrictions or {"GPU": 1}

    return GradientsToGPUs()


def workers_of(client: Client) -> dict[str, Any]:
    """Return the scheduler's record of each worker, by address.

    The scheduler is asked itself: another thread replaces what ``client.scheduler_info`` was told,
    every few seconds, by an answer without workers.
    """
    assert client.scheduler is not None
    return client.sync(client.scheduler.identity, n_workers=-1)["workers"]


def gpu_options(features: xr.Dataset) -> dict[str, Any]:
    """Return options of ``submit`` by which a task runs where gradients of features are taken.

    Empty, unless a worker of the active client was started with ``resources={"GPU": ...}`` and the
    features are not for a CPU.

    Examples
    --------
    >>> gpu_options(xr.Dataset(attrs={"device": "auto"}))
    {}
    """
    client = active_client()
    if client is None or features.attrs.get("device", "cpu") == "cpu":
        return {}
    declared = any(worker["resources"].get("GPU") for worker in workers_of(client).values())
    return {"resources": {"GPU": 1}} if declared else {}


def n_slots(resources: Mapping[str, int] | None = None) -> int:
    """Return how many tasks that need the resources the active scheduler runs at once.

    Examples
    --------
    >>> with dask.config.set(scheduler="sync"):
    ...     n_slots()
    1
    """
    client = active_client()
    if client is not None:
        return sum(_slots(worker, resources or {}) for worker in workers_of(client).values())
    if get_scheduler() is dask.local.get_sync:
        return 1
    return int(dask.config.get("num_workers", None) or dask.system.CPU_COUNT)


def _slots(worker: Mapping[str, Any], resources: Mapping[str, int]) -> int:
    available = worker["resources"]
    fits = (int(available.get(name, 0) // amount) for name, amount in resources.items())
    return int(min((worker["nthreads"], *fits)))


def require_memory(n_bytes: int, what: str, remedy: str, *, here: bool = False) -> None:
    """Refuse a task that no worker of the active client, or this machine, has the memory for.

    Parameters
    ----------
    n_bytes
        A bound of :mod:`trakdask.arrays.memory`.
    what, remedy
        Texts of the error: the array that takes so much, and what to try.
    here
        Whether it runs in this process, and not on workers.

    Raises
    ------
    MemoryError
        If it needs more than the worker with the most memory has.

    Examples
    --------
    >>> require_memory(10**15, "a task of the gram matrix", "try fewer columns")
    ... # doctest: +ELLIPSIS
    Traceback (most recent call last):
    MemoryError: expected 909.49 TiB of memory for a task of the gram matrix, got ...
    """
    if n_bytes > _LEAST_WORKER and n_bytes > (most := memory_limit(here=here)):
        raise MemoryError(
            f"expected {format_bytes(n_bytes)} of memory for {what}, got {format_bytes(most)}; "
            f"{remedy}"
        )


def memory_limit(*, here: bool = False) -> int:
    """Return the memory of the largest worker of the active client, or without one of this machine.

    Examples
    --------
    >>> memory_limit() > 2**28
    True
    """
    from distributed.system import MEMORY_LIMIT

    client = None if here else active_client()
    workers = workers_of(client).values() if client else ()
    most = max((worker["memory_limit"] for worker in workers), default=0)
    return int(most or MEMORY_LIMIT)  # a worker without a limit has 0


def note_start(what: str) -> None:
    """Record on the scheduler the task that this worker starts, so that an error can name it.

    The scheduler itself blames every task that was waiting on the worker that died.
    """
    from distributed import get_worker

    with suppress(ValueError):  # this process is not a worker
        get_worker().log_event(_STARTED, {"what": what})


def counted(graph: str) -> str:
    """Return the name by which a bar counts the blocks of a graph, "" if no bar does."""
    if (graphs := _GRAPHS.get()) is None:
        return ""
    if graph not in graphs:
        graphs.append(graph)
    _SHARES.setdefault(graph, {})
    return graph


def skipped(name: str, n_blocks: int) -> None:
    """Tell the bar of this context that some blocks need not be computed."""
    if counted(name):
        _note_here(name, "", n_blocks)


def note_share(graph: str, what: str, share: float) -> None:
    """Tell the bar that counts the blocks of a graph how much of one of them is computed."""
    from distributed import get_worker

    with suppress(ValueError):
        get_worker().log_event(_COMPUTED, (graph, what, share))
    _note_here(graph, what, share)


def _note_here(graph: str, what: str, share: float) -> None:
    if graph in _SHARES:  # a block that is computed again begins anew
        _SHARES[graph][what] = max(share, _SHARES[graph].get(what, 0))


def _killed(err: KilledWorker, client: Client | None) -> str:
    n_deaths = err.allowed_failures + 1
    return (
        f"{_died_of(client, n_deaths) or f'task {err.task}'} failed: {n_deaths} worker processes "
        "died while they computed it; try smaller blocks (samples.chunk(sample=...)) or a smaller "
        "batch_size= if they ran out of memory, or a higher distributed.scheduler.allowed-failures "
        "if machines are preempted"
    )


def _died_of(client: Client | None, n_deaths: int) -> str | None:
    """Return what most of the workers that died last were computing, if they recorded it."""
    if client is None:
        return None
    alive = workers_of(client)
    begun: dict[str, str] = {}
    for _, event in client.get_events(_STARTED) or ():
        if event["worker"] not in alive:
            # The last event of each worker, ordered by the time of that event.
            begun.pop(event["worker"], None)
            begun[event["worker"]] = event["what"]
    most_common = Counter(list(begun.values())[-n_deaths:]).most_common(1)
    for what, count in most_common:
        if 2 * count > n_deaths:
            return what
    return None


def duration(seconds: float) -> str:
    """Return about how long something takes, as people say it.

    Examples
    --------
    >>> duration(0.123), duration(48.3), duration(300), duration(8000)
    ('0.12 s', '48 s', '5 min', '2.2 h')
    """
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
    if not show:
        yield lambda text: None
        return
    done = count()
    title = f"{title} ({done} of {total} were stored before)" if done else title
    stop = threading.Event()
    with _bar(title, total, done) as (update, say):
        poller = threading.Thread(target=_poll, args=(update, count, stop), daemon=True)
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
        with polled_bar(title, total, count) as print_above:
            say.append(print_above)
            yield
            is_done.set()  # what the last tasks said may be on its way
    finally:
        _GRAPHS.reset(token)
        for graph in graphs:
            _SHARES.pop(graph, None)


def _poll(
    update: Callable[[float], object], count: Callable[[], float], stop: threading.Event
) -> None:
    wait = _INTERVAL_S
    while not stop.wait(wait):
        start = time.monotonic()
        try:
            update(count())
        except Exception as err:  # if it persists, the computation itself fails, too
            _log.info("could not count the completed work: %s", err)
        wait = max(_INTERVAL_S, _SHARE * (time.monotonic() - start))


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
