"""Stores of features as objects of zarr: what a folder says, they say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import dask
import distributed
import numpy as np
import pytest
import xarray as xr
from zarr.abc.store import Store
from zarr.storage import LocalStore, MemoryStore, ObjectStore, ZipStore

import trakdask as td
from trakdask.testing import simulate_features

pytestmark = pytest.mark.filterwarnings(
    "ignore:Consolidated metadata is currently not part", "ignore:Failed to open Zarr store with"
)

TARGETS = simulate_features(n_samples=3, proj_dim=8, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with all that is ours: float16, an append, dropped and failed samples.

    xarray leaves out the chunks of a copy that are 0, as all labels are, or NaN, as a block is.
    """
    features = simulate_features(n_samples=40, proj_dim=8, chunks=16).compute()
    features["label"] = "sample", np.zeros(40, int)
    for name in ("feature", "output", "out_to_loss"):
        features[name][16:32] = np.nan
    why = np.where(np.isnan(features.output), "failed", "").astype(np.dtypes.StringDType())
    features["error"] = features.output.dims, why
    path, lazy = tmp_path_factory.mktemp("stores") / "f.zarr", features.chunk(sample=16)
    options = {"progress": False, "dtype": "float16"}
    td.save(lazy, path, **options)
    td.save(lazy.assign_attrs(source="more"), path, append_dim="sample", **options)
    td.drop(path, where=lambda ds: xr.DataArray(np.arange(80) % 9 == 0, dims="sample"))
    return path


def zipped(folder: Path) -> Store:
    return ZipStore(shutil.make_archive(str(folder), "zip", folder))


def in_memory(folder: Path) -> Store:
    store = MemoryStore()
    xr.open_zarr(folder).to_zarr(store)
    return store


def of_obstore(folder: Path) -> Store:
    obstore = pytest.importorskip("obstore")
    return ObjectStore(obstore.store.LocalStore(folder), read_only=True)


def of_icechunk(folder: Path) -> Store:
    icechunk = pytest.importorskip("icechunk")
    place = icechunk.local_filesystem_storage(f"{folder}.{len([*folder.parent.iterdir()])}")
    repository = icechunk.Repository.create(place)
    session = repository.writable_session("main")
    xr.open_zarr(folder).to_zarr(session.store)
    repository.create_tag("v1", snapshot_id=session.commit("the features of v1"))
    return repository.readonly_session(tag="v1").store


@pytest.fixture(params=[LocalStore, zipped, in_memory, of_obstore, of_icechunk])
def store(request: pytest.FixtureRequest, folder: Path) -> Store:
    return request.param(folder)


def test_open__a_zarr_store(store: Store, folder: Path) -> None:
    opened = td.open(store)
    xr.testing.assert_identical(opened.compute(), td.open(folder).compute())
    for options in ({"dropped": True}, {"load_coords": False}):
        mine, theirs = (td.open(x, **options).compute() for x in (store, folder))
        xr.testing.assert_identical(mine, theirs)
    assert td.verify(store, checksums=True).empty
    mine, theirs = (td.top_k(td.score(ds, TARGETS), k=5) for ds in (opened, td.open(folder)))
    xr.testing.assert_identical(mine.compute(), theirs.compute())


@pytest.mark.slow
def test_open__a_zarr_store_on_a_cluster(
    store: Store, folder: Path, process_client: distributed.Client
) -> None:
    expected = td.score(td.open(folder), TARGETS).compute(scheduler="sync")
    found = process_client.compute(td.score(td.open(store), TARGETS)).result()
    xr.testing.assert_identical(found, expected)


