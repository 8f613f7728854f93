"""What the scheduler of Dask costs per task, and what it moves, for the graphs of this package.

    python tests/benchmarks/scheduling.py [--workers 16 64 --tasks 10000]

The scheduler is a process of its own, so that its CPU time can be read alone. All workers are in
this process and have one thread each. Blocks are tiny, so that nearly all of the time is overhead:
of the scheduler, and of client and workers, which share one interpreter here but not on a real
cluster. ``sum`` is a tree of additions by Dask alone, for comparison. Where others use the machine,
trust CPU times. "moved" is what workers sent each other.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import distributed
import psutil
import xarray as xr
from _machine import parser_of
from distributed import Client, Scheduler, Worker

import trakdask as td
from trakdask.testing import simulate_features

ROWS, PROJ_DIM, N_TARGETS = 2, 8, 8
QUIET = {"distributed.scheduler.worker-ttl": None, "distributed.comm.timeouts.connect": "240s"}


def main() -> None:
    args = parser_of(__doc__, workers=[16, 64], tasks=10_000).parse_args()
    print(f"{'graph':6} {'workers':>7} {'tasks':>7} {'clock s':>8} {'scheduler ms/task':>18} "
          f"{'others ms/task':>15} {'graph MB':>9} {'moved MB':>9}", flush=True)  # fmt: skip
    logging.getLogger("distributed").setLevel(logging.WARNING)
    for n_workers in args.workers:
        with tempfile.TemporaryDirectory() as folder, cluster(n_workers, folder) as measured:
            sum_by_dask(100)  # so that all processes have imported what they need
            top_k(save(100, Path(folder) / "first.zarr"))
            measured("sum", lambda: sum_by_dask(args.tasks))
            stored = measured("save", lambda: save(args.tasks, Path(folder) / "f.zarr"))
            measured("top_k", functools.partial(top_k, stored))


def sum_by_dask(n_tasks: int) -> Any:
    return da.ones(int(n_tasks * 7 / 8), chunks=1).sum(split_every=8).compute(optimize_graph=False)


def save(n_tasks: int, store: Path) -> xr.Dataset:
    """Save in about this many tasks, nine per block."""
    n_blocks = n_tasks // 9
    features = simulate_features(
        n_samples=n_blocks * ROWS, proj_dim=PROJ_DIM, n_checkpoints=1, chunks=ROWS
    )
    with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1TB"}):
        return td.save(features, store, estimator=None, progress=False)


def top_k(features: xr.Dataset) -> xr.Dataset:
    targets = features.isel(sample=slice(N_TARGETS)).compute().chunk(sample=N_TARGETS)
    scores = td.score(features, targets, td.Trak(damping=td.Absolute(1.0)))
    return td.top_k(scores, k=3).compute()


@contextmanager
def cluster(n_workers: int, folder: str) -> Iterator[Callable[[str, Callable[[], Any]], Any]]:
    """Start a scheduler process and workers in this one; yield what measures a computation."""
    with (
        dask.config.set(QUIET),
        scheduler_process(folder) as (process, address),
        Client(address, timeout=240) as client,
    ):
        workers = client.sync(started, address, n_workers, folder)
        try:
            yield functools.partial(measure, client, process, workers)
        finally:
            client.sync(closed, workers)


@contextmanager
def scheduler_process(folder: str) -> Iterator[tuple[psutil.Process, str]]:
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--no-dashboard"], stderr=subprocess.PIPE, text=True, cwd=folder,
        env=os.environ | {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "null",
                          "DASK_DISTRIBUTED__LOGGING__DISTRIBUTED": "info"},
    )  # fmt: skip
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        address = next(found[0] for line in lines if (found := re.findall(r"tcp://[\d.:]+", line)))
        threading.Thread(target=list, args=[lines], daemon=True).start()  # or the pipe fills
        yield psutil.Process(process.pid), address
    finally:
        process.kill()
        process.wait()


async def started(address: str, n_workers: int, folder: str) -> list[Worker]:
    return [
        await Worker(address, nthreads=1, local_directory=folder, dashboard=False)
        for _ in range(n_workers)
    ]


async def closed(workers: list[Worker]) -> None:
    for worker in workers:
        await worker.close()


def measure(
    client: Client, process: psutil.Process, workers: list[Worker], name: str,
    call: Callable[[], Any],
) -> Any:  # fmt: skip
    tasks, before, moved = n_tasks(client), cpu(process), sent(workers)
    clock, own = time.perf_counter(), time.process_time()
    with graph_bytes() as sizes:
        made = call()
    clock, own = time.perf_counter() - clock, time.process_time() - own
    tasks = n_tasks(client) - tasks
    scheduler = cpu(process) - before
    print(f"{name:6} {len(workers):7} {tasks:7} {clock:8.1f} {1e3 * scheduler / tasks:18.2f} "
          f"{1e3 * own / tasks:15.2f} {sum(sizes) / 1e6:9.2f} "
          f"{(sent(workers) - moved) / 1e6:9.2f}", flush=True)  # fmt: skip
    return made


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def sent(workers: list[Worker]) -> int:
    return sum(worker.transfer_outgoing_bytes_total for worker in workers)


def n_tasks(client: Client) -> int:
    """Return how many tasks the scheduler has been sent so far."""

    def count(dask_scheduler: Scheduler) -> int:
        return sum(sum(each.states.values()) for each in dask_scheduler.computations)

    return int(client.run_on_scheduler(count))


@contextmanager
def graph_bytes() -> Iterator[list[int]]:
    """Collect the sizes of the graphs that the client sends."""
    sizes: list[int] = []
    send = Client._send_to_scheduler

    def noted(self: Client, message: dict[str, Any]) -> None:
        if message.get("op") == "update-graph":
            graph = message["expr_ser"]
            sizes.append(sum(map(len, (distributed.protocol.dumps(graph)))))
        send(self, message)

    Client._send_to_scheduler = noted  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        Client._send_to_scheduler = send  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
