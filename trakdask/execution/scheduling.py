"""Submissions to the active scheduler: further attempts, and names of blocks that fail."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import dask
import dask.array as da
import xarray as xr
from dask.base import get_scheduler
from distributed import Client, KilledWorker, get_worker

from trakdask.errors import BlockError

__all__ = [
    "active_client",
    "are_lazy",
    "gpu_options",
    "n_slots",
    "note_start",
    "on_all_workers",
    "recall",
    "remember",
    "run",
]

T = TypeVar("T")

_STARTED = "trakdask-started"

_log = logging.getLogger(__name__)
_MOST_REMEMBERED = 1024
_remembered: dict[str, dict[str, Any]] = {}


def run(
    submission: Callable[[], da.Array | None],
    *,
    retries: int,
    compute: Callable[..., T] = dask.compute,
) -> T | None:
    """Compute what a submission finds to do, with further attempts after errors that pass.

    Parameters
    ----------
    submission
        Builds the tasks that are missing now; None where nothing is.
    retries
        Further attempts: of a task on a cluster, of all that is still missing elsewhere.
    compute
        Computes the tasks, with ``retries=`` on a cluster.

    Returns
    -------
    What ``compute`` returns; None where there was nothing to do.

    Raises
    ------
    BlockError
        If a block ends every worker process that it comes to.
    """
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
    """Return the client that dask would compute on, if any."""
    client = getattr(get_scheduler(), "__self__", None)
    return client if isinstance(client, Client) else None


def gpu_options(features: xr.Dataset) -> dict[str, Any]:
    """Return what to give to ``compute`` so that gradients are taken by workers that declare a GPU.

    Nothing, unless a worker of the active client was started with ``resources={"GPU": ...}`` and
    the features are still to be made, on a GPU if there is one. It has to be given to ``compute``:
    Dask drops annotations when it fuses tasks.

    Examples
    --------
    >>> gpu_options(xr.Dataset(attrs={"device": "auto"}))
    {}
    """
    client = active_client()
    if client is None or features.attrs.get("device", "cpu") == "cpu" or not are_lazy(features):
        return {}
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    declared = any(worker["resources"].get("GPU") for worker in workers)
    return {"resources": {"GPU": 1}} if declared else {}


def are_lazy(features: xr.Dataset) -> bool:
    """Tell whether gradients are still to be taken for some features."""
    layers = getattr(features.__dask_graph__(), "layers", ())
    return any(name.startswith("featurize-") for name in layers)


def remember(block: str, what: Mapping[str, Any]) -> None:
    """Keep what is known of a block, until the task of this process that stores it asks."""
    while len(_remembered) >= _MOST_REMEMBERED:  # of blocks that nobody stores
        _remembered.pop(next(iter(_remembered)), None)
    _remembered[block] = dict(what)


def recall(block: str) -> dict[str, Any]:
    """Return what this process knows of a block, and forget it; nothing of those made elsewhere."""
    return _remembered.pop(block, {})


def on_all_workers(function: Callable[..., T], *arguments: Any) -> list[T]:
    """Call a function on each worker that is there, or in this process where there are none."""
    client = active_client()
    if client is None:
        return [function(*arguments)]
    return list(client.run(function, *arguments, on_error="ignore").values())


def n_slots(resources: Mapping[str, int] | None = None) -> int:
    """Return how many tasks the active scheduler runs at once, of those that need resources.

    Examples
    --------
    >>> with dask.config.set(scheduler="sync"):
    ...     n_slots()
    1
    """
    client = active_client()
    if client is not None:
        workers: dict[str, Any] = client.scheduler_info(n_workers=-1)["workers"]
        return sum(_slots(worker, resources or {}) for worker in workers.values())
    if get_scheduler() is dask.local.get_sync:
        return 1
    return int(dask.config.get("num_workers", None) or dask.system.CPU_COUNT)


def _slots(worker: Mapping[str, Any], resources: Mapping[str, int]) -> int:
    has = worker["resources"]
    fits = (int(has.get(name, 0) // needed) for name, needed in resources.items())
    return int(min((worker["nthreads"], *fits)))


def note_start(what: str) -> None:
    """Let the scheduler know what a worker begins: if it dies, that is what it died of.

    The scheduler itself blames every task that waits at a worker which dies.
    """
    with suppress(ValueError):  # no worker runs this
        get_worker().log_event(_STARTED, {"what": what})


def _killed(err: KilledWorker, client: Client | None) -> str:
    n_deaths = err.allowed_failures + 1
    return (
        f"{_died_of(client, n_deaths) or f'task {err.task}'} failed: {n_deaths} worker processes "
        f"died while they computed it; needed no more than {err.allowed_failures} "
        "(distributed.scheduler.allowed-failures). If they ran out of memory, type "
        "samples.chunk(sample=...) with smaller blocks, or a batch_size=, or start workers with "
        "more memory. Where machines are taken away, raise that number before the scheduler starts."
    )


def _died_of(client: Client | None, n_deaths: int) -> str | None:
    """Return what most of the workers that died last had begun, if they told."""
    if client is None:
        return None
    alive: dict[str, Any] = client.scheduler_info(n_workers=-1)["workers"]
    begun: dict[str, str] = {}
    for _, event in client.get_events(_STARTED) or ():
        if event["worker"] not in alive:
            begun.pop(event["worker"], None)  # the last of each, in the order of the last
            begun[event["worker"]] = event["what"]
    found = Counter(list(begun.values())[-n_deaths:]).most_common(1)
    return found[0][0] if found and 2 * found[0][1] > n_deaths else None