@pytest.mark.parametrize("options", [{}, {"consolidated": True}, {"consolidated": False}])
@pytest.mark.parametrize(
    "of", [xr.Dataset.copy, xr.Dataset.load, lambda ds: ds.chunk(sample=7).drop_encoding()]
)
def test_open__a_copy_that_xarray_has_made_in_a_folder(
    folder: Path, tmp_path: Path, of: Callable[[xr.Dataset], xr.Dataset], options: dict[str, bool]
) -> None:
    copy = tmp_path / "copy.zarr"
    of(xr.open_zarr(folder)).to_zarr(copy, **options)
    xr.testing.assert_identical(td.open(copy).compute(), td.open(folder).compute())
    assert td.verify(copy, checksums=True).empty
    for change in (
        lambda: td.save(td.open(folder), copy),
        lambda: td.drop(copy, where="sample == 3"),
        lambda: td.assign_coords(copy, {}),
        lambda: td.verify(copy, repair=True),
    ):
        with pytest.raises(ValueError, match=r"got a copy .*td.save\(td.open\(copy\), 'new"):
            change()
    if not options:
        new = td.save(td.open(copy), tmp_path / "new.zarr", progress=False)
        xr.testing.assert_equal(new.feature, td.open(folder).feature)


def test_open__a_copy_of_a_part_is_refused(folder: Path, tmp_path: Path) -> None:
    xr.open_zarr(folder).isel(sample=slice(32)).to_zarr(tmp_path / "copy.zarr")
    with pytest.raises(ValueError, match=r"the whole store.*\[80, 8, 2\], got \[32, 8, 2\]"):
        td.open(tmp_path / "copy.zarr")


def test_open__lost_chunks_of_a_zarr_store(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "f.zarr")
    store = LocalStore(tmp_path / "f.zarr")
    (tmp_path / "f.zarr" / "feature" / "c.2.0.1").unlink()
    assert list(td.verify(store).path) == ["feature/c.2.0.1"]
    with pytest.raises(td.errors.IncompleteFeaturesError, match=r"feature/c\.2\.0\.1"):
        td.open(store).feature.compute()
    with pytest.raises(FileNotFoundError, match="expected a store of features at 'memory://"):
        td.open(MemoryStore())


@pytest.mark.parametrize(
    "change",
    [
        lambda store: td.save(TARGETS, store),
        lambda store: td.drop(store, where=None),
        lambda store: td.assign_coords(store, {}),
        lambda store: td.verify(store, repair=True),
    ],
)
def test_changes__of_a_zarr_store_are_refused(change: Callable[[Store], object]) -> None:
    with pytest.raises(TypeError, match="icechunk or into memory would have to come back"):
        change(MemoryStore())


def test_to_zarr__into_a_zarr_store() -> None:
    scores = td.score(simulate_features(n_samples=40, proj_dim=8, chunks=16), TARGETS)
    store = MemoryStore()
    td.to_zarr(scores, store)
    xr.testing.assert_equal(xr.open_zarr(store).score, scores)
    with pytest.raises(FileExistsError):
        td.to_zarr(scores, store)
    td.to_zarr(2 * scores, store, overwrite=True)
    xr.testing.assert_equal(xr.open_zarr(store).score, 2 * scores)
    others = MemoryStore()
    scores.to_dataset(name="theirs").to_zarr(others)
    with pytest.raises(FileExistsError):
        td.to_zarr(scores, others, overwrite=True)


def test_to_zarr__not_into_copies(tmp_path: Path) -> None:
    scores = td.score(simulate_features(n_samples=40, proj_dim=8, chunks=16), TARGETS)
    with pytest.raises(TypeError, match="in which tasks can write, got zip://"):
        td.to_zarr(scores, ZipStore(tmp_path / "s.zip", mode="w"))
    with distributed.Client(processes=False, dashboard_address=":0"):
        with pytest.raises(TypeError, match="in which tasks can write, got memory://"):
            td.to_zarr(scores, MemoryStore())
        td.to_zarr(scores, LocalStore(tmp_path / "s.zarr"))
        with dask.config.set(scheduler="threads"):
            td.to_zarr(scores, MemoryStore())
