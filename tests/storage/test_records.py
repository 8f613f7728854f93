"""Small arrays: a record for each block until all are there, then large chunks.

The oracle is the features themselves, and the blocks that are computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import xarray as xr
from fsspec.implementations.memory import MemoryFileSystem

import trakdask as td
from tests.storage.integers import counted, interrupted
from trakdask.files import Folder
from trakdask.storage import unfinished
from trakdask.storage.group import Group
from trakdask.testing import simulate_features

FEATURES = simulate_features(n_samples=40, proj_dim=8, chunks=4)
SMALL = ("feature_norm", "output", "out_to_loss")


@pytest.fixture
def in_chunks_of_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small arrays have the rows of two blocks in a chunk."""
    monkeypatch.setattr(unfinished, "_BLOCKS", 2)
    monkeypatch.setattr(unfinished, "_LEAST_ROWS", 1)


def save(features: xr.Dataset, store: Path, **options: Any) -> xr.Dataset:
    with dask.config.set(scheduler="sync"):
        return td.save(features, store, progress=False, **options)


def chunks(store: Path, name: str) -> list[Path]:
    return [p for p in (store / name).rglob("*") if p.is_file() and p.name != "zarr.json"]


def assert_as(opened: xr.Dataset, expected: xr.Dataset) -> None:
    for name in ("feature", "output", "out_to_loss"):
        np.testing.assert_array_equal(opened[name], expected[name])
        assert opened[name].chunksizes["sample"] == expected[name].chunksizes["sample"]


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_small_arrays__have_a_chunk_for_each_checkpoint(tmp_path: Path, dtype: str | None) -> None:
    store = tmp_path / "f.zarr"
    save(FEATURES, store, dtype=dtype)
    names = SMALL if dtype is None else (*SMALL, "scale")
    assert [len(chunks(store, name)) for name in names] == [2] * len(names)
    assert len(chunks(store, "feature")) == 20
    assert not (store / "feature/records").exists()
    save(
        FEATURES.isel(sample=slice(6)).assign_attrs(source="b"),
        store,
        dtype=dtype,
        append_dim="sample",
    )
    assert [len(chunks(store, name)) for name in names] == [2] * len(names)
    assert Group.read(Folder.at(store)).array("output").chunks == (46, 1)


@pytest.mark.usefixtures("in_chunks_of_8")
@pytest.mark.filterwarnings("ignore:expected no unfinished append")
def test_small_arrays__in_several_chunks(tmp_path: Path) -> None:
    """Chunks of 8 rows, the last one not full, after appends in the middle of one."""
    store = tmp_path / "f.zarr"
    first, second = FEATURES.isel(sample=slice(22)), FEATURES.isel(sample=slice(22, 40))
    one, two = {"checkpoint": [0]}, {"checkpoint": [1]}
    save(first.isel(one), store)
    save(second.isel(one).assign_attrs(source="b"), store, append_dim="sample")
    save(first.isel(two), store, append_dim="checkpoint")
    opened = save(second.isel(two).assign_attrs(source="b"), store, append_dim="checkpoint")
    assert_as(opened, FEATURES)
    np.testing.assert_allclose(opened.gram, td.gram(FEATURES), rtol=1e-6, atol=1e-5)
    assert [len(chunks(store, name)) for name in SMALL] == [10] * 3
    theirs = xr.open_zarr(store)
    assert_as(theirs.chunk(sample=4), FEATURES)
    left = td.drop(store, where=lambda ds: ds.label == 1)
    np.testing.assert_array_equal(left.output, FEATURES.output[::2])


@pytest.mark.usefixtures("in_chunks_of_8")
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"x")])
def test_verify__a_lost_chunk_of_a_small_array(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    """Its two blocks are computed again, also if the first attempt is killed after one."""
    store = tmp_path / "f.zarr"
    save(FEATURES, store)
    damage(store / "output/c/2/1")
    found = td.verify(store, checksums=True, repair=True)
    assert found[["path", "block", "checkpoint"]].values.tolist() == [["output/c/2/1", -1, 1]]
    assert Group.read(Folder.at(store)).attrs["lacking"] == [[4, 1], [5, 1]]
    interrupted(FEATURES, store, limit=2)  # one is to compare
    whole, calls = counted(FEATURES)
    assert_as(save(whole, store), FEATURES)
    assert len(calls) == 2
    assert td.verify(store, checksums=True).empty


def test_save__a_record_that_cannot_be_read(tmp_path: Path) -> None:
    """As after a power failure: one block is computed again."""
    store = tmp_path / "f.zarr"
    interrupted(FEATURES, store, limit=7)
    record = min((store / "feature/records").iterdir())
    record.write_bytes(record.read_bytes()[:-9])
    with pytest.raises(td.errors.IncompleteFeaturesError, match=f"{record.name}.*try the same"):
        save(FEATURES, store)
    again, calls = counted(FEATURES)
    assert_as(save(again, store), FEATURES)
    assert len(calls) == 2  # one is to compare


def test_query__reads_a_chunk_of_a_network_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task needs the rows of one block of it."""
    td.save(FEATURES, "memory://records/f.zarr", progress=False)
    read = []
    cat_file = MemoryFileSystem.cat_file

    def counting(self: MemoryFileSystem, path: str, *args: object, **options: object) -> object:
        read.append(path)
        return cat_file(self, path, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counting)
    opened = td.open("memory://records/f.zarr")
    with dask.config.set(scheduler="sync"):
        np.testing.assert_array_equal(opened.output, FEATURES.output)
    assert sum("output/c" in path for path in read) == 2


def test_save__parses_records_in_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own parser, which reads the headers of arrays, has failed in several (3.11.7)."""
    load, threads = np.load, set()

    def noted(file: Any) -> Any:
        threads.add(threading.current_thread())
        return load(file)

    monkeypatch.setattr(np, "load", noted)
    saved = save(FEATURES, tmp_path / "f.zarr")
    assert threads == {threading.main_thread()}
    for name in SMALL[1:]:
        np.testing.assert_array_equal(saved[name], FEATURES[name])
