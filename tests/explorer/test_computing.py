"""Computation that is given up, and tells how far it is, on threads and on a cluster."""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
from distributed import Client, Event

from tests.waiting import PATIENCE_S
from trakdask.explorer.computing import Computation, compute, persist


def within(computation: Computation, *lazy: da.Array) -> Callable[[], object]:
    def run() -> object:
        with computation.active():
            return compute(*lazy)

    return run


def test_computation__tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trakdask.explorer.computing._TOLD_EVERY_S", 0)
    computation, told = Computation(), []
    computation.progress = lambda done, total: told.append((done, total))
    within(computation, da.map_blocks(np.copy, da.ones(8, chunks=1)))()
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert done[-1] == totals[-1] > 0


def test_computation__that_is_abandoned_starts_no_further_task() -> None:
    started, go_on, count = threading.Event(), threading.Event(), []

    def block(x: np.ndarray) -> np.ndarray:
        count.append(1)
        started.set()
        assert go_on.wait(PATIENCE_S)
        return x

    computation = Computation()
    lazy = da.map_blocks(block, da.ones(50, chunks=1), dtype=float, meta=np.empty(0))
    with ThreadPoolExecutor(1) as pool, dask.config.set(num_workers=2):
        answer = pool.submit(within(computation, lazy))
        assert started.wait(PATIENCE_S)
        computation.is_abandoned = True
        go_on.set()
        with pytest.raises(CancelledError):
            answer.result(PATIENCE_S)
    assert len(count) < 10
    with pytest.raises(CancelledError):
        within(computation, lazy)()


def wait_for_event(x: np.ndarray, name: str) -> np.ndarray:
    Event(f"{name}-started").set()
    Event(name).wait(PATIENCE_S)
    return x


def test_computation__of_two_users_is_not_cancelled_by_one_of_them(process_client: Client) -> None:
    # Not the cluster inside this process: an event of a task would make a client that stays.
    name = "explorer-two-users"
    lazy = da.map_blocks(wait_for_event, da.ones(2, chunks=1), name, meta=np.empty(0))
    computations = Computation(), Computation()

    def run(computation: Computation) -> object:
        with process_client.as_current():
            return within(computation, lazy)()

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(run, computation) for computation in computations)
        assert Event(f"{name}-started", client=process_client).wait(PATIENCE_S)
        computations[0].is_abandoned = True
        with pytest.raises(CancelledError):
            first.result(PATIENCE_S)
        Event(name, client=process_client).set()
        np.testing.assert_array_equal(second.result(PATIENCE_S)[0], [1, 1])


_OVERLAPPING = """
import threading
import numpy
from threadpoolctl import threadpool_info
from trakdask.explorer.computing import one_blas_thread

def threads():
    return [info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"]

def first_in_and_first_out():
    with one_blas_thread():
        is_in.set()
        assert both_in.wait()
    is_out.set()

before = threads()
is_in, both_in, is_out = (threading.Event() for _ in range(3))
first = threading.Thread(target=first_in_and_first_out)
first.start()
assert is_in.wait()
with one_blas_thread():
    both_in.set()
    assert is_out.wait()
    inside = threads()
first.join()
with one_blas_thread():
    again = threads()
print(before, inside, threads(), again)
"""


def test_compute__keeps_blas_on_one_thread_and_gives_it_back(run_python) -> None:
    # In a process of its own: BLAS has a single thread where tests run.
    printed = run_python("-c", _OVERLAPPING, OPENBLAS_NUM_THREADS="2")
    before, inside, after, again = ast.literal_eval(f"[{printed.replace('] [', '], [')}]")
    assert set(inside) == set(again) == {1}
    assert after == before
    assert set(before) == {2 if (os.cpu_count() or 1) > 1 else 1}


def test_compute__of_a_cluster_takes_what_is_in_memory_as_it_is(client: Client) -> None:
    in_memory, lazy = np.arange(3.0), da.arange(3, chunks=1)
    ds = xr.Dataset({"a": ("x", lazy), "b": ("x", in_memory)}, attrs={"unit": "m"})
    results = compute(in_memory, lazy, ds)
    np.testing.assert_array_equal(results[0], in_memory)
    np.testing.assert_array_equal(results[1], np.arange(3))
    xr.testing.assert_identical(results[2], ds.compute(scheduler="sync"))
    assert compute(in_memory)[0] is in_memory


def test_persist__keeps_names_and_chunks() -> None:
    x = da.map_blocks(np.negative, da.ones((4, 3), chunks=(2, 3)))
    (kept,) = persist(x)
    assert (kept.name, kept.chunks) == (x.name, x.chunks)
    np.testing.assert_array_equal(kept.compute(), -np.ones((4, 3)))
