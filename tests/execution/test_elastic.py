"""A cluster whose workers come and go gives what one thread gives.

Workers that are killed in the middle: ``tests/faults/test_killed_workers.py``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from distributed import Client, LocalCluster

import trakdask as td

pytestmark = pytest.mark.slow

DRAW = np.random.default_rng(0)
X, LABEL = DRAW.normal(size=(48, 300)).astype("f4"), DRAW.integers(0, 3, 48)


def test_save__workers_come_when_there_is_work(tmp_path: Path) -> None:
    """A worker that comes late, or after others have gone, still gets the samples and the model."""
    torch.manual_seed(0)
    net = torch.nn.Linear(300, 3)
    states = [{name: t + k for name, t in net.state_dict().items()} for k in range(2)]
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(LABEL))
    samples = td.from_torch(dataset, names=("image", "label"), chunks=8)
    features = td.featurize(samples, td.Model(net, states), td.Rademacher(proj_dim=32))
    estimator = td.Trak(damping=td.Absolute(1.0))
    expected = features.compute(scheduler="sync")
    ranked = td.top_k(td.score(expected, expected[{"sample": [0, 5]}], estimator), k=4)
    # Not with a patient nanny: a worker that is closed while it starts may never end by itself.
    with (
        LocalCluster(0, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
        client.as_current(),
    ):
        cluster.adapt(minimum=0, maximum=2, interval="50 ms")
        stored = td.save(features, tmp_path / "f.zarr", progress=False)
        cluster.adapt(minimum=0, maximum=1, interval="50 ms")
        xr.testing.assert_equal(stored[list(expected)].compute(), expected)
        targets = features.isel(sample=[0, 5])
        top = td.top_k(td.score(stored, targets, estimator), k=4).compute()
    np.testing.assert_array_equal(top.position, ranked.position)
    np.testing.assert_allclose(top.score, ranked.score, rtol=1e-5)
