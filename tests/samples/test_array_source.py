"""The oracle: the blocks of a lazy variable, put together, are the array that was given."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import cloudpickle
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import torch
import zarr

from tests.laziness import raise_if_dask_computes
from trakdask.samples.array_source import from_arrays


def x_of(n: int = 10, *shape: int) -> np.ndarray:
    return np.arange(n * int(np.prod(shape)), dtype="f4").reshape(n, *shape)


@pytest.mark.parametrize(("n", "chunks"), [(7, 3), (6, 3), (1, 25)])
@pytest.mark.parametrize("dtype", [">f8", "u1", "?", "c8"])
def test_from_arrays__values_whatever_the_chunks(n: int, chunks: int, dtype: str) -> None:
    x = x_of(n, 3, 2).astype(dtype)
    ds = from_arrays({"x": x, "y": x[:, 0, 0]}, chunks=chunks)
    np.testing.assert_array_equal(ds.x.values, x)
    np.testing.assert_array_equal(ds.y.values, x[:, 0, 0])
    assert ds.x.dtype == x.dtype.newbyteorder("=")
    assert ds.x.data.chunks == da.core.normalize_chunks((chunks, -1, -1), x.shape)
    assert ds.y.data.chunks == ds.x.data.chunks[:1]
    assert ds.x.data.blocks[-1].compute().flags.writeable


@pytest.mark.parametrize("kind", ["list", "torch", "dask", "zarr", "series", "memmap", "masked"])
def test_from_arrays__kinds_of_arrays(kind: str, tmp_path: Path) -> None:
    x = np.arange(7.0)
    np.save(tmp_path / "x.npy", x)
    array = {
        "list": x.tolist,
        "torch": lambda: torch.tensor(x, requires_grad=True),
        "dask": lambda: da.from_array(x, chunks=2),
        "zarr": lambda: zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(2,)),
        "series": lambda: pd.Series(x, index=x[::-1]),
        "masked": lambda: np.ma.array(x, mask=False),
        "memmap": lambda: np.load(tmp_path / "x.npy", mmap_mode="r"),
    }[kind]()
    with raise_if_dask_computes():
        ds = from_arrays({"x": array}, chunks=3)
    np.testing.assert_array_equal(ds.x.values, x)
    assert ds.x.chunks == ((3, 3, 1),)


def test_from_arrays__a_graph_has_an_array_once_and_of_a_file_its_path(tmp_path: Path) -> None:
    x = np.arange(2e6, dtype="f4").reshape(-1, 100)
    np.save(tmp_path / "x.npy", x)
    for array, most in ((x, x.nbytes), (np.load(tmp_path / "x.npy", mmap_mode="r")[:], 0)):
        ds = from_arrays({"x": array}, chunks=100)
        graph = dict(ds.x.data.__dask_graph__())
        assert sum(len(cloudpickle.dumps(task)) for task in graph.values()) < most + 1000 * 200
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(ds)).x, x)


def test_from_arrays__source_is_the_content() -> None:
    def source(x: Any, coords: Any = None, name: str = "x", chunks: int = 3) -> str:
        return from_arrays({name: x}, coords=coords, chunks=chunks).attrs["source"]

    x = x_of(6, 2)
    first = source(x)
    assert first == source(x.copy()) == source(torch.tensor(x)) == source(x, chunks=5)
    assert first == source(x, {"lang": ["de"] * 6})  # no model reads strings
    others = [
        source(x + 1),
        source(x.astype("f8")),
        source(x, name="y"),
        source(x, {"label": range(6)}),
        source(x, {"label": range(1, 7)}),
        source(da.from_array(x)),
    ]
    assert len({first, *others}) == 7


@pytest.mark.parametrize("path", ["", "group/x"])
def test_from_arrays__a_zarr_array_in_a_folder_is_known_by_its_content(
    path: str, tmp_path: Path
) -> None:
    x, folders = x_of(6, 2), [tmp_path / "a.zarr", tmp_path / "b.zarr"]
    stored = zarr.create_array(folders[0], name=path or None, data=x, chunks=(2, 2))
    first = from_arrays({"x": stored}).attrs["source"]
    shutil.copytree(*folders)
    found = [zarr.open_array(folder, path=path, mode="r+") for folder in folders]
    assert {from_arrays({"x": array}).attrs["source"] for array in found} == {first}
    found[0][5, 1] = 7.0
    assert from_arrays({"x": found[0]}).attrs["source"] != first
    np.testing.assert_array_equal(from_arrays({"x": found[1]}).x, x)


@pytest.mark.parametrize("other", [None, (5, 2)], ids=["none", "another"])
def test_from_arrays__zarr_array_that_a_worker_does_not_see(
    tmp_path: Path, other: tuple[int, ...] | None
) -> None:
    """A zarr array that is open already would read its fill value there, without an error."""
    array = zarr.create_array(tmp_path / "x.zarr", data=np.ones((6, 2), "f4"), chunks=(2, 2))
    train = from_arrays({"x": array}, chunks=3)
    (tmp_path / "x.zarr").rename(tmp_path / "y.zarr")
    if other is not None:
        zarr.create_array(tmp_path / "x.zarr", shape=other, dtype="f4")
    with pytest.raises(FileNotFoundError if other is None else ValueError, match=r"x\.zarr"):
        train.x.compute()


@pytest.mark.parametrize("make", [np.asarray, torch.tensor, da.from_array, zarr.array])
def test_from_arrays__fields_that_become_coords(make: Any) -> None:
    labels = np.array([0, 2, 1])
    ds = from_arrays({"x": np.zeros((3, 2)), "label": make(labels)}, coords=["label"])
    assert list(ds.data_vars) == ["x"]
    assert isinstance(ds.label.data, np.ndarray)
    assert ds.label.values.tolist() == [0, 2, 1]
    same = from_arrays({"x": np.zeros((3, 2))}, coords={"label": labels})
    assert same.attrs["source"] == ds.attrs["source"]
