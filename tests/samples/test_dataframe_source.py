"""The oracle: pandas reads the files at once, rows are stacked one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client

import trakdask as td
from trakdask.samples.dataframe_source import from_dataframe
from trakdask.samples.tables import Files

VARIABLES = {"input_ids": "tokens", "image": "pixels", "label": "label"}
COORDS = ("lang", "day", "score_of_row", "kind")


def frame_of(n: int = 23) -> pd.DataFrame:
    rows = range(n)
    return pd.DataFrame({
        "tokens": [[i, i + 1, i + 2] for i in rows],
        "pixels": [np.full(4, i, "f4") for i in rows],
        "label": np.arange(n) % 3,
        "lang": [["de", "en"][i % 2] for i in rows],
        "day": pd.date_range("2020-01-01", periods=n),
        "score_of_row": np.arange(n) / 2,
        "kind": pd.Categorical([["a", "b", "c"][i % 3] for i in rows]),
        "text": ["t"] * n,
    })  # fmt: skip


def write(folder: Path, frame: pd.DataFrame, sizes: tuple[int, ...], row_group: int) -> None:
    start = 0
    for index, size in enumerate(sizes):
        table = pa.Table.from_pandas(frame.iloc[start : start + size], preserve_index=False)
        pq.write_table(table, folder / f"part-{index}.parquet", row_group_size=row_group)
        start += size
    assert start == len(frame)


def check(ds: Any, frame: pd.DataFrame, chunks: int) -> None:
    n = len(frame)
    assert ds.chunksizes["sample"] == tuple(min(chunks, n - start) for start in range(0, n, chunks))
    for name, column in VARIABLES.items():
        expected = np.array([np.asarray(value) for value in frame[column]])
        assert ds[name].dtype == expected.dtype
        np.testing.assert_array_equal(ds[name].values, expected)
    assert ds.lang.values.tolist() == frame.lang.tolist()
    assert ds.kind.values.tolist() == frame.kind.tolist()
    assert ds.day.dtype == np.dtype("M8[ns]")
    assert (ds.day.values == frame.day.to_numpy()).all()
    np.testing.assert_array_equal(ds.score_of_row, frame.score_of_row)
    assert all(isinstance(ds[name].data, np.ndarray) for name in COORDS)
    assert not ds.xindexes


@pytest.mark.parametrize(("sizes", "row_group"), [((23,), 23), ((23,), 4), ((5, 0, 11, 7), 3)])
@pytest.mark.parametrize("chunks", [1, 6, 100])
def test_from_dataframe__parquet(
    sizes: tuple[int, ...], row_group: int, chunks: int, tmp_path: Path
) -> None:
    frame = frame_of()
    write(tmp_path, frame, sizes, row_group)
    with td.testing.raise_if_dask_computes():
        ds = from_dataframe(
            str(tmp_path / "*.parquet"), variables=VARIABLES, coords=COORDS, chunks=chunks
        )
    check(ds, frame, chunks)


def test_from_dataframe__ways_to_name_parquet_files(tmp_path: Path) -> None:
    write(tmp_path, frame_of(), (10, 13), 5)
    (tmp_path / "_SUCCESS").touch()
    files = [tmp_path / "part-0.parquet", str(tmp_path / "part-1.parquet")]
    sources = [tmp_path, str(tmp_path), files, [str(tmp_path / "part-*.parquet")]]
    datasets = [from_dataframe(each, variables={"y": "label"}) for each in sources]
    assert len({ds.attrs["source"] for ds in datasets}) == 1
    assert datasets[0].y.values.tolist() == frame_of().label.tolist()
    turned = from_dataframe(files[::-1], variables={"y": "label"})
    assert turned.y.values.tolist() == [*frame_of().label[10:], *frame_of().label[:10]]


def test_from_dataframe__tasks_read_their_row_groups_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, frame_of(), (11, 12), 3)
    ds = from_dataframe(tmp_path, variables=VARIABLES, chunks=3)
    read, one = [], Files._read
    monkeypatch.setattr(
        Files,
        "_read",
        lambda self, path, groups, names: (read.append(groups), one(self, path, groups, names))[1],
    )
    ds.isel(sample=slice(3, 6)).compute()
    assert read == [range(1, 2)]
    ds.isel(sample=slice(9, 12)).compute()
    assert read == [range(1, 2), range(3, 4), range(1)]  # the last is that of the second file


def test_from_dataframe__pandas(tmp_path: Path) -> None:
    frame = frame_of()
    with td.testing.raise_if_dask_computes():
        ds = from_dataframe(frame, variables=VARIABLES, coords=COORDS, chunks=6)
    check(ds, frame, 6)
    again = from_dataframe(frame_of(), variables=VARIABLES, coords=COORDS, chunks=5)
    assert ds.attrs["source"] == again.attrs["source"]


# dask 2026.8 calls pandas 3.1 in a way that pandas will drop.
@pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame.reset_index")
@pytest.mark.parametrize("chunks", [4, 100])
def test_from_dataframe__dask(chunks: int, tmp_path: Path) -> None:
    frame = frame_of()
    write(tmp_path, frame, (5, 0, 11, 7), 3)
    from_parquet = dd.read_parquet(tmp_path, split_row_groups=True)
    ds = from_dataframe(from_parquet, variables=VARIABLES, coords=COORDS, chunks=chunks)
    check(ds, frame, chunks)
    again = dd.read_parquet(tmp_path, split_row_groups=True)
    again = from_dataframe(again, variables=VARIABLES, coords=COORDS, chunks=chunks)
    assert again.attrs["source"] == ds.attrs["source"]
    plain = dd.from_pandas(frame[["label"]], npartitions=4)
    y = from_dataframe(plain, variables={"y": "label"}, chunks=chunks).y
    assert y.values.tolist() == frame.label.tolist()


def bad(column: str, values: list[Any]) -> pd.DataFrame:
    return frame_of(len(values)).assign(**{column: values})


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2]] * 7 + [[1]], "'x'.*got 1 for sample 7"),
        ([[1]] * 4 + [[None]], "'x', got none for sample 4"),
        ([[[1, 2], [3, 4]]] * 7 + [[[1, 2], [3]]], "got 1 for sample 7"),
    ],
)
def test_from_dataframe__parquet_bad_row_is_named(
    tokens: list[Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, bad("tokens", tokens), (len(tokens),), 3)
    ds = from_dataframe(tmp_path, variables={"x": "tokens"}, chunks=2)
    ds.isel(sample=slice(0, 2)).compute()
    with pytest.raises(ValueError, match=message):
        ds.compute()


def test_from_dataframe__nested_lists_have_more_dimensions(tmp_path: Path) -> None:
    values = [[[i, 1], [2, 3], [4, 5]] for i in range(6)]
    write(tmp_path, bad("tokens", values), (2, 4), 3)
    ds = from_dataframe(tmp_path, variables={"x": "tokens"}, chunks=4)
    assert ds.x.dims == ("sample", "x_dim_1", "x_dim_2")
    np.testing.assert_array_equal(ds.x.values, np.array(values))


def test_from_dataframe__integer_coord_with_nulls_is_refused(tmp_path: Path) -> None:
    table = pa.table({"y": pa.array([1, 2, 3]), "id": pa.array([1, None, 3])})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"'id' lacks 1 .*sample 1\b"):
        from_dataframe(tmp_path / "a.parquet", variables={"y": "y"}, coords="id")


@pytest.mark.slow
def test_from_dataframe__read_by_worker_processes(process_client: Client, tmp_path: Path) -> None:
    frame = frame_of()
    write(tmp_path, frame, (10, 13), 5)
    ds = from_dataframe(tmp_path, variables=VARIABLES, coords=COORDS, chunks=6)
    computed = process_client.compute(ds).result()
    np.testing.assert_array_equal(computed.input_ids, np.array(frame.tokens.tolist()))
    np.testing.assert_array_equal(computed.label, frame.label)
