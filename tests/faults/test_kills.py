"""kill -9 of anything at any moment: the store is the same to the bit, and nothing done twice.

The oracle: a store that nobody disturbed, and the files that every computed block leaves.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from distributed import Client, Scheduler

import trakdask as td
from tests.faults._run import N_BLOCKS, N_CHECKPOINTS, ROWS, features, limit_file
from tests.waiting import PATIENCE_S, wait_until
from trakdask.files import Folder
from trakdask.storage.group import Group

pytestmark = pytest.mark.slow

SECONDS = 0.05
AHEAD = 8
"""Blocks that may be computed before a kill: however slow this process is, the driver waits."""
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "counts").mkdir()
    td.save(features(folder / "counts", 0), folder / "f.zarr", progress=False)
    return content(folder / "f.zarr")


def content(store: Path) -> dict[str, str]:
    """Return hashes of all files but that which tells when the store was changed."""
    return {
        str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in store.rglob("*")
        if path.is_file() and path.name != "zarr.json"
    }


def completed(store: Path) -> set[str]:
    """Return the stored blocks, as <checkpoint>-<block>."""
    names = [path.name.split(".") for path in store.glob("feature/records/*.npz")]
    if (store / "zarr.json").exists() and Group.read(Folder.at(store)).n_samples:
        return {f"{c}-{block}" for c in range(N_CHECKPOINTS) for block in range(N_BLOCKS)}
    return {f"{index}-{int(start) // ROWS}" for start, index, *_ in names}


def computed(counts: Path) -> Counter[str]:
    return Counter(path.name.rpartition("-")[0] for path in counts.iterdir())


class Cluster:
    """A scheduler and two workers, each a process of its own that can be killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.start_scheduler()
        self.workers = [self._start_worker() for _ in range(2)]

    def start_scheduler(self) -> None:
        log = self._folder / f"scheduler-{time.monotonic_ns()}.log"
        arguments = ["distributed.cli.dask_scheduler", "--port", "0", "--no-dashboard"]
        self.scheduler = start(log, "-m", *arguments, "--host", "127.0.0.1")
        wait_until(lambda: "tcp://" in log.read_text(), "the scheduler")
        self.address = re.findall(r"tcp://[0-9.]+:\d+", log.read_text())[0]

    def _start_worker(self) -> subprocess.Popen[bytes]:
        arguments = ["distributed.cli.dask_worker", self.address, "--no-nanny", "--nthreads", "1"]
        more = ["--no-dashboard", "--death-timeout", str(PATIENCE_S)]
        more += ["--local-directory", str(self._folder)]
        return start(self._folder / "worker.log", "-m", *arguments, *more)

    def replace(self, number: int) -> None:
        """Let a new worker take the place of one that was killed."""
        self.workers[number] = self._start_worker()

    def close(self) -> None:
        for process in (self.scheduler, *self.workers):
            kill(process)


def start(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT"] = "5s"
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, *arguments], stdout=file, stderr=file, env=environment, cwd=ROOT
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()


def n_blocks_waiting(dask_scheduler: Scheduler) -> int:
    """Return how many blocks a scheduler has yet to store, or may still have to store again."""
    keys = map(str, dask_scheduler.tasks)
    return sum("save-" in key and "save-gram-" not in key for key in keys)


class Run:
    """Saves into one store, by drivers that come one after the other."""

    def __init__(self, folder: Path, seed: int, seconds: float = SECONDS) -> None:
        self.folder, self.rng, self.seconds = folder, random.Random(seed), seconds
        self.store, self.counts = folder / "f.zarr", folder / "counts"
        self.counts.mkdir()

    def start(self, address: str = "", *, limited: bool = True) -> None:
        """Start a driver, once the one before has ended."""
        if limited:
            self.limit()
        else:
            limit_file(self.counts).unlink(missing_ok=True)
        arguments = [str(self.store), str(self.counts), str(self.seconds), address]
        self.driver = start(self.folder / "driver.log", "-m", "tests.faults._run", *arguments)

    def close(self) -> None:
        kill(self.driver)

    def has_ended(self) -> bool:
        return self.driver.poll() is not None

    def limit(self) -> None:
        """Let some more blocks be computed."""
        file = limit_file(self.counts)
        partial = file.with_suffix(".new")
        partial.write_text(str(sum(computed(self.counts).values()) + AHEAD))
        partial.replace(file)

    def wait_for_a_moment(self) -> None:
        """Wait for one to four more blocks, and a little."""
        least = min(len(completed(self.store)) + self.rng.randrange(1, 5), N_BLOCKS * N_CHECKPOINTS)
        wait_until(lambda: len(completed(self.store)) >= least or self.has_ended(), "a block")
        time.sleep(self.rng.random() * self.seconds)

    def wait_until_heard(self, address: str) -> set[str]:
        """Return the completed blocks, once the driver has heard of them all, and let go of them.

        Before that, the death of its worker has a block computed again. Nothing is computed beyond
        the limit, so this comes to rest.
        """
        done: set[str] = set()

        def is_heard() -> bool:
            done.clear()
            done.update(completed(self.store))
            counts = [sum(block[0] == str(c) for block in done) for c in range(N_CHECKPOINTS)]
            left = next((N_BLOCKS - count for count in counts if count < N_BLOCKS), 0)
            waiting = client.run_on_scheduler(n_blocks_waiting)
            return self.has_ended() or (waiting == left and done == completed(self.store))

        with Client(address, timeout=PATIENCE_S, set_as_default=False) as client:
            wait_until(is_heard, "the driver's knowledge")
        return done

    def require_nothing_twice(self, before: Counter[str], done: set[str]) -> None:
        """Require that no block that was stored was computed since, but one to compare."""
        again = computed(self.counts) - before
        assert sum(again[block] for block in done) <= 1

    def wait_for_success(self) -> None:
        assert self.driver.wait(PATIENCE_S) == 0, (self.folder / "driver.log").read_text()

    def finish(self, expected: dict[str, str]) -> None:
        """Save the missing blocks, and compare with the store that nobody disturbed."""
        done, before = completed(self.store), computed(self.counts)
        self.start(limited=False)
        self.wait_for_success()
        self.require_nothing_twice(before, done)
        assert len(computed(self.counts)) == N_BLOCKS * N_CHECKPOINTS
        assert content(self.store) == expected
        assert td.verify(self.store, checksums=True).empty


