"""The oracle: a coord holds the values that were given, after zarr and parquet too."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from trakdask.samples.coords import normalise_coord, normalise_coords

STRING = np.dtypes.StringDType()
DAYS = ["2020-01-01", "2021-02-03"]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], "int64"),
        ([1.5, 2], "float64"),
        ([True, False], "bool"),
        (["web", "bücher"], STRING),
        (np.array(["a", "bcd"]), STRING),
        (np.array(["a", "b"], dtype=np.dtypes.StringDType(na_object=None)), STRING),
        (np.array([1, 2], ">i2"), "int16"),
        (np.array(DAYS, "M8[D]"), "M8[ns]"),
        (np.array([1.0, np.nan], dtype=object), "float64"),
        (torch.tensor([1.0, 2.0], requires_grad=True), "float32"),
        (pd.Series(["a", "b"], index=np.arange(2.0)), STRING),
        (pd.Series([1, 2], dtype="Int64"), "int64"),
        (pd.Categorical(["b", "a"], categories=["a", "b", "c"]), STRING),
        (pd.Series([3, 1], dtype="category"), "int64"),
        (pd.to_datetime(DAYS), "M8[ns]"),
        ([datetime.date.fromisoformat(day) for day in DAYS], "M8[ns]"),
        (xr.DataArray([4, 5]), "int64"),
    ],
)
def test_normalise_coord__values_and_dtype(values: Any, dtype: Any) -> None:
    coord = normalise_coord("c", values, 2)
    assert coord.dtype == np.dtype(dtype)
    expected = values.detach() if isinstance(values, torch.Tensor) else values
    np.testing.assert_array_equal(coord, np.array(list(expected), dtype=coord.dtype))


@pytest.mark.parametrize(
    "values", [["a", "bü", ""], [1, 2, 3], [0.5, np.nan, 2], [True, False, True], None]
)
def test_normalise_coord__survives_zarr_and_parquet(values: Any, tmp_path: Path) -> None:
    given_values = np.array([*DAYS, "1999-01-01"], "M8[s]") if values is None else values
    coord = normalise_coord("c", given_values, 3)
    ds = xr.Dataset({"x": ("sample", [1.0, 2.0, 3.0])}, coords={"c": ("sample", coord)})
    ds.to_zarr(tmp_path / "a.zarr", consolidated=False, zarr_format=3)
    opened = xr.open_zarr(tmp_path / "a.zarr", consolidated=False)
    assert opened.c.dtype == coord.dtype
    np.testing.assert_array_equal(opened.c.values, coord)
    opened.to_zarr(tmp_path / "b.zarr", consolidated=False, zarr_format=3)
    ds.to_dataframe().to_parquet(tmp_path / "a.parquet")
    again = normalise_coord("c", pd.read_parquet(tmp_path / "a.parquet").c, 3)
    assert again.dtype == coord.dtype
    np.testing.assert_array_equal(again, coord)


@settings(max_examples=20)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=20), st.sampled_from(["list", "O", "U"]))
def test_normalise_coord__any_strings(values: list[str], kind: str) -> None:
    given_values: Any = values if kind == "list" else np.array(values, dtype=kind)
    # numpy's fixed-width strings cannot hold trailing NULs: then that is what was given.
    assert normalise_coord("c", given_values, len(values)).tolist() == list(given_values)


@pytest.mark.parametrize(
    ("values", "error", "word"),
    [
        (np.zeros((2, 2)), ValueError, r"\(2, 2\)"),
        (pd.Series([1, None], dtype="Int64"), ValueError, "sample 1"),
        (pd.Categorical(["a", None]), ValueError, "sample 1"),
        (np.array(["a", None], np.dtypes.StringDType(na_object=None)), ValueError, "sample 1"),
        (np.array([1, 2], "m8[s]"), TypeError, "timedelta64"),
        (np.array([b"a", b"b"]), TypeError, "S1"),
        ([["a"], ("a", "b")], TypeError, "'list', 'tuple'.*td.group_score shows"),
        (np.array(["3000-01-01", "2000-01-01"], "M8[D]"), ValueError, "3000-01-01"),
        (pd.to_datetime(DAYS).tz_localize("Europe/Rome"), TypeError, "time zone"),
    ],
)
def test_normalise_coord__refuses(values: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        normalise_coord("c", values, 2)


def test_normalise_coords__frame_gives_its_columns() -> None:
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    coords = normalise_coords(frame, 2)
    assert {name: values.tolist() for name, values in coords.items()} == frame.to_dict("list")
