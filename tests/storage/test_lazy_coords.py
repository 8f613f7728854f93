"""Coords that stay in the store: what loaded ones give, to the bit, and nothing read too early."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from distributed import Client

import trakdask as td
from tests.laziness import raise_if_dask_computes
from trakdask.testing import simulate_features

N, BLOCK, K = 37, 12, 5
SOURCES = np.array(["web", "books", "", "code"], np.dtypes.StringDType())


def labelled(n: int = N, seed: int = 0) -> xr.Dataset:
    """Features with a coord of every kind."""
    numbers = np.arange(n)
    return simulate_features(n_samples=n, proj_dim=6, chunks=BLOCK, seed=seed).assign_coords(
        source=("sample", SOURCES[numbers % 4]),
        day=("sample", pd.date_range("2026-01-01", periods=n).values),
        length=("sample", np.where(numbers % 5 == 0, np.nan, numbers / 7)),
        clean=("sample", numbers % 2 == 0),
        size=("sample", numbers.astype("i4") * 3),
    )


TARGETS = labelled(6, seed=1)


def make(path: Path, kind: str) -> Path:
    """Save a store in two calls; coords of the first are assigned, or some samples dropped."""
    td.save(labelled(), path, progress=False)
    more = labelled(11, seed=2).assign_attrs(source="more")
    if kind == "assigned":
        td.assign_coords(path, {"source": SOURCES[np.arange(N) % 3], "weight": np.arange(N) / 2})
        more = more.assign_coords(weight=("sample", np.ones(11)))
    td.save(more, path, append_dim="sample", progress=False)
    if kind == "dropped":
        td.drop(path, where=lambda ds: ds["size"].isin([3, 60]))
    return path


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return stores by kind; each is written once."""

    @functools.cache
    def written(kind: str) -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of λ, of which few samples say little
            return make(tmp_path_factory.mktemp(kind) / "f.zarr", kind)

    return written


@pytest.fixture(params=["assigned", "dropped"])
def store(request: pytest.FixtureRequest, stores: Callable[[str], Path]) -> Path:
    return stores(request.param)


def score(ds: xr.Dataset) -> xr.DataArray:
    return td.score(ds, TARGETS, td.Trak(damping=td.Absolute(1.0)))


QUERIES: dict[str, Callable[[xr.Dataset], Any]] = {
    "score": score,
    "top_k": lambda ds: td.top_k(score(ds), K),
    "top_k of selected features": lambda ds: td.top_k(score(ds.isel(sample=slice(3, 20))), K),
    "top_k, mask": lambda ds: td.top_k(score(ds), 3, where=score(ds).source == "web"),
    "top_k, tile mask": lambda ds: td.top_k(
        score(ds), K, where=lambda tile: (tile.source == tile.target_source) & tile.clean
    ),
    "top_k, no sample": lambda ds: td.top_k(
        score(ds), K, where=lambda tile: (tile["size"] < 9) & (tile.target_size > 2)
    ),
    "top_k, pairs": lambda ds: td.top_k(
        score(ds), 2, where=score(ds).label == score(ds).target_label
    ),
    "group_score": lambda ds: td.group_score(
        ds, TARGETS.drop_vars("source"), td.Trak(damping=td.Absolute(1.0)), by="source"
    ),
    "self_influence": lambda ds: td.self_influence(ds, td.Trak(damping=td.Absolute(1.0))),
    "persisted": lambda ds: td.top_k(score(ds.persist()), K),
    "as targets": lambda ds: td.top_k(td.score(ds, ds, td.Trak(damping=td.Absolute(1.0))), 2),
}


DROPPED = ("top_k", "top_k of selected features", "group_score", "persisted", "as targets")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("assigned", name) for name in QUERIES), *(("dropped", name) for name in DROPPED)],
)
def test_query__equals_that_of_loaded_coords(stores, kind: str, name: str) -> None:
    lazy = QUERIES[name](td.open(stores(kind), load_coords=False))
    loaded = QUERIES[name](td.open(stores(kind)))
    xr.testing.assert_identical(lazy.compute(), loaded.compute())
    for each, coord in loaded.coords.items():
        assert lazy[each].dtype == coord.dtype


@pytest.mark.parametrize(("kind", "name"), [("assigned", "score"), ("dropped", "top_k")])
def test_export__equals_that_of_loaded_coords(stores, tmp_path: Path, kind: str, name: str) -> None:
    for load in (True, False):
        result = QUERIES[name](td.open(stores(kind), load_coords=load))
        td.to_zarr(result, tmp_path / f"{load}.zarr")
        td.to_parquet(result, tmp_path / f"{load}.parquet")
    frames = [pd.read_parquet(tmp_path / f"{load}.parquet") for load in (True, False)]
    pd.testing.assert_frame_equal(*frames, check_like=True)
    opened = [xr.open_zarr(tmp_path / f"{load}.zarr").drop_attrs() for load in (True, False)]
    xr.testing.assert_identical(*(ds.load() for ds in opened))


def test_open__coords_are_those_of_loaded_ones_in_the_blocks_of_features(store: Path) -> None:
    with raise_if_dask_computes():
        lazy, loaded = td.open(store, load_coords=False), td.open(store)
    along = {name for name, coord in loaded.coords.items() if coord.dims == ("sample",)}
    assert along == {name for name, coord in lazy.coords.items() if coord.chunks is not None}
    assert {lazy[name].chunks for name in along} == {lazy.feature.chunks[:1]}
    assert lazy.chunks["sample"] == lazy.feature.chunks[0]
    xr.testing.assert_identical(lazy.compute(), loaded.compute())
    shown = [td.open(store, dropped=True, load_coords=load).compute() for load in (False, True)]
    xr.testing.assert_identical(*shown)


def test_save__of_lazy_coords(store: Path, tmp_path: Path) -> None:
    again = td.save(td.open(store, load_coords=False), tmp_path / "again.zarr", progress=False)
    for name, coord in td.open(store).coords.items():
        np.testing.assert_array_equal(again[name], coord)


def test_query__on_worker_processes(store: Path, process_client: Client) -> None:
    expected = QUERIES["top_k, tile mask"](td.open(store)).compute()
    found = QUERIES["top_k, tile mask"](td.open(store, load_coords=False)).compute()
    # Not to the bit: workers may round sums differently, depending on how blocks lie in memory.
    xr.testing.assert_allclose(found, expected)
