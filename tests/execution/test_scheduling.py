"""Submissions: tried again after errors that pass, failures named, on threads and on clusters."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import dask
import dask.array as da
import numpy as np
import pytest
import torch
import xarray as xr
from distributed import Client, get_worker, worker_client

import trakdask as td
from tests.clusters import local_cluster
from tests.waiting import wait_until
from trakdask import execution
from trakdask.execution import _STARTED, at_work

FEATURES = td.testing.simulate_features(n_samples=40, proj_dim=8, chunks=16)


def flaky(failures: int, calls: Path) -> xr.Dataset:
    """The same features; the first calls fail, as on a network that comes back; by files."""
    calls.mkdir()

    def fail(block: np.ndarray) -> np.ndarray:
        if block.size:
            (calls / uuid4().hex).touch()
            if len(list(calls.iterdir())) <= failures:
                raise OSError("connection reset")
        return block

    whole = "feature-" + 32 * "0"  # a layer that passes for featurize's own
    meta = np.empty((0, 0, 0), "f4")
    data = da.map_blocks(fail, FEATURES.feature.data, dtype="f4", meta=meta, name=whole)
    return FEATURES.assign(feature=(FEATURES.feature.dims, data))


def test_save__further_attempts_compute_only_what_is_missing(tmp_path: Path) -> None:
    features, broken = flaky(2, tmp_path / "calls"), flaky(100, tmp_path / "broken")
    with dask.config.set(scheduler="sync"):
        opened = td.save(features, tmp_path / "f.zarr", progress=False, retries=2)
        assert len(list((tmp_path / "calls").iterdir())) == 6 + 2
        np.testing.assert_array_equal(opened.feature, FEATURES.feature)
        with pytest.raises(OSError, match="connection reset"):
            td.save(broken, tmp_path / "b.zarr", progress=False, retries=2)
    assert len(list((tmp_path / "broken").iterdir())) == 3


def test_save__raises_once_no_other_task_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, waited_for, ended = (threading.Event() for _ in range(3))
    calls, wait_for_others = itertools.count(), execution._wait_for_others

    def work(block: np.ndarray) -> np.ndarray:
        with at_work("a block"):
            if next(calls) == 0:
                begun.wait()
                raise OSError("connection reset")
            begun.set()
            waited_for.wait()
            ended.set()
        return block

    def wait() -> None:
        waited_for.set()
        wait_for_others()

    monkeypatch.setattr(execution, "_wait_for_others", wait)
    meta = np.empty((0, 0, 0), "f4")
    data = da.map_blocks(work, FEATURES.feature.data, dtype="f4", meta=meta, name="feature-works")
    features = FEATURES.assign(feature=(FEATURES.feature.dims, data))
    with dask.config.set(scheduler="threads", num_workers=2):
        with pytest.raises(OSError, match="reset"):
            td.save(features, tmp_path / "f.zarr", estimator=None, progress=False)
        over = ended.is_set()
    waited_for.set()  # else the pool of threads would never end where nobody waits
    assert over


def test_save__further_attempts_on_a_cluster(client: Client, tmp_path: Path) -> None:
    features = flaky(2, tmp_path / "calls")
    opened = td.save(features, tmp_path / "f.zarr", progress=False, retries=2)
    assert 6 < len(list((tmp_path / "calls").iterdir())) <= 6 + 2
    np.testing.assert_array_equal(opened.feature, FEATURES.feature)


@contextmanager
def one_worker(allowed_failures: int) -> Iterator[None]:
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": allowed_failures}),
        local_cluster(processes=True, n_workers=1) as cluster,
        Client(cluster),
    ):
        yield


class Deadly(td.tasks.ImageClassification):
    """Ends the process at one image, once the scheduler knows what this worker began."""

    def output(self, forward, batch):
        if (batch["image"][:, 0] == 13).any():
            me = get_worker().address
            with worker_client() as client:
                wait_until(
                    lambda: any(
                        me == event["worker"] and "samples 8:16 " in event["what"]
                        for _, event in client.get_events(_STARTED)
                    ),
                    "the scheduler to know what this worker began",
                )
            os._exit(1)
        return super().output(forward, batch)


def test_run__values_of_a_fit_in_a_graph_are_no_warning(client: Client) -> None:
    values = np.zeros(11 * 2**20, np.uint8)
    assert execution.run(lambda: dask.delayed(len)(values), retries=0) == (len(values),)


@pytest.mark.faults
def test_save__block_that_kills_its_workers_is_named(tmp_path: Path) -> None:
    x = np.arange(40, dtype="f4")[:, None].repeat(4, 1)
    samples = td.from_arrays({"image": x, "label": np.arange(40) % 3}, chunks=8)
    model = td.Model(torch.nn.Linear(4, 3), task=Deadly())
    features = td.featurize(samples, model, projector=td.Identity())
    with (
        one_worker(allowed_failures=1),
        pytest.raises(
            td.errors.BlockError, match=r"samples 8:16 of checkpoint '0' failed: 2 worker"
        ),
    ):
        td.save(features, tmp_path / "f.zarr", progress=False)


@pytest.mark.slow
def test_save__task_that_kills_its_workers_without_a_word(tmp_path: Path) -> None:
    """Tasks of others than featurize cannot say that they begin."""
    data = da.map_blocks(lambda block: os._exit(1), FEATURES.feature.data, meta=np.empty((0, 0, 0)))
    features = FEATURES.assign(feature=(FEATURES.feature.dims, data))
    with (
        one_worker(allowed_failures=0),
        pytest.raises(td.errors.BlockError, match=r"task .* failed: 1 worker"),
    ):
        td.save(features, tmp_path / "f.zarr", progress=False)
