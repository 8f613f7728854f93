"""A driver whose workers share nothing with it but an object store.

Run as ``python -m tests.execution._driver``, so that its classes can be imported nowhere else: they
travel by value, like classes of a notebook.
"""

from __future__ import annotations

import contextlib
import os
import sys

import dask
import fsspec
import numpy as np
import pytest
import torch
import xarray as xr
from distributed import Client, LocalCluster
from torch import nn

import trakdask as td
from tests.waiting import PATIENCE_S

N_TRAIN, N_TARGET, SIDE, CLASSES = 96, 12, 28, 4


class Pictures(torch.utils.data.Dataset):
    """Pictures in memory."""

    def __init__(self, n: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.images = torch.tensor(draw.normal(size=(n, 1, SIDE, SIDE)), dtype=torch.float32)
        self.labels = draw.integers(0, CLASSES, n)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])


class Net(nn.Module):
    """A perceptron in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(SIDE * SIDE, 16), nn.Tanh(), nn.Linear(16, CLASSES)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def trained(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def pictures(seed: int) -> dict[str, object]:
    """Return targets as arrays in memory."""
    some = Pictures(N_TARGET, seed)
    return {"image": some.images, "label": some.labels}


def attribute(store: str, checkpoints: dict[str, object]) -> tuple[xr.Dataset, xr.Dataset]:
    """From samples in memory and checkpoints anywhere to the top samples, over a store."""
    dataset = Pictures(N_TRAIN, 0)
    train = td.from_torch(
        dataset, names=("image", "label"), coords={"digit": dataset.labels}, chunks=32
    )
    targets = td.from_arrays(pictures(1), chunks=6)
    # An architecture in memory, with weights that no checkpoint has.
    model = td.Model(trained(9), checkpoints)
    projector = td.Rademacher(proj_dim=64, seed=0)
    features = td.save(td.featurize(train, model, projector=projector), store, progress=False)
    scores = td.score(features, td.featurize(targets, model, projector=projector))
    return features.compute(), td.top_k(scores, k=5, where=scores.digit != 0).compute()


def main(port: str, scheduler: str, bucket: str) -> None:
    """Compare a cluster with this process."""
    s3 = fsspec.filesystem("s3")
    s3.mkdir(bucket)
    for number in (1, 2):
        torch.save(trained(number).state_dict(), f"{number}.pt")
    s3.put_file("2.pt", f"{bucket}/2.pt")
    here = {"memory": trained(0).state_dict(), "url": "2.pt"}
    anywhere = here | {"url": f"s3://{bucket}/2.pt"}
    cluster = contextlib.nullcontext()
    if scheduler == "here":
        cluster = LocalCluster(
            n_workers=0, host="127.0.0.1", scheduler_port=int(port), dashboard_address=None
        )
    with cluster, Client(f"tcp://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
        client.wait_for_workers(2, timeout=PATIENCE_S)
        assert not any(client.run(os.path.exists, os.getcwd()).values()), "a shared folder"
        found = attribute(f"s3://{bucket}/f.zarr", anywhere)
        with dask.config.set(scheduler="threads", num_workers=2):
            expected = attribute("f.zarr", here)
        for remote, local in zip(found, expected, strict=True):
            xr.testing.assert_identical(remote.drop_attrs(), local.drop_attrs())
        model = td.Model(trained(9), ["1.pt"])
        unseen = td.featurize(td.from_arrays(pictures(0), chunks=32), model)
        with pytest.raises(td.errors.BlockError, match=r"FileNotFoundError.*1\.pt"):
            unseen.compute()


if __name__ == "__main__":
    main(*sys.argv[1:])
