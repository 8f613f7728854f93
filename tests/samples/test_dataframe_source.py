"""The oracle: rows of a DataFrame, stacked or padded one by one, in tables of all kinds."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import dask
import dask.dataframe as dd
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray as xr

import trakdask as td
from tests.laziness import raise_if_dask_computes
from trakdask.samples.dataframe_source import from_dataframe
from trakdask.samples.tables import Files

N = 23
LENGTHS = [3, 0, 1, 4, 2, 1, 3, 1] * 3


def frame() -> pd.DataFrame:
    rows = range(N)
    return pd.DataFrame({
        "tokens": [[10 * i + j for j in range(LENGTHS[i])] for i in rows],
        "labels": [[-100] * min(LENGTHS[i], 1) + [7] * (LENGTHS[i] - 1) for i in rows],
        "boxes": [[[float(j), 0.5] for j in range(LENGTHS[i])] for i in rows],
        "pixels": [np.full(4, i, "f4") for i in rows],
        "height": np.arange(N, dtype="f4"),
        "width": np.arange(N, dtype="f4") * 2,
        "label": np.arange(N) % 3,
        "lang": [["de", "en"][i % 2] for i in rows],
        "day": pd.date_range("2020-01-01", periods=N),
        "kind": pd.Categorical([["a", "b", "c"][i % 3] for i in rows]),
    })  # fmt: skip


TABLE = pa.Table.from_pandas(frame(), preserve_index=False)


def write(folder: Path, table: Any = TABLE, sizes: tuple[int, ...] = (5, 0, 11, 7)) -> Path:
    """Write parquet files with groups of three rows."""
    folder.mkdir(exist_ok=True)
    table = pa.Table.from_pandas(table) if isinstance(table, pd.DataFrame) else table
    for index, stop in enumerate(np.cumsum(sizes)):
        part = table.slice(stop - sizes[index], sizes[index])
        pq.write_table(part, folder / f"part-{index}.parquet", row_group_size=3)
    return folder


def write_arrow(path: Path, kind: str = "stream", table: pa.Table = TABLE) -> Path:
    path.parent.mkdir(exist_ok=True)
    make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=6)
    return path


def at_url(folder: Path) -> str:
    url = "/arrow/a.arrow"
    fsspec.filesystem("memory").put(str(write_arrow(folder / "a.arrow", "file")), url)
    return f"memory:/{url}"


def lazy(folder: Path) -> Any:
    with dask.config.set({"dataframe.convert-string": False}):
        return dd.from_pandas(frame(), npartitions=4)


def hugging_face(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    columns = frame().astype({"kind": object}).to_dict("list")
    return datasets.Dataset.from_dict({**columns, "pixels": [x.tolist() for x in frame().pixels]})


def saved(folder: Path) -> Path:
    hugging_face(folder).save_to_disk(folder / "saved", num_shards=3)
    return folder / "saved"


KINDS: dict[str, Callable[[Path], Any]] = {
    "pandas": lambda folder: frame(),
    "parquet": write,
    "one file": lambda folder: write(folder, sizes=(N,)) / "part-0.parquet",
    "arrow at a URL": at_url,
    "dask": lazy,
    "dask of parquet": lambda folder: dd.read_parquet(write(folder), split_row_groups=True),
    "datasets": hugging_face,
    "saved by datasets": saved,
    "loaded by datasets": lambda f: pytest.importorskip("datasets").load_from_disk(saved(f)),
}
# dask 2026.8 calls pandas 3.1 in a way that pandas will drop.
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame.reset_index")


def padded(rows: Any, width: int, fill: float = 0) -> np.ndarray:
    return np.array([[*row, *[fill] * (width - len(row))] for row in rows])


def read(source: Any, chunks: int = 6, **options: Any) -> xr.Dataset:
    return from_dataframe(source, chunks=chunks, **options)


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [
        *((kind, 6) for kind in KINDS),
        *((kind, n) for kind in ("parquet", "dask") for n in (1, 100)),
    ],
)
def test_from_dataframe__rows_of_all_kinds_of_tables(
    kind: str, chunks: int, tmp_path: Path
) -> None:
    variables = {"image": "pixels", "y": "label", "input_ids": "tokens", "labels": "labels"}
    variables |= {"size": ["width", "height"], "one": ["width"]}
    coords = {name: name for name in ("lang", "day", "kind")} | {"h": "height"}
    lengths = {"input_ids": 5, "labels": 5}
    ds = read(KINDS[kind](tmp_path), chunks, variables=variables, coords=coords, max_length=lengths)
    assert ds.chunksizes["sample"] == tuple(min(chunks, N - i) for i in range(0, N, chunks))
    # As on a worker, and on one thread: the file system in memory gives all readers the same
    # position in a file.
    ds = pickle.loads(cloudpickle.dumps(ds))
    found, table = ds.compute(scheduler="sync"), frame()
    expected = {name: table[column].to_numpy() for name, column in coords.items()}
    expected |= {
        **{"image": np.stack(table.pixels), "y": table.label, "one": table[["width"]]},
        **{"input_ids": padded(table.tokens, 5), "labels": padded(table["labels"], 5, -100)},
        **{"attention_mask": padded([[1] * n for n in LENGTHS[:N]], 5)},
        **{"size": table[["width", "height"]]},
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
    assert found.input_ids.dtype == found.attention_mask.dtype == np.int64
    assert found.day.dtype == np.dtype("M8[ns]")
    assert not ds.xindexes


def test_from_dataframe__source_is_the_content(tmp_path: Path) -> None:
    def source(table: Any, chunks: int = 6) -> str:
        return read(table, chunks, variables={"y": "label"}).attrs["source"]

    assert source(frame()) == source(frame(), 5) != source(frame()[:5])
    rows, fewer = hugging_face(tmp_path), hugging_face(tmp_path).select(range(10))
    assert source(rows) == source(hugging_face(tmp_path), 5) != source(fewer)
    files = write(tmp_path)
    assert source(files) == source(str(files), 5)
    first, again = (dd.read_parquet(files, split_row_groups=True) for _ in range(2))
    assert source(first) == source(again)


def test_from_dataframe__lists_longer_than_the_limit(tmp_path: Path) -> None:
    options = {"variables": {"input_ids": "tokens"}, "max_length": 2, "truncate": True}
    for kind in ("pandas", "parquet", "dask"):
        found = read(KINDS[kind](tmp_path), **options).input_ids
        np.testing.assert_array_equal(found, padded([x[:2] for x in frame().tokens], 2))


def test_from_dataframe__lists_of_lists_and_a_mask_that_exists(tmp_path: Path) -> None:
    variables = {"boxes": "boxes", "attention_mask": "tokens"}
    found = read(write(tmp_path), variables=variables, max_length={"boxes": 4, "attention_mask": 6})
    assert found.boxes.shape == (N, 4, 2)
    for row, expected in zip(found.boxes.values, frame().boxes, strict=True):
        np.testing.assert_array_equal(row[: len(expected)].reshape(-1), np.ravel(expected))
        assert not row[len(expected) :].any()
    np.testing.assert_array_equal(found.attention_mask, padded(frame().tokens, 6))
    assert set(found.data_vars) == {"boxes", "attention_mask"}


def test_from_dataframe__arrays_of_more_dimensions(tmp_path: Path) -> None:
    images = np.arange(24, dtype="f4").reshape(4, 2, 3)
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(x=datasets.Array2D((2, 3), "float32"))
    for source in (
        pd.DataFrame({"x": list(images)}),
        write(tmp_path, pa.table({"x": images.tolist()}), (1, 3)),
        datasets.Dataset.from_dict({"x": images}, features=features),
    ):
        np.testing.assert_array_equal(from_dataframe(source, variables={"x": "x"}).x, images)


# ------------------------------------------------------------------------------------------- files


def test_from_dataframe__ways_to_name_files(tmp_path: Path) -> None:
    write(tmp_path, sizes=(10, 13))
    (tmp_path / "_SUCCESS").touch()
    files = [tmp_path / "part-0.parquet", str(tmp_path / "part-1.parquet")]
    sources = [tmp_path, str(tmp_path), files, [str(tmp_path / "part-*.parquet")]]
    assert len({read(source, variables={"y": "label"}).attrs["source"] for source in sources}) == 1
    turned = read(files[::-1], variables={"y": "height"})
    assert turned.y.values.tolist() == [*range(10, N), *range(10)]


def test_from_dataframe__tasks_read_their_row_groups_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, sizes=(11, 12))
    with raise_if_dask_computes():
        ds = read(tmp_path, 3, variables={"y": "label", "image": "pixels"}, coords=["lang"])
    groups_read, original = [], Files._read

    def reading(self: Files, path: str, groups: range, names: list[str]) -> pa.Table:
        groups_read.append(groups)
        return original(self, path, groups, names)

    monkeypatch.setattr(Files, "_read", reading)
    ds.isel(sample=slice(3, 6)).compute()
    assert groups_read == [range(1, 2)]
    ds.isel(sample=slice(9, 12)).compute()
    assert groups_read == [range(1, 2), range(3, 4), range(1)]  # the last is of the second file


def test_from_dataframe__saved_dataset_says_which_files_and_in_which_order(tmp_path: Path) -> None:
    for name, part in (("data-1", TABLE.slice(0, 5)), ("data-0", TABLE.slice(5))):
        write_arrow(tmp_path / f"{name}.arrow", table=part)
    write_arrow(tmp_path / "left-over.arrow")
    state = {"_data_files": [{"filename": "data-1.arrow"}, {"filename": "data-0.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert read(tmp_path, variables={"x": "height"}).x.values.tolist() == list(range(N))
    (tmp_path / "data-0.arrow").unlink()
    with pytest.raises(FileNotFoundError, match=r"data-0\.arrow"):
        read(tmp_path, variables={"x": "height"})


def test_from_dataframe__categories_that_differ_between_files(tmp_path: Path) -> None:
    for name, values in (("a", ["x", "y"]), ("b", ["y", "z"])):
        table = pa.table({"x": [1, 2], "kind": pa.array(values).dictionary_encode()})
        write_arrow(tmp_path / f"{name}.arrow", table=table)
    found = read(tmp_path, variables={"x": "x"}, coords={"of": "kind"})
    assert found["of"].values.tolist() == ["x", "y", "y", "z"]


# ---------------------------------------------------------------------------- dask and Hugging Face


def test_from_dataframe__dask_turned_lists_into_text() -> None:
    with dask.config.set({"dataframe.convert-string": True}):
        converted = dd.from_pandas(frame()[["tokens"]], npartitions=2)
    with pytest.raises(TypeError, match=r"'tokens', got the text '\[0, 1, 2\]'.*convert-string"):
        from_dataframe(converted, variables={"x": "tokens"}, max_length=5)


def test_from_dataframe__datasets_that_are_selected_or_refused(tmp_path: Path) -> None:
    dataset = hugging_face(tmp_path)
    for chosen in (
        dataset.select([3, 1, 7]),
        dataset.shuffle(seed=0),
        dataset.with_format("torch"),
    ):
        rows = [int(row) for row in chosen["label"]]
        assert read(chosen, variables={"y": "label"}).y.values.tolist() == rows
    splits = pytest.importorskip("datasets").DatasetDict(train=dataset)
    splits.save_to_disk(tmp_path / "splits")
    for source, error, message in (
        (tmp_path / "splits", ValueError, r"one split, got '.*splits'.*splits/train'"),
        (splits, TypeError, r"got DatasetDict; try .*\['train'\]"),
        (dataset.to_iterable_dataset(), TypeError, r"got IterableDataset; try .*path"),
        (dataset.with_transform(lambda rows: rows), ValueError, r"transform.*dataset\.map"),
    ):
        with pytest.raises(error, match=message):
            read(source, variables={"y": "label"})


@pytest.mark.parametrize("rows", [[2, 0, 1], [0, 0, 2]])
def test_from_dataframe__coords_are_those_of_the_rows_whatever_their_index(rows: list[int]) -> None:
    frame = pd.DataFrame({"x": [0.0, 1.0, 2.0], "name": ["a", "b", "c"]}).iloc[rows]
    for source in (frame, dd.from_pandas(frame, npartitions=1, sort=False)):
        samples = td.from_dataframe(source, variables={"x": "x"}, coords=["name"])
        assert samples.x.values.tolist() == rows
        assert samples.name.values.tolist() == ["abc"[row] for row in rows]
