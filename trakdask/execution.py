"""Run work on the active scheduler: retries, resources, memory, errors that name a block."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import dask
import xarray as xr
from dask.base import get_scheduler
from dask.utils import format_bytes

from trakdask.errors import BlockError
from trakdask.gpu_workers import gradients_to_gpus

if TYPE_CHECKING:  # functions import distributed, which takes half a second and threads do not need
    from distributed import Client, KilledWorker

_STARTED = "trakdask-started"
_FITS_ARE_SENT = {"distributed.admin.large-graph-warning-threshold": "1 GiB"}
"""Values of a fit go to workers with the tasks of a checkpoint, once. From 10 MB on, Dask would
advise users to send them apart, who have no part in it."""

_LEAST_WORKER = 2**28
"""No worker has less memory, so that nobody need be asked for its limit."""

_KNOWN: WeakSet[Client] = WeakSet()
"""Clients whose schedulers send gradient tasks to GPU workers."""

_AT_WORK: set[object] = set()
"""The tasks that threads of this process are at."""

_CHANGED = threading.Condition()

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

    cluster = active_client()
    attempts = 1 if cluster else retries + 1
    for left in reversed(range(attempts)):
        work = submission()
        if work is None:
            return None
        try:
            with dask.config.set(_FITS_ARE_SENT):
                return compute(work, **({"retries": retries} if cluster else {}))
        except KilledWorker as err:
            raise BlockError(_killed(err, cluster)) from err
        except Exception as err:
            _wait_for_others()
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
    # With a client, Dask's scheduler is the bound method `get` of it.
    client = getattr(get_scheduler(), "__self__", None)
    if client is None:
        return None
    from distributed import Client

    if not isinstance(client, Client):
        return None
    # Of an asynchronous client the registration would be a coroutine that nobody awaits.
    if client not in _KNOWN and not client.asynchronous:
        _KNOWN.add(client)
        client.register_plugin(gradients_to_gpus())
    return client


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
    # A worker runs a task per thread, and no more than its resources allow. A resource that it does
    # not declare is 0.
    fits = (int(available.get(name, 0) // amount) for name, amount in resources.items())
    return int(min((worker["nthreads"], *fits)))


def require_memory(n_bytes: int, what: str, remedy: str) -> None:
    """Refuse a task that no worker of the active client, or without one this machine, has room for.

    Parameters
    ----------
    n_bytes
        A bound of :mod:`trakdask.arrays.memory`.
    what, remedy
        Texts of the error: the array that takes so much, and what to try.

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
    if n_bytes > _LEAST_WORKER and n_bytes > (most := memory_limit()):
        raise MemoryError(
            f"expected {format_bytes(n_bytes)} of memory for {what}, got "
            f"{format_bytes(int(most))}; {remedy}"
        )


def memory_limit(*, here: bool = False) -> float:
    """Return the memory of the largest worker of the active client, or without one of this machine.

    It is infinite while the client has no workers, and if one of them has no limit.

    Examples
    --------
    >>> memory_limit() > 2**28
    True
    """
    from distributed.system import MEMORY_LIMIT

    client = None if here else active_client()
    if client is None:
        return float(MEMORY_LIMIT)
    limits = [worker["memory_limit"] for worker in workers_of(client).values()]
    return float(max(limits)) if limits and all(limits) else math.inf  # without a limit it is 0


@contextmanager
def at_work(what: str) -> Iterator[None]:
    """Tell :func:`run` of the task that this thread or worker is at.

    On a cluster an error can name it: the scheduler itself blames every task that was waiting on
    the worker that died.
    """
    from distributed import get_worker

    with suppress(ValueError):  # this process is not a worker
        get_worker().log_event(_STARTED, {"what": what})
    task = object()
    with _CHANGED:
        _AT_WORK.add(task)
    try:
        yield
    finally:
        with _CHANGED:
            _AT_WORK.remove(task)
            _CHANGED.notify_all()


def _wait_for_others() -> None:
    """Wait until the tasks are over that other threads of this process are at.

    Dask raises the first error, and leaves them running. They build models, and so draw from the
    random numbers of torch that whoever called has for its own, and a retry would begin them twice.
    """
    with _CHANGED:
        # Not those that begin later: they are of another computation, and there may always be one.
        now = set(_AT_WORK)
        _CHANGED.wait_for(lambda: not now & _AT_WORK)


def _killed(err: KilledWorker, client: Client | None) -> str:
    # 1. What most of the workers that died last were computing, if they recorded it.
    blamed, n_deaths = f"task {err.task}", err.allowed_failures + 1
    begun: dict[str, str] = {}
    if client is not None:
        alive = workers_of(client)
        for _, event in client.get_events(_STARTED) or ():
            if event["worker"] not in alive:
                # The last event of each worker, ordered by the time of that event.
                begun.pop(event["worker"], None)
                begun[event["worker"]] = event["what"]
    for what, count in Counter(list(begun.values())[-n_deaths:]).most_common(1):
        blamed = what if 2 * count > n_deaths else blamed
    # 2. A text for the error.
    return (
        f"{blamed} failed: {n_deaths} worker processes died while they computed it; try smaller "
        "blocks (samples.chunk(sample=...)) or a smaller batch_size= if they ran out of memory, or "
        "a higher distributed.scheduler.allowed-failures if machines are preempted"
    )
