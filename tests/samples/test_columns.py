"""Padding against a loop over rows; the same columns from pandas, dask and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray as xr

from trakdask.samples.dataframe_source import from_dataframe

TOKENS = [[5, 6, 7], [], [8], [9, 10, 11, 12], [13, 14], [15], [16, 17, 18], [19]]


def frame() -> pd.DataFrame:
    n = len(TOKENS)
    return pd.DataFrame({
        "tokens": TOKENS,
        "labels": [[-100, *row[1:]] if row else [] for row in TOKENS],
        "boxes": [[[float(t), 0.5] for t in row] for row in TOKENS],
        "height": np.arange(n, dtype="f4"),
        "width": np.arange(n, dtype="f4") * 2,
        "target": np.arange(n) % 3,
    })  # fmt: skip


def parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pandas(frame()), folder / "a.parquet", row_group_size=3)
    return folder


def lazy(folder: Path) -> Any:
    with dask.config.set({"dataframe.convert-string": False}):
        return dd.from_pandas(frame(), npartitions=3)


SOURCES = {"pandas": lambda folder: frame(), "parquet": parquet, "dask": lazy}


def padded(rows: list[list[Any]], width: int, fill: float) -> np.ndarray:
    return np.array([[*row, *[fill] * (width - len(row))] for row in rows])


def read(kind: str, folder: Path, **options: Any) -> xr.Dataset:
    return from_dataframe(SOURCES[kind](folder), chunks=3, **options).compute(scheduler="sync")


@pytest.mark.parametrize("kind", SOURCES)
def test_from_dataframe__lists_of_different_lengths(kind: str, tmp_path: Path) -> None:
    variables = {"input_ids": "tokens", "labels": "labels"}
    found = read(kind, tmp_path, variables=variables, max_length=5)
    np.testing.assert_array_equal(found.input_ids, padded(TOKENS, 5, 0))
    np.testing.assert_array_equal(found.labels, padded(frame().labels.tolist(), 5, -100))
    np.testing.assert_array_equal(
        found.attention_mask, padded([[1] * len(row) for row in TOKENS], 5, 0)
    )
    assert found.input_ids.dtype == found.attention_mask.dtype == np.int64
    assert found.input_ids.dims == ("sample", "input_ids_dim_1")


@pytest.mark.parametrize("kind", SOURCES)
def test_from_dataframe__lists_longer_than_the_limit(kind: str, tmp_path: Path) -> None:
    options = {"variables": {"input_ids": "tokens"}, "max_length": 2}
    found = read(kind, tmp_path, truncate=True, **options)
    np.testing.assert_array_equal(found.input_ids, padded([row[:2] for row in TOKENS], 2, 0))
    with pytest.raises(
        ValueError, match=r"at most 2 .*'input_ids', got \d for sample [036]; .*trun"
    ):
        read(kind, tmp_path, **options)


def test_from_dataframe__lists_of_lists_and_a_mask_that_exists(tmp_path: Path) -> None:
    variables = {"boxes": "boxes", "attention_mask": "tokens"}
    lengths = {"boxes": 4, "attention_mask": 6}
    found = read("parquet", tmp_path, variables=variables, max_length=lengths)
    assert found.boxes.shape == (8, 4, 2)
    for row, expected in zip(found.boxes.values, frame().boxes, strict=True):
        np.testing.assert_array_equal(row[: len(expected)].reshape(-1), np.ravel(expected))
        assert not row[len(expected) :].any()
    np.testing.assert_array_equal(found.attention_mask, padded(TOKENS, 6, 0))
    assert set(found.data_vars) == {"boxes", "attention_mask"}


@pytest.mark.parametrize("kind", SOURCES)
def test_from_dataframe__several_columns_become_one_variable(kind: str, tmp_path: Path) -> None:
    found = read(kind, tmp_path, variables={"x": ["width", "height"], "one": ["width"]})
    np.testing.assert_array_equal(found.x, frame()[["width", "height"]].to_numpy())
    assert found.x.dtype == np.float32
    assert found.one.shape == (8, 1)


@pytest.mark.parametrize("kind", SOURCES)
def test_from_dataframe__coords_by_other_names(kind: str, tmp_path: Path) -> None:
    options = {"variables": {"x": "width"}}
    found = read(kind, tmp_path, coords={"label": "target", "h": "height"}, **options)
    assert found.label.values.tolist() == frame().target.tolist()
    assert found.h.values.tolist() == frame().height.tolist()
    with pytest.raises(ValueError, match=r"'target'.*my_target"):
        read(kind, tmp_path, coords=["target"], **options)


def test_from_dataframe__dask_turned_lists_into_text() -> None:
    with dask.config.set({"dataframe.convert-string": True}):
        converted = dd.from_pandas(frame()[["tokens"]], npartitions=2)
    with pytest.raises(TypeError, match=r"'tokens', got the text '\[5, 6, 7\]'.*convert-string"):
        from_dataframe(converted, variables={"x": "tokens"}, max_length=5)


def test_from_dataframe__arrays_of_more_dimensions_in_a_frame() -> None:
    images = np.arange(24, dtype="f4").reshape(4, 2, 3)
    found = from_dataframe(pd.DataFrame({"image": list(images)}), variables={"x": "image"})
    np.testing.assert_array_equal(found.x, images)
    assert found.x.dtype == np.float32
