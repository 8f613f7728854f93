"""Clusters of worker processes for tests: no test may fail because the machine is slow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from typing import Any

import dask
from distributed import Client, LocalCluster, Nanny, Scheduler, SpecCluster
from distributed.utils import get_mp_context

from tests.waiting import PATIENCE_S

PATIENT: dict[str, Any] = {
    "distributed.comm.timeouts.tcp": f"{PATIENCE_S}s",
    "distributed.deploy.lost-worker-timeout": f"{PATIENCE_S}s",
    "distributed.scheduler.worker-ttl": None,
    # Forked from a process that has imported everything, a worker starts in a tenth of the time.
    "distributed.worker.multiprocessing-method": "forkserver",
}
"""Settings without which a worker that gets no processor for a while is taken for dead.

Not among them is the patience with what cannot be connected to. If a worker begins to fetch from
another one in the moment of its death, Dask tries to connect to the dead one for as long as that,
and everything waits. The living answer at once, as the system accepts connections for them.
"""

IMPORTED = ["distributed", "torch.func", "trakdask.accessor", "trakdask.examples", "numba"]
"""Modules that every worker would import itself; the others follow from these."""


def forkserver() -> BaseContext:
    """Return what forks processes from one that has imported everything."""
    with dask.config.set(PATIENT):
        context = get_mp_context()
    context.set_forkserver_preload(IMPORTED)
    return context


def exit_code(function: Callable[..., object], *arguments: object) -> int | None:
    """Run a function of a test module in a process of its own, and say how that ended."""
    process = forkserver().Process(target=function, args=arguments)
    process.start()
    process.join(PATIENCE_S)
    return process.exitcode


class PatientNanny(Nanny):
    """A nanny that waits until its worker has ended: others kill it after four seconds.

    Its worker gets the environment of the test, not the one in which the first worker was forked.
    """

    def __init__(self, *args: Any, env: Mapping[str, str] | None = None, **options: Any) -> None:
        forkserver()
        super().__init__(*args, env={**os.environ, **(env or {})}, **options)

    async def kill(self, timeout: float = PATIENCE_S, reason: str = "nanny-kill") -> None:
        await super().kill(timeout=max(timeout, PATIENCE_S), reason=reason)


def local_cluster(*, processes: bool, n_workers: int = 2) -> LocalCluster:
    """Return workers with one thread each, in this process or in one each."""
    return LocalCluster(
        n_workers=n_workers, threads_per_worker=1, processes=processes, dashboard_address=":0",
        **({"worker_class": PatientNanny} if processes else {}),
    )  # fmt: skip


@contextmanager
def workers_with(resources: Mapping[str, dict[str, int]]) -> Iterator[Client]:
    """Start worker processes by name, with what they declare."""
    options = {"nthreads": 1, "dashboard_address": ":0"}
    workers = {
        name: {"cls": PatientNanny, "options": {**options, "resources": given}}
        for name, given in resources.items()
    }
    scheduler = {"cls": Scheduler, "options": {"dashboard_address": ":0"}}
    with (
        dask.config.set(PATIENT),
        SpecCluster(workers=workers, scheduler=scheduler) as made,
        Client(made, set_as_default=False) as client,
    ):
        yield client
