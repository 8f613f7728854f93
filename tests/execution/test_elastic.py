"""Clusters that grow, shrink, lose workers or run short of memory give what one thread gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import torch
import xarray as xr
from distributed import Client, LocalCluster, Worker, get_worker

import trakdask as td
from tests.clusters import local_cluster
from trakdask.execution import workers_of

pytestmark = pytest.mark.slow

N, WIDTH = 48, 300
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(N, WIDTH)).astype("f4")
LABEL = DRAW.integers(0, 3, N)


class Samples(torch.utils.data.Dataset):
    """Samples of which one does something to the worker that reads it first."""

    def __init__(self, marker: Path, act: Callable[[], None]) -> None:
        self.marker, self.act = marker, act

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index == N // 2 and self.marker.exists():
            self.marker.unlink()
            self.act()
        return X[index], int(LABEL[index])


def features(marker: Path, act: Callable[[], None] = int) -> xr.Dataset:
    train = td.from_torch(
        Samples(marker, act), names=("image", "label"), coords={"group": LABEL}, chunks=8
    )
    return td.featurize(train, model(), projector=td.Rademacher(proj_dim=32, seed=0))


def model() -> td.Model:
    torch.manual_seed(0)
    net = torch.nn.Linear(WIDTH, 3)
    checkpoints = [{name: t + k for name, t in net.state_dict().items()} for k in range(2)]
    return td.Model(net, checkpoints)


def top(stored: xr.Dataset) -> xr.Dataset:
    targets = td.from_arrays({"image": X[:9] + 1, "label": LABEL[:9]}, chunks=3)
    targets = td.featurize(targets, model(), projector=td.Rademacher(proj_dim=32, seed=0))
    scores = td.score(stored, targets, td.Trak(damping=td.Absolute(1.0)))
    return td.top_k(scores, k=4, where=scores.group != 1)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[xr.Dataset, xr.Dataset]:
    folder = tmp_path_factory.mktemp("expected")
    with dask.config.set(scheduler="threads", num_workers=1):
        stored = td.save(features(folder / "none"), folder / "f.zarr", progress=False)
        return stored.compute(), top(stored).compute()


def require_identical(features: xr.Dataset, expected: tuple[xr.Dataset, xr.Dataset]) -> None:
    kept, ranked = expected
    made = features.compute().drop_attrs()
    xr.testing.assert_identical(made, kept[list(made)].drop_attrs())
    xr.testing.assert_identical(top(features).compute().drop_attrs(), ranked.drop_attrs())


@contextmanager
def cluster_of(n_workers: int, **settings: Any) -> Iterator[tuple[Any, Client]]:
    with (
        dask.config.set(settings),
        local_cluster(processes=True, n_workers=n_workers) as cluster,
        Client(cluster, set_as_default=False) as client,
        client.as_current(),
    ):
        yield cluster, client


def retire() -> None:
    worker = get_worker()
    worker.loop.add_callback(worker.close_gracefully)


def test_save__worker_retires_in_the_middle(
    tmp_path: Path, expected: tuple[xr.Dataset, xr.Dataset]
) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    with cluster_of(2) as (_, client):
        before = {*workers_of(client)}
        stored = td.save(features(marker, retire), tmp_path / "f.zarr", progress=False)
        assert not marker.exists()
        require_identical(stored, expected)
        assert before - {*workers_of(client)}


def test_save__workers_come_when_there_is_work(
    tmp_path: Path, expected: tuple[xr.Dataset, xr.Dataset]
) -> None:
    """A worker that comes late, or after others have gone, still gets the samples and the model."""
    # Not with a patient nanny: a worker that is closed while it starts may never end by itself.
    with (
        LocalCluster(0, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
        client.as_current(),
    ):
        cluster.adapt(minimum=0, maximum=2, interval="50 ms")
        stored = td.save(features(tmp_path / "none"), tmp_path / "f.zarr", progress=False)
        cluster.adapt(minimum=0, maximum=1, interval="50 ms")
        require_identical(stored, expected)


def n_spilled(dask_worker: Worker) -> int:
    return len(dask_worker.data.slow)  # type: ignore[union-attr]


def test_persist__data_is_spilled(tmp_path: Path, expected: tuple[xr.Dataset, xr.Dataset]) -> None:
    settings = {
        "distributed.worker.memory.target": 1e-6,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
        "distributed.worker.memory.terminate": False,
    }
    with cluster_of(1, **settings) as (_, client):
        kept = features(tmp_path / "none").persist()
        require_identical(kept, expected)
        assert sum(client.run(n_spilled).values()) >= N // 8
        stored = td.save(kept, tmp_path / "f.zarr", progress=False)
        require_identical(stored, expected)
