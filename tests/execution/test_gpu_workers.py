"""Whoever computes gradients: they are taken on workers that declare a GPU, where there are some.

The oracle is a task that leaves a file with the process in which the model ran.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import dask
import numpy as np
import pytest
import torch
import xarray as xr
from distributed import Client, get_task_stream

import trakdask as td
from tests.clusters import workers_with
from trakdask.execution import workers_of
from trakdask.explorer.new_targets import TargetMaker

# A warning about λ, of which few samples and checkpoints say little.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]


@dataclass(frozen=True)
class Footprints(td.tasks.Classification):
    """Leaves a file with the number of the process, wherever the model runs."""

    folder: str = ""

    def output(self, forward: Any, batch: Any) -> torch.Tensor:
        if forward.parameters["weight"].device.type == "cpu":  # and not without values
            Path(self.folder, f"{os.getpid()}-{uuid4().hex}").touch()
        return super().output(forward, batch)


@pytest.fixture(scope="module")
def three_workers() -> Iterator[Client]:
    """Two workers that declare a GPU, and one that does not."""
    gpu: dict[str, int] = {"GPU": 1}
    with workers_with({"plain": {}, "gpu-0": gpu, "gpu-1": gpu}) as client:
        yield client


class Work:
    """Samples, a model, and what its calls left behind."""

    def __init__(self, folder: Path, client: Client) -> None:
        self.folder, self.client, self.store = folder / "prints", client, folder / "f.zarr"
        self.folder.mkdir()
        images = np.random.default_rng(0).normal(size=(64, 6)).astype("f4")
        self.samples = td.from_arrays({"image": images, "label": np.arange(64) % 3}, chunks=8)
        states = [torch.nn.Linear(6, 3).state_dict() for _ in range(2)]
        task = Footprints(inputs=("image",), folder=str(self.folder))
        self.model = td.Model(lambda: torch.nn.Linear(6, 3), states, task=task)

    def ran_on(self) -> set[str]:
        """Return the names of the workers that ran the model since the last call."""
        workers = workers_of(self.client)
        names = {pid: workers[a]["name"] for a, pid in self.client.run(os.getpid).items()}
        prints = list(self.folder.iterdir())
        pids = {int(path.name.partition("-")[0]) for path in prints} - {os.getpid()}
        for path in prints:
            path.unlink()
        return {names[pid] for pid in pids}


def fit(work: Work) -> None:
    options = {"curvature": True, "sketch": td.SJLT(24), "store": work.store}
    td.fit(work.samples, work.model, 6, progress=False, **options)


def save(work: Work) -> None:
    features = td.featurize(work.samples, work.model, td.SJLT(8))
    td.save(features, work.store, progress=False)
    td.save(features, work.store, progress=False)  # computes a block again


def compute(work: Work) -> None:
    """As a user does, who computes what was returned."""
    features = td.featurize(work.samples, work.model, td.SJLT(8))
    features.persist()
    td.top_k(td.score(features, features.isel(sample=[0]), "grad_dot"), 2).compute()
    (features.feature.sum("sample") + 1).data.compute(optimize_graph=False)


def divide(work: Work) -> None:
    features = td.featurize(work.samples, work.model, td.SJLT(8)).compute(scheduler="sync")
    of, parts = work.samples.isel(sample=slice(32)), {"weight": "weight", "bias": "bias"}
    targets = features.isel(sample=[0])
    td.score_parts(features, targets, work.model, "grad_dot", of=of, parts=parts).compute()


def explore(work: Work) -> None:
    features = td.featurize(work.samples, work.model, td.SJLT(8)).compute(scheduler="sync")
    maker = TargetMaker(work.model, features, None, lambda image: np.zeros(6, "f4"))
    sample = work.samples.isel(sample=[0])
    (target,) = dask.compute(td.featurize(sample, maker.model, like=maker.features))
    assert target.sizes["sample"] == 1


def plan(work: Work) -> None:
    found = td.plan(td.featurize(work.samples, work.model, td.SJLT(8)), pilot=True)
    n_gpus = sum("GPU" in w["resources"] for w in workers_of(work.client).values())
    assert found.pilot is not None
    assert found.pilot.n_slots == (n_gpus or 2)


CALLS = [fit, save, compute, divide, explore, plan]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_gradients__are_taken_where_a_gpu_is_declared(
    call: Callable[[Work], None], tmp_path: Path, three_workers: Client
) -> None:
    work = Work(tmp_path, three_workers)
    with three_workers.as_current(), get_task_stream(three_workers) as stream:
        call(work)
    on_gpus = {"gpu-0", "gpu-1"}
    assert (found := work.ran_on()) <= on_gpus
    assert found == on_gpus or call in (explore, plan)  # of one block
    workers = workers_of(three_workers)
    others = {workers[each["worker"]]["name"] for each in stream.data if each["worker"] in workers}
    assert others - on_gpus or call in (explore, plan)  # everything else runs anywhere


@pytest.mark.parametrize("call", [fit, compute])
def test_gradients__go_anywhere_where_none_is_declared(
    call: Callable[[Work], None], tmp_path: Path, process_client: Client
) -> None:
    work = Work(tmp_path, process_client)
    call(work)
    assert work.ran_on() == {worker["name"] for worker in workers_of(process_client).values()}


def test_gradients__on_the_cpu_go_anywhere(tmp_path: Path, three_workers: Client) -> None:
    work = Work(tmp_path, three_workers)
    features = td.featurize(work.samples, work.model, td.SJLT(8), device="cpu")
    with three_workers.as_current():
        on_cpu: xr.Dataset = features.compute()
    assert "plain" in work.ran_on()
    xr.testing.assert_equal(on_cpu, features.compute(scheduler="sync"))