def kill_drivers(folder: Path, times: int, seed: int, expected: dict[str, str]) -> int:
    """Kill drivers on threads until the store is whole; return how many died."""
    killed = 0
    with closing(Run(folder, seed)) as run:
        while killed < times:
            done, before = completed(run.store), computed(run.counts)
            run.start()
            run.wait_for_a_moment()
            if run.has_ended():
                break
            kill(run.driver)
            killed += 1
            run.require_nothing_twice(before, done)
        run.finish(expected)
    return killed


def test_driver__killed(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    assert kill_drivers(tmp_path, 2, seed=0, expected=undisturbed) == 2


@pytest.mark.faults
def test_workers__killed(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """All of them: the same call of save goes on by itself."""
    with closing(Cluster(tmp_path)) as cluster, closing(Run(tmp_path, seed=1)) as run:
        run.start(cluster.address)
        run.wait_for_a_moment()
        done, before = run.wait_until_heard(cluster.address), computed(run.counts)
        for worker in cluster.workers:
            kill(worker)
        for number in range(2):
            cluster.replace(number)
        limit_file(run.counts).unlink()
        run.wait_for_success()
        run.require_nothing_twice(before, done)
        run.finish(undisturbed)


@pytest.mark.faults
def test_scheduler__killed(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """All futures are lost with it; the same call goes on, here on threads."""
    with closing(Cluster(tmp_path)) as cluster, closing(Run(tmp_path, seed=2)) as run:
        run.start(cluster.address)
        run.wait_for_a_moment()
        kill(cluster.scheduler)
        wait_until(run.has_ended, "the driver's end")
        assert run.driver.returncode != 0
        run.finish(undisturbed)


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 102))
def test_driver__killed_at_many_moments(
    tmp_path: Path, undisturbed: dict[str, str], seed: int
) -> None:
    assert kill_drivers(tmp_path, 6, seed, undisturbed) >= 3


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2))  # together all kinds of kills
def test_anything__killed_at_many_moments(
    tmp_path: Path, undisturbed: dict[str, str], seed: int
) -> None:
    killed, cluster = 0, Cluster(tmp_path)
    with closing(Run(tmp_path, seed, seconds=4 * SECONDS)) as run:
        try:
            run.start(cluster.address)
            for _ in range(5):
                run.limit()
                run.wait_for_a_moment()
                done = run.wait_until_heard(cluster.address)
                before = computed(run.counts)
                if run.has_ended():
                    break
                cluster = kill_something(run, cluster)
                killed += 1
                run.require_nothing_twice(before, done)
            kill(run.driver)
        finally:
            cluster.close()
        assert killed >= 3
        run.finish(undisturbed)


def kill_something(run: Run, cluster: Cluster) -> Cluster:
    """Kill the driver, a worker, both, or the scheduler; return the cluster that goes on."""
    victim = run.rng.choice(["driver", "worker", "workers", "scheduler"])
    if victim in ("worker", "workers"):
        numbers = [run.rng.randrange(2)] if victim == "worker" else [0, 1]
        for number in numbers:
            kill(cluster.workers[number])
        for number in numbers:
            cluster.replace(number)
        return cluster
    kill(run.driver if victim == "driver" else cluster.scheduler)
    if victim == "scheduler":
        wait_until(run.has_ended, "the driver's end")
        cluster.close()
        cluster = Cluster(run.folder)
    run.start(cluster.address)
    return cluster
