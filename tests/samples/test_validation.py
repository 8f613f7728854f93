"""The oracle: the validated Dataset has the values of the given one, sample first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import xarray as xr

from tests.laziness import raise_if_dask_computes
from trakdask.samples.array_source import from_arrays, validate_samples
from trakdask.samples.torch_source import from_torch


def dataset(n: int = 10, chunks: Any = None) -> xr.Dataset:
    x = np.arange(n * 6, dtype="f4").reshape(3, n, 2)
    ds = xr.Dataset(
        {"x": (("channel", "sample", "width"), x), "y": ("sample", np.arange(n))},
        coords={"lang": ("sample", ["de", "en"] * (n // 2)), "channel": [1, 2, 3]},
    )
    return ds if chunks is None else ds.chunk(chunks).assign_coords(ds.coords)


@pytest.mark.parametrize(
    ("chunks", "size"),
    [(None, 512), ({"sample": 3}, 3), ({"sample": (2, 5, 3), "channel": 1}, 5)],
)
def test_validate_samples__form_and_values(chunks: Any, size: int) -> None:
    given = dataset(chunks=chunks)
    with raise_if_dask_computes():
        ds = validate_samples(given)
    assert ds.x.dims == ("sample", "channel", "width")
    assert ds.x.chunks == da.core.normalize_chunks((size, -1, -1), (10, 3, 2))
    assert ds.y.chunks == ds.x.chunks[:1]
    np.testing.assert_array_equal(ds.x.values, given.x.values.transpose(1, 0, 2))
    np.testing.assert_array_equal(ds.y.values, given.y.values)
    assert ds.lang.dtype == np.dtypes.StringDType()
    assert set(ds.coords) == {"lang"}
    assert not ds.xindexes


@pytest.mark.parametrize("source", ["arrays", "torch", "dataset", "chunked"])
def test_validate_samples__changes_nothing_twice(source: str) -> None:
    ds = {
        "arrays": lambda: from_arrays({"x": np.eye(5)}, coords={"label": range(5)}, chunks=2),
        "torch": lambda: from_torch([(1, 2.0)] * 5, names=("x", "y"), chunks=2),
        "dataset": lambda: validate_samples(dataset()),
        "chunked": lambda: validate_samples(dataset(chunks={"sample": (2, 5, 3)})),
    }[source]()
    again = validate_samples(ds)
    assert again.attrs == ds.attrs
    assert {n: a.data.name for n, a in again.items()} == {n: a.data.name for n, a in ds.items()}
    xr.testing.assert_identical(again.compute(), ds.compute())


def test_validate_samples__source_follows_the_content() -> None:
    ds = from_arrays({"x": np.arange(12.0)}, coords={"label": range(12)}, chunks=4)
    others = [
        ds.isel(sample=slice(0, 4)),
        ds.isel(sample=slice(4, 8)),
        ds.assign_coords(label=ds.label + 1),
        ds.assign(x=ds.x + 1),
    ]
    assert len({validate_samples(each).attrs["source"] for each in [ds, *others]}) == 5
    assert validate_samples(ds).attrs["source"] == ds.attrs["source"]
    noted = ds.assign_coords(note=("sample", ["n"] * 12))
    assert validate_samples(noted).attrs["source"] == ds.attrs["source"]
    named = ds.assign_attrs(source="imagenet-v2")
    assert validate_samples(named.isel(sample=[1, 2])).attrs["source"] == "imagenet-v2"


def test_validate_samples__opened_zarr_stays_lazy(tmp_path: Path) -> None:
    dataset().to_zarr(tmp_path / "s.zarr", consolidated=False, encoding={"lang": {"dtype": "O"}})
    expected = validate_samples(dataset())
    for chunks in ({}, None):
        opened = xr.open_zarr(tmp_path / "s.zarr", chunks=chunks, consolidated=False)
        valid = validate_samples(opened)
        assert opened.x.chunks or not opened.x.variable._in_memory
        assert isinstance(valid.lang.data, np.ndarray)
        xr.testing.assert_equal(valid.compute(), expected.compute())
        assert [type(values.data) for values in valid.values()] == [da.Array] * 2


def test_validate_samples__sample_labels_become_sample_id() -> None:
    ds = validate_samples(dataset().assign_coords(sample=[f"id-{i}" for i in range(10)]))
    assert ds.sample_id.values.tolist() == [f"id-{i}" for i in range(10)]
    assert not ds.xindexes
    assert "lang" in validate_samples(dataset().set_xindex("lang")).coords
    index = pd.MultiIndex.from_product([["a", "b"], range(5)], names=["letter", "number"])
    coords = xr.Coordinates.from_pandas_multiindex(index, "sample")
    ds = validate_samples(dataset().assign_coords(coords))
    assert set(ds.coords) == {"lang", "letter", "number"}
    assert ds.number.values.tolist() == [*range(5), *range(5)]
    assert not ds.xindexes


ONE = ("sample", [1])


@pytest.mark.parametrize(
    ("ds", "error", "word"),
    [
        (xr.Dataset({"x": ("sample", [])}), ValueError, "'x'"),
        (xr.Dataset({"x": (("z", "sample"), np.ones((3, 0)))}), ValueError, "'x'"),
        (xr.Dataset({"x": ("sample", ["a"])}), TypeError, "<U1"),
        (xr.Dataset({"x": ONE, "s": 3}), ValueError, "'s'"),
        (xr.Dataset({"x": ONE}, {"c": (("sample", "z"), [[1]])}), ValueError, "'c'"),
        (xr.Dataset({"x": ONE}, {"target": ONE}), ValueError, "'target'"),
        (xr.Dataset({"rank": ONE}), ValueError, "'rank'"),
    ],
)
def test_validate_samples__refuses(ds: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        validate_samples(ds)
