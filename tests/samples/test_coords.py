"""The oracle: a coord holds the values that were given, after zarr and parquet too."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

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
    ("values", "error", "word"),
    [
        (np.zeros((2, 2)), ValueError, r"\(2, 2\)"),
        (pd.Series([1, None], dtype="Int64"), ValueError, "sample 1"),
        (pd.Categorical(["a", None]), ValueError, "sample 1"),
        (np.array(["a", None], np.dtypes.StringDType(na_object=None)), ValueError, "sample 1"),
        (np.array([1, 2], "m8[s]"), TypeError, "timedelta64"),
        (np.array([b"a", b"b"]), TypeError, "S1"),
        ([["a"], ("a", "b")], TypeError, "'list', 'tuple'.*td.group_score shows"),
    ],
)
def test_normalise_coord__refuses(values: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        normalise_coord("c", values, 2)


def test_normalise_coords__frame_gives_its_columns() -> None:
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    coords = normalise_coords(frame, 2)
    assert {name: values.tolist() for name, values in coords.items()} == frame.to_dict("list")
