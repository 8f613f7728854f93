"""Arrays are put in the order of others by their labels."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
import xarray as xr

from trakdask.variables import aligned, lazy_features

LABELS = ["a", "b", "c"]
TO = xr.DataArray(np.zeros((3, 2)), dims=("sample", "target"), coords={"sample": LABELS})


def test_aligned__equals_a_lookup_of_each_label() -> None:
    given = xr.DataArray([1, 2, 3, 4], coords={"sample": ["c", "x", "a", "b"]})
    expected = [int(given.sel(sample=label)) for label in LABELS]
    found = aligned(given, TO, what="where")
    assert found.values.tolist() == expected == [3, 4, 1]
    assert found.sample.values.tolist() == LABELS


@pytest.mark.parametrize(
    "given",
    [
        xr.DataArray([1, 2, 3], dims="sample"),
        xr.DataArray([1, 2, 3], coords={"sample": LABELS}),
        xr.DataArray([1, 2, 3], dims="sample", coords={"label": ("sample", [7, 8, 9])}),
    ],
)
def test_aligned__by_position_without_labels_or_with_equal_ones(given: xr.DataArray) -> None:
    assert aligned(given, TO, what="where").values.tolist() == [1, 2, 3]


def test_aligned__positions_are_no_labels() -> None:
    given = xr.DataArray([1, 2, 3], coords={"sample": [0, 1, 2]})
    assert aligned(given, TO.drop_vars("sample"), what="where").values.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("given", "to", "words"),
    [
        (xr.DataArray([1, 2], coords={"sample": ["a", "b"]}), TO, "without 'c'"),
        (xr.DataArray([1, 2, 3], coords={"sample": ["a", "b", "x"]}), TO, "without 'c'"),
        (
            xr.DataArray([1, 2, 3], coords={"sample": LABELS[::-1]}),
            TO.drop_vars("sample"),
            r"labels \['c', 'b', 'a'\]",
        ),
        (
            xr.DataArray([1, 2, 3], dims="sample", coords={"label": ("sample", [7, 8, np.nan])}),
            TO.assign_coords(label=("sample", [7, 9, np.nan])),
            r"9.0 for the coord 'label' at sample 1, got 8.0",
        ),
    ],
)
def test_aligned__what_has_no_counterpart_is_refused(given, to, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        aligned(given, to, what="where")


def test_lazy_features__coords_in_other_chunks_are_loaded() -> None:
    """As after Dataset.to_zarr and xarray.open_zarr, which give a small coord a single chunk."""
    feature = da.ones((6, 2, 1), chunks=(2, 2, 1))
    label = xr.DataArray(da.arange(6, chunks=6), dims="sample")
    features = xr.Dataset({"feature": (("sample", "proj_dim", "checkpoint"), feature)})
    found = lazy_features(features.assign_coords(label=label))
    assert found.label.values.tolist() == [0, 1, 2, 3, 4, 5]
    assert found.label.chunks is None
    assert found.feature.variable.chunksizes["sample"] == (2, 2, 2)


@pytest.mark.parametrize("form", ["in memory", "one chunk", "chunks of 1"])
def test_lazy_features__chunks_of_one_checkpoint(form: str) -> None:
    values = np.arange(24.0).reshape(4, 2, 3)
    array = xr.DataArray(values, dims=("sample", "proj_dim", "checkpoint"))
    if form != "in memory":
        array = array.chunk(sample=2, checkpoint=-1 if form == "one chunk" else 1)
    found = lazy_features(xr.Dataset({"feature": array})).feature
    rows = (4,) if form == "in memory" else (2, 2)
    assert found.chunks == (rows, (2,), (1, 1, 1))
    np.testing.assert_array_equal(found, values)
