"""A task that cannot fit in a worker is refused with a number before it runs; others are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import torch
import xarray as xr
from distributed import Client, LocalCluster

import trakdask as td
from trakdask.testing import simulate_features

# A bare worker that has imported torch takes 200 to 400 MB of it, by the machine and the build of
# torch, and is killed at 95 %. So what fits is small beside the rest, and what does not is larger.
LIMIT = 10**9


@pytest.fixture(scope="module")
def small_workers() -> Iterator[LocalCluster]:
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(memory_limit=LIMIT, **options) as cluster:
        yield cluster


@pytest.fixture
def client(small_workers: LocalCluster) -> Iterator[Client]:
    with Client(small_workers, set_as_default=False) as client, client.as_current():
        yield client


def wide(n: int, p: int, n_checkpoints: int = 1, *, rows: int) -> xr.Dataset:
    """Return features that are never made."""
    few = simulate_features(n_samples=2, proj_dim=4, n_checkpoints=n_checkpoints)
    shape, chunks = (n, p, n_checkpoints), (rows, p, 1)
    of_samples = da.ones((n, n_checkpoints), chunks=(rows, 1), dtype="f4")
    return xr.Dataset(
        {
            "feature": (few.feature.dims, da.zeros(shape, chunks=chunks, dtype="f4")),
            "out_to_loss": (few.out_to_loss.dims, of_samples),
        },
        coords={"checkpoint": few.checkpoint, "user": ("sample", np.arange(n))},
        attrs=few.attrs,
    )


TARGETS = {n: wide(n, 16, rows=n) for n in (10, 5000)}
SCORES = xr.DataArray(da.zeros((50_000, 4000), chunks=-1, dtype="f4"), dims=("sample", "target"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda path: td.save(wide(5000, 6400, rows=500), path, estimator="trak"), "matri"),
        (lambda path: td.save(wide(5000, 5200, rows=500), path, estimator="trak"), "eigenvectors"),
        (lambda path: td.save(wide(10**5, 1100, rows=10**5), path, estimator=None), "a block of"),
        (
            lambda _: td.score(wide(50_000, 16, rows=50_000), TARGETS[5000], "grad_dot"),
            "scores of a block of 50000 samples for 4096 targets",
        ),
        (
            lambda _: td.group_score(
                wide(25 * 10**5, 16, rows=5000), TARGETS[10], "grad_dot", by="user"
            ),
            "the sums of 2500000 groups",
        ),
        (lambda _: td.top_k(SCORES, 10), "ranking 10 of a block of 50000 samples"),
        (lambda path: td.to_zarr(SCORES, path), "writing a block"),
    ],
)
def test_too_large_for_a_worker__is_refused(
    client: Client, tmp_path: Path, call: Callable[[Path], object], what: str
) -> None:
    with pytest.raises(MemoryError, match=what) as err:
        call(tmp_path / "store")
    assert "got 0.93 GiB; try" in str(err.value)  # the memory of a worker
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_what_fits__is_computed(client: Client, tmp_path: Path) -> None:
    top = td.top_k(td.score(wide(1500, 16, rows=1500), TARGETS[5000], "grad_dot"), 3)
    assert top.compute().sizes["target"] == 5000
    saved = td.save(wide(3000, 1000, rows=1000), tmp_path / "f.zarr", progress=False)
    assert saved.sizes["sample"] == 3000


@pytest.mark.slow
def test_plan__says_what_will_be_refused(client: Client) -> None:
    samples = td.from_arrays({"image": np.zeros((20, 4), "f4"), "label": np.arange(20) % 3})
    model = td.Model(torch.nn.Linear(4, 3), task="image_classification")
    plan = td.plan(td.featurize(samples, model, td.SJLT(4096)), td.SJLT(8192))
    assert "Too large" not in repr(plan)
    assert plan.projections.save_bytes[0] < LIMIT < plan.projections.save_bytes[1]
    wide_plan = td.plan(td.featurize(samples, model, td.SJLT(8192)))
    assert "a task of td.save takes up to" in repr(wide_plan)
