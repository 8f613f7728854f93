"""Exports, read back by others: pandas, polars, duckdb, xarray."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import dask
import duckdb
import fsspec
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from distributed import Client
from pyarrow import parquet

import trakdask as td
from tests.bad_inputs import stores
from tests.clusters import exit_code
from tests.laziness import raise_if_dask_computes
from trakdask.provenance import as_values
from trakdask.testing import simulate_features

FEATURES = simulate_features(n_samples=40, proj_dim=8, chunks=16)
TARGETS = simulate_features(n_samples=10, proj_dim=8, chunks=4, seed=1)
# On this thread: workers import this module too.
SCORES = td.score(FEATURES, TARGETS).compute(scheduler="synchronous")
SOURCES = np.array(["web", "books", "code"], dtype=np.dtypes.StringDType())


def labelled() -> tuple[xr.Dataset, xr.Dataset]:
    """Features with metadata of every kind."""
    days = pd.date_range("2026-01-01", periods=40).values
    features = FEATURES.assign_coords(
        source=("sample", SOURCES[np.arange(40) % 3]),
        day=("sample", days),
        length=("sample", np.linspace(0, 1, 40)),
        clean=("sample", np.arange(40) % 2 == 0),
    )
    return features, TARGETS.assign_coords(author=("sample", SOURCES[np.arange(10) % 2]))


def rows(data: xr.DataArray | xr.Dataset, dims: list[str]) -> pd.DataFrame:
    """Return the table of a result in memory, as xarray makes it; coords come last."""
    ds = data.to_dataset() if isinstance(data, xr.DataArray) else data
    frame = ds.compute().to_dataframe(dim_order=dims).reset_index()
    first = [*dims, *ds.data_vars]
    return frame[[*first, *frame.columns.drop(first)]]


def read_by_pandas(path: Path) -> pd.DataFrame:
    frame = pd.read_parquet(path)
    text = [name for name in frame if isinstance(frame[name].dtype, pd.CategoricalDtype)]
    assert {"source", "target_author"} & set(frame) == set(text)
    return frame.astype(dict.fromkeys(text, "str"))


def read_by_duckdb(path: Path) -> pd.DataFrame:
    columns = duckdb.sql(f"select * from '{path}/*.parquet'").fetchnumpy()
    return pd.DataFrame({name: np.asarray(values) for name, values in columns.items()})


@pytest.mark.parametrize("kind", ["top", "score", "group_score", "groups_of_two", "self"])
def test_to_parquet__reread(kind: str, tmp_path: Path) -> None:
    features, targets = labelled()
    scores = td.score(features, targets)
    both = ["source", "clean"]
    data, by, files = {
        "top": (td.top_k(scores, 3), ["target", "rank"], 3),
        "score": (scores, ["target", "sample"], 3 * 3),
        "group_score": (td.group_score(features, targets, by="source"), ["target", "source"], 3),
        "groups_of_two": (td.group_score(features, targets, by=both), ["target", *both], 3),
        "self": (td.top_k(td.self_influence(features), 3, where="label == 0"), ["rank"], 1),
    }[kind]
    td.to_parquet(data, tmp_path / "p.parquet")
    assert len(list((tmp_path / "p.parquet").iterdir())) == files
    expected = rows(data, by).sort_values(by, ignore_index=True)
    for read in (read_by_pandas, read_by_duckdb):
        found = read(tmp_path / "p.parquet").sort_values(by, ignore_index=True)
        assert list(found) == [*by, *(name for name in expected if name not in by)]
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_to_parquet__ranks_without_a_sample_are_null(tmp_path: Path) -> None:
    features, targets = labelled()
    where = xr.DataArray(np.arange(40) < np.arange(10)[:, None], dims=("target", "sample"))
    top = td.top_k(td.score(features, targets), 2, where=where)
    td.to_parquet(top, tmp_path / "p.parquet")
    frame = pd.read_parquet(tmp_path / "p.parquet")
    assert (
        parquet.read_schema(next((tmp_path / "p.parquet").iterdir())).field("label").type == "int64"
    )
    missing = frame.position == -1
    assert missing.tolist() == [True, True, False, True] + [False] * 16
    for name in ("score", "source", "day", "length", "label"):
        assert (frame[name].isna() == missing).all(), name


def test_to_parquet__on_worker_processes_says_how_it_was_made(
    process_client: Client, tmp_path: Path
) -> None:
    top = td.top_k(td.score(*labelled()), 2)
    td.to_parquet(top, path := tmp_path / "p.parquet")
    assert read_by_pandas(path).score.tolist() == top.score.values.ravel().tolist()
    attrs = json.loads(parquet.read_schema(next(path.iterdir())).metadata[b"trakdask"])
    assert attrs == as_values(top.attrs)


@pytest.mark.parametrize("export_to", [td.to_zarr, td.to_parquet])
def test_export__an_accident_is_refused_before_it_runs(
    export_to: Callable[..., None], tmp_path: Path
) -> None:
    features = simulate_features(n_samples=1_300_000, proj_dim=8, chunks=130_000)
    targets = simulate_features(n_samples=10_000, proj_dim=8, chunks=10_000)
    scores = td.score(features, targets)
    needed = r"1,300,000 sample × 10,000 target|10,000 target × 1,300,000 sample"
    with raise_if_dask_computes():
        with pytest.raises(ValueError, match=rf"at most 10.00 GiB, got .*GiB.*({needed})"):
            export_to(scores, tmp_path / "out")
        with pytest.raises(ValueError, match=r"td.top_k\(scores, k=100\).* max_bytes='\d+ GiB'"):
            export_to(scores, tmp_path / "out", max_bytes="20 GB")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("sizes", [(40,), (7, 3, 7, 3), (3, 7), (5, 5, 5, 5)])
def test_to_zarr__scores_and_rankings_of_blocks_of_any_sizes(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    """Blocks differ in a store to which samples were appended."""
    some = FEATURES.isel(sample=slice(sum(sizes)))
    scores = td.score(some.chunk(sample=sizes), TARGETS, td.Trak(damping=0.1))
    td.to_zarr(scores, tmp_path / "s.zarr")
    again = xr.open_zarr(tmp_path / "s.zarr").score
    np.testing.assert_array_equal(again, scores)
    assert again.variable.chunksizes["sample"][0] == max(sizes)
    assert again.attrs["formula"] == scores.attrs["formula"]
    for name in ("label", "target_label"):
        np.testing.assert_array_equal(again[name], scores[name])
    top = td.top_k(scores, 2)
    td.to_zarr(top, tmp_path / "t.zarr")
    np.testing.assert_array_equal(xr.open_zarr(tmp_path / "t.zarr").position, top.position)


def made_from_ours(folder: Path) -> Path:
    """attrs travel with a Dataset: what others made of a result is theirs."""
    td.to_zarr(SCORES, folder / "scores.zarr")
    ds = xr.open_zarr(folder / "scores.zarr", consolidated=False).load()
    ds.to_zarr(folder / "theirs.zarr", consolidated=False)
    return folder / "theirs.zarr"


@pytest.mark.parametrize("export", [td.to_zarr, td.to_parquet])
@pytest.mark.parametrize(
    "there",
    [
        *(stores.store_in, stores.foreign_zarr, stores.foreign_parquet, stores.text_as_parquet),
        *(made_from_ours, stores.older_zarr, stores.foreign_folder),
    ],
)
def test_overwrite__never_what_another_wrote(
    tmp_path: Path, there: Callable[[Path], Path], export: Callable[..., None]
) -> None:
    path = there(tmp_path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(FileExistsError, match=f"{path.name}.*another path"):
        export(SCORES, f"file://{path}", overwrite=True)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "no space left")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failing(after: int, end: Callable[[], None] = full_disk) -> xr.DataArray:
    """Return scores of which a block ends it all, once some others are written."""

    def block(values: np.ndarray, block_id: tuple[int, int]) -> np.ndarray:
        if 3 * block_id[0] + block_id[1] >= after:
            end()
        return values

    lazy = SCORES.chunk(sample=16, target=4)
    return lazy.copy(data=lazy.data.map_blocks(block, dtype="f4"))


def reopened(place: str) -> np.ndarray:
    """Return the scores of a result, whichever function wrote it."""
    fs, path = fsspec.core.url_to_fs(place)
    if not fs.exists(f"{path}/zarr.json"):
        frames = [pd.read_parquet(fs.open(file)) for file in fs.ls(path, detail=False)]
        return pd.concat(frames).sort_values(["sample", "target"]).score.to_numpy()
    return xr.open_zarr(place).score.values.ravel()


@pytest.mark.parametrize(
    ("export", "url", "after"),
    [
        *((td.to_zarr, "{}/s", 0), (td.to_zarr, "memory://{}/s", 5), (td.to_zarr, "{}/s", 5)),
        *((td.to_parquet, "{}/s", 5), (td.to_parquet, "memory://{}/s", 0)),
    ],
)
@pytest.mark.filterwarnings("ignore:Failed to open Zarr store with consolidated:RuntimeWarning")
def test_export__that_fails_leaves_no_part_of_a_result(
    tmp_path: Path, export: Callable[..., None], url: str, after: int
) -> None:
    place = url.format(tmp_path)
    with dask.config.set(scheduler="synchronous"):
        for overwrite in (False, True):
            with pytest.raises(OSError, match="no space left"):
                export(failing(after), place, overwrite=overwrite)
            with pytest.raises((OSError, ValueError)):
                reopened(place)
        export(SCORES, place, overwrite=True)
        with pytest.raises(OSError, match="no space left"):
            export(failing(after), place, overwrite=True)
        if url.startswith("memory"):  # no rename there: the earlier result is removed first
            with pytest.raises((OSError, ValueError)):
                reopened(place)
            export(SCORES, place, overwrite=True)
        with pytest.raises(FileExistsError, match="overwrite=True"):
            export(SCORES, place)
        with pytest.raises(FileExistsError, match="the same function"):
            (td.to_parquet if export is td.to_zarr else td.to_zarr)(SCORES, place, overwrite=True)
        np.testing.assert_array_equal(reopened(place), SCORES.values.ravel())
        some = SCORES.isel(target=slice(2))
        export(some, place, overwrite=True)
    np.testing.assert_array_equal(reopened(place), some.values.ravel())
    assert [file.name for file in tmp_path.iterdir()] == ["s"] * (not url.startswith("memory"))


def export_and_die(export: Callable[..., None], place: str) -> None:
    with dask.config.set(scheduler="synchronous"):
        export(failing(5, kill), place, overwrite=True)


@pytest.mark.slow
@pytest.mark.parametrize("export", [td.to_zarr, td.to_parquet])
def test_export__that_is_killed_is_repeated_by_the_same_call(
    tmp_path: Path, export: Callable[..., None]
) -> None:
    place = str(tmp_path / "s")
    for there in (False, True):
        assert exit_code(export_and_die, export, place) == -signal.SIGKILL
        assert Path(place).exists() == there
        if there:
            np.testing.assert_array_equal(reopened(place), SCORES.values.ravel())
        export(SCORES, place, overwrite=True)
        assert [file.name for file in tmp_path.iterdir()] == ["s"]
