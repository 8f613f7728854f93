"""kill -9 of a worker in the middle of whatever computes on a cluster: the same bits.

The oracle is the same call on one thread. The moment of a kill is the number of tasks that have
finished, of those that the call has undisturbed, drawn with the seed in the name of the test.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import torch
import xarray as xr
from distributed import Client, LocalCluster
from distributed.diagnostics.plugin import SchedulerPlugin

import trakdask as td
from tests.clusters import local_cluster
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*(30%|half) of the samples|.*are in one group"),
]

N, N_CHECKPOINTS = 24, 5
DRAW = np.random.default_rng(0)
X, LABEL = DRAW.normal(size=(N, 20)).astype("f4"), DRAW.integers(0, 3, N)
MASKS = td.evaluate.subsets(N, N_CHECKPOINTS).rename(subset="checkpoint")
ESTIMATOR = td.Trak(damping=td.Absolute(1.0))
Results = dict[str, np.ndarray]
N_TASKS: dict[str, int] = {}
"""Of each operation, once it is known."""


def samples(x: np.ndarray) -> xr.Dataset:
    label = LABEL[: len(x)]
    return td.from_arrays({"image": x, "label": label}, coords={"kind": label}, chunks=6)


def model() -> td.Model:
    torch.manual_seed(0)
    net = torch.nn.Linear(X.shape[1], 3)
    given = net.state_dict().items()
    return td.Model(net, [{name: t + k for name, t in given} for k in range(N_CHECKPOINTS)])


def features(x: np.ndarray = X) -> xr.Dataset:
    return td.featurize(samples(x), model(), td.Rademacher(proj_dim=16))


def operands() -> tuple[xr.Dataset, xr.Dataset, td.Trak]:
    return features().assign(trained_on=MASKS), features(X[:9] + 1), ESTIMATOR


def fit(folder: Path) -> Results:
    fitted = td.fit(
        samples(X), model().at_checkpoints(["0", "1"]), 8, curvature=True, sketch=td.SJLT(16),
        progress=False,
    )  # fmt: skip
    return fitted.arrays


def save(folder: Path) -> Results:
    saved = td.save(features(), folder / "f.zarr", progress=False)
    assert td.verify(folder / "f.zarr", checksums=True).empty
    return values(saved)


def values(lazy: xr.Dataset | xr.DataArray) -> Results:
    return {str(n): v.values for n, v in lazy.reset_coords().compute().variables.items()}


OPERATIONS: dict[str, Callable[[Path], Results]] = {
    "fit": fit,
    "save": save,
    "score": lambda _: values(td.score(*operands()).to_dataset(name="score")),
    "top_k": lambda _: values(td.top_k(td.score(*operands()), 4, where="kind != 1")),
    "group_score": lambda _: values(
        td.group_score(*operands(), by="kind").to_dataset(name="score")
    ),
    "effects": lambda _: values(
        td.group_score(
            operands()[0], features(X + 1), ESTIMATOR, by="kind", effect=True
        ).to_dataset()
    ),
    "cross_validate": lambda _: values(td.evaluate.cross_validate(*operands())),
}


class Killer(SchedulerPlugin):
    """Kills one of the workers of this machine as soon as so many tasks have finished."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.expect(0, random.Random())

    def expect(self, number: int, draw: random.Random) -> None:
        """Count from here on, and kill at this number."""
        self.n_finished, self.killed = 0, False
        self._number, self._draw = number, draw

    def transition(self, key: Any, start: str, finish: str, *args: Any, **options: Any) -> None:
        self.n_finished += finish == "memory"
        if finish == "memory" and self.n_finished == self._number:
            os.kill(self._draw.choice([*self._cluster.workers.values()]).pid, signal.SIGKILL)
            self.killed = True

    def all_work(self) -> bool:
        """Return whether each nanny has a worker, which the scheduler knows."""
        nannies, known = self._cluster.workers.values(), self._cluster.scheduler.workers
        return all(each.pid and each.worker_address in known for each in nannies)


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    # A worker that turns to another one in the moment of its death tries to connect for as long as
    # this, without an answer. On one machine, the living answer at once.
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "10s"}),
        local_cluster(processes=True) as cluster,
        Client(cluster, set_as_default=False) as client,
        client.as_current(),
    ):
        killer = Killer(cluster)
        cluster.scheduler.add_plugin(killer)
        yield killer


IN_SHORT = {("save", 0), ("top_k", 0)}


@functools.cache
def undisturbed(name: str) -> Results:
    with tempfile.TemporaryDirectory() as folder, dask.config.set(scheduler="sync"):
        return OPERATIONS[name](Path(folder))


@pytest.mark.timeout(600)  # ten times the minute in which it has to end where nothing else runs
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=[] if (name, seed) in IN_SHORT else pytest.mark.faults)
        for name in OPERATIONS
        for seed in range(11)
    ],
)
def test_worker__killed(name: str, seed: int, killer: Killer, tmp_path: Path) -> None:
    expected, draw = undisturbed(name), random.Random(f"{name} {seed}")
    wait_until(killer.all_work, "the worker that takes the place of the last one killed")
    if name not in N_TASKS:
        killer.expect(0, draw)
        OPERATIONS[name](tmp_path / "counted")
        N_TASKS[name] = killer.n_finished
    killer.expect(draw.randrange(1, N_TASKS[name]), draw)
    found = OPERATIONS[name](tmp_path)
    assert killer.killed
    assert found.keys() == expected.keys()
    for variable, value in expected.items():
        np.testing.assert_array_equal(found[variable], value, err_msg=variable)
