"""Work that is given up, and tells how far it is, on threads and on a cluster."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
from distributed import Client, Event, KilledWorker, Queue

from tests.clusters import local_cluster
from tests.waiting import PATIENCE_S, wait_until
from trakdask.explorer.computing import (
    Abandoned,
    Work,
    compute,
    computed,
    persist,
    released_if_failed,
)


def in_work(work: Work, *lazy: da.Array) -> Callable[[], object]:
    def run() -> object:
        with work.active():
            return compute(*lazy)

    return run


def test_compute__without_work_is_that_of_dask() -> None:
    assert compute(da.arange(4, chunks=1).sum())[0] == 6


def test_work__tells_how_far_it_is() -> None:
    work, told = Work(), []
    work.on_progress(lambda done, total: told.append((done, total)))
    in_work(work, da.map_blocks(np.copy, da.ones(8, chunks=1)))()
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert done[-1] == totals[-1] > 0


def test_work__that_is_abandoned_starts_no_further_task() -> None:
    started, go_on, count = threading.Event(), threading.Event(), []

    def block(x: np.ndarray) -> np.ndarray:
        count.append(1)
        started.set()
        assert go_on.wait(PATIENCE_S)
        return x

    work = Work()
    lazy = da.map_blocks(block, da.ones(50, chunks=1), dtype=float, meta=np.empty(0))
    with ThreadPoolExecutor(1) as pool, dask.config.set(num_workers=2):
        answer = pool.submit(in_work(work, lazy))
        assert started.wait(PATIENCE_S)
        work.abandon()
        go_on.set()
        with pytest.raises(Abandoned):
            answer.result(PATIENCE_S)
    assert len(count) < 10
    with pytest.raises(Abandoned):
        in_work(work, lazy)()


def wait_for_event(x: np.ndarray, name: str) -> np.ndarray:
    Event(f"{name}-started").set()
    Event(name).wait(PATIENCE_S)
    return x


def test_work__that_is_abandoned_is_cancelled_on_a_cluster(process_client: Client) -> None:
    # Not the cluster inside this process: an event of a task would make a client that stays.
    work, name = Work(), "explorer-work"
    lazy = da.map_blocks(wait_for_event, da.ones(9, chunks=1), name, meta=np.empty(0))

    def run() -> object:
        with process_client.as_current():
            return in_work(work, lazy)()

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(run)
        assert Event(f"{name}-started", client=process_client).wait(PATIENCE_S)
        work.abandon()
        with pytest.raises(Abandoned):
            answer.result(PATIENCE_S)
    Event(name, client=process_client).set()
    assert compute(da.ones(3).sum())[0] == 3


def wait_for_turn(x: np.ndarray, name: str) -> np.ndarray:
    Queue(name).get(timeout=PATIENCE_S)
    return x


def test_work__tells_how_far_it_is_on_a_cluster(process_client: Client) -> None:
    work, name, told = Work(), "explorer-progress", []
    turns, given = Queue(name, client=process_client), []

    def tell(done: int, total: int) -> None:
        told.append((done, total))
        if done >= len(given):  # one block more may be computed when the last one was told of
            given.append(1)
            turns.put(1)

    work.on_progress(tell)
    lazy = da.map_blocks(wait_for_turn, da.ones(5, chunks=1), name, meta=np.empty(0))
    with process_client.as_current():
        np.testing.assert_array_equal(in_work(work, lazy)(), [np.ones(5)])
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert {0, 1, 2, 3, 4} <= {*done}
    assert len({*totals}) == 1


def test_work__of_two_users_is_not_cancelled_by_one_of_them(process_client: Client) -> None:
    name = "explorer-two-users"
    lazy = da.map_blocks(wait_for_event, da.ones(2, chunks=1), name, meta=np.empty(0))
    works = Work(), Work()

    def run(work: Work) -> object:
        with process_client.as_current():
            return in_work(work, lazy)()

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(run, work) for work in works)
        assert Event(f"{name}-started", client=process_client).wait(PATIENCE_S)
        works[0].abandon()
        with pytest.raises(Abandoned):
            first.result(PATIENCE_S)
        Event(name, client=process_client).set()
        np.testing.assert_array_equal(second.result(PATIENCE_S)[0], [1, 1])


def deadly(x: np.ndarray, switch: str) -> np.ndarray:
    """Kill the process that computes a block, if there is such a file."""
    if os.path.exists(switch):
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def test_persist__can_be_repeated_when_what_killed_a_worker_is_gone(tmp_path: Path) -> None:
    switch = tmp_path / "kill"
    lazy = da.map_blocks(deadly, da.ones((4, 3), chunks=(2, 3)), str(switch), meta=np.empty((0, 0)))
    settings = {"distributed.scheduler.allowed-failures": 0}
    with (
        dask.config.set(settings),
        local_cluster(processes=True, n_workers=1) as cluster,
        Client(cluster) as client,
    ):
        (kept,) = persist(lazy)
        whole = xr.Dataset({"x": (("a", "b"), kept)})
        assert not released_if_failed(whole)
        switch.touch()
        # The worker dies with what it keeps, and the next one by computing it once more.
        (pid,) = client.run(os.getpid).values()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: released_if_failed(whole), "the loss of what was kept")
        with pytest.raises(KilledWorker):
            persist(lazy)
        switch.unlink()
        np.testing.assert_array_equal(persist(lazy)[0].compute(), np.ones((4, 3)))


_OVERLAPPING = """
import threading
import numpy
from threadpoolctl import threadpool_info
from trakdask.explorer.computing import _ONE_THREAD

def threads():
    return [info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"]

def first_in_and_first_out():
    with _ONE_THREAD:
        is_in.set()
        assert both_in.wait(60)
    is_out.set()

before = threads()
is_in, both_in, is_out = (threading.Event() for _ in range(3))
first = threading.Thread(target=first_in_and_first_out)
first.start()
assert is_in.wait(60)
with _ONE_THREAD:
    both_in.set()
    assert is_out.wait(60)
    inside = threads()
first.join()
with _ONE_THREAD:
    again = threads()
print(before, inside, threads(), again)
"""


def test_compute__keeps_blas_on_one_thread_and_gives_it_back() -> None:
    # In a process of its own: BLAS has a single thread where tests run.
    made = subprocess.run(
        [sys.executable, "-c", _OVERLAPPING], env={**os.environ, "OPENBLAS_NUM_THREADS": "2"},
        capture_output=True, text=True, check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    before, inside, after, again = ast.literal_eval(f"[{made.stdout.replace('] [', '], [')}]")
    assert set(inside) == set(again) == {1}
    assert after == before
    assert set(before) == {2 if (os.cpu_count() or 1) > 1 else 1}


def test_computed__keeps_dims_coords_and_attrs() -> None:
    lazy = xr.Dataset(
        {"a": ("x", da.arange(3), {"unit": "m"}), "b": ((), 2.0)},
        coords={"x": ("x", da.arange(3)), "name": "n"},
    )
    result = computed(lazy)
    xr.testing.assert_identical(result, lazy.compute())
    assert result.a.chunks is None
    xr.testing.assert_identical(computed(lazy.a), lazy.a.compute())


def test_persist__keeps_names_and_chunks() -> None:
    x = da.map_blocks(np.negative, da.ones((4, 3), chunks=(2, 3)))
    (kept,) = persist(x)
    assert kept.name == x.name
    assert kept.chunks == x.chunks
    np.testing.assert_array_equal(kept.compute(), -np.ones((4, 3)))
