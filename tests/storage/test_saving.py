"""Stores: complete or resumable, refused when they do not fit, readable by others."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
import zarr
from dask.callbacks import Callback
from distributed import Client
from zarr.storage import LocalStore

import trakdask as td
from trakdask.storage.mapping import MappedChunks
from trakdask.storage.parts import _layout
from trakdask.testing import simulate_features

WHOLE = "feature-" + 32 * "0"
"""A layer that passes for featurize's own: save must know a selection from the whole."""

FEATURES = simulate_features(n_samples=40, proj_dim=8, chunks=16)


def save(features: xr.Dataset, path: Path | str, **options) -> xr.Dataset:
    return td.save(features, path, progress=False, **options)


def counted(features: xr.Dataset, limit: int | None = None) -> tuple[xr.Dataset, list[int]]:
    """The same features; each block counts itself, and all beyond the limit fail."""
    calls: list[int] = []

    def count(block: np.ndarray) -> np.ndarray:
        if block.size:
            if limit is not None and len(calls) >= limit:
                raise RuntimeError("out of budget")
            calls.append(1)
        return block

    data = da.map_blocks(
        count, features.feature.data, dtype="f4", meta=np.empty((0, 0, 0), "f4"), name=WHOLE
    )
    return features.assign(feature=(features.feature.dims, data)), calls


def records(path: Path) -> list[Path]:
    return sorted(each for each in path.glob("records/*/*/*.json") if each.parent.name != "runs")


def test_save__values_coords_and_attrs_survive(tmp_path: Path) -> None:
    names = np.array([f"id-{i}" for i in range(40)], dtype=object)
    days = pd.date_range("2026-01-01", periods=40).values
    features = FEATURES.assign_coords(name=("sample", names), day=("sample", days))
    opened = save(features, tmp_path / "f.zarr")
    computed = features.compute()
    for name in ("feature", "output", "out_to_loss"):
        np.testing.assert_array_equal(opened[name], computed[name])
        assert opened[name].dims == computed[name].dims
        assert opened[name].chunks[0] == (16, 16, 8)
    for name in ("label", "name", "day", "checkpoint"):
        np.testing.assert_array_equal(opened[name].values, features[name].values)
    own = {name: opened.attrs.pop(name) for name in ("layout", "saved")}
    assert opened.attrs == features.attrs
    assert own["saved"]["hosts"] == own["saved"]["runs"] == 1
    assert own["saved"]["started"] < own["saved"]["ended"] < pd.Timestamp.now("UTC").isoformat()
    assert own["saved"]["versions"]["trakdask"] == td.__version__
    expected = np.einsum("npc,nqc->pqc", *[computed.feature.values.astype("f8")] * 2)
    np.testing.assert_allclose(opened.gram, expected, rtol=1e-5, atol=1e-4)


def test_save__plain_zarr_that_xarray_reads_without_us(tmp_path: Path) -> None:
    save(FEATURES, tmp_path / "f.zarr")
    ds = xr.open_zarr(tmp_path / "f.zarr", consolidated=False)
    np.testing.assert_array_equal(ds.feature, FEATURES.feature)
    array = zarr.open_group(tmp_path / "f.zarr", mode="r")["feature"]
    assert array.metadata.zarr_format == 3
    assert array.chunks == (16, 8, 1)
    assert [codec.to_dict()["name"] for codec in array.compressors] == ["crc32c"]
    assert np.isnan(array.fill_value)


def test_save__resumes_and_computes_only_what_is_missing(tmp_path: Path) -> None:
    broken, first = counted(FEATURES, limit=2)
    with (
        dask.config.set(scheduler="sync"),
        pytest.raises(RuntimeError, match="out of budget"),
    ):
        save(broken, tmp_path / "f.zarr")
    assert len(records(tmp_path / "f.zarr")) == len(first) == 2
    whole, second = counted(FEATURES)
    opened = save(whole, tmp_path / "f.zarr")
    assert len(second) == 4
    np.testing.assert_array_equal(opened.feature, FEATURES.feature)
    again, third = counted(FEATURES)
    save(again, tmp_path / "f.zarr")
    assert third == []


def test_save__a_chunk_without_its_record_is_computed_again(tmp_path: Path) -> None:
    """Presence of a chunk is no evidence: its task may have died between two arrays."""
    save(FEATURES, tmp_path / "f.zarr")
    records(tmp_path / "f.zarr")[0].unlink()
    whole, calls = counted(FEATURES)
    save(whole, tmp_path / "f.zarr")
    assert len(calls) == 1


def test_save__one_task_makes_a_block_and_stores_it(tmp_path: Path) -> None:
    samples = td.from_arrays(
        {"image": np.ones((6, 3), "f4")}, coords={"label": [0, 1] * 3}, chunks=2
    )
    features = td.featurize(samples, td.Model(torch.nn.Linear(3, 2)), projector=td.Identity())
    keys: list[str] = []
    counting = Callback(pretask=lambda key, *_: keys.append(str(key)))
    with counting, dask.config.set(scheduler="sync"):
        opened = td.save(features, tmp_path / "f.zarr", gram=False, progress=False)
    n_blocks, n_read = 3, 2  # image and label
    assert len(keys) == n_blocks * (n_read + 1)
    assert opened.attrs["saved"]["devices"] == ["cpu"]
    np.testing.assert_array_equal(opened.feature, features.feature)


def test_save__killed_and_resumed_is_the_same_to_the_bit(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import itertools, os, signal, sys
        import numpy as np, dask, dask.array as da, trakdask as td
        from trakdask.testing import simulate_features
        features = simulate_features(n_samples=400, proj_dim=8, chunks=16)
        numbers = itertools.count(1)
        def kill(block):
            if block.size and next(numbers) == 8:
                os.kill(os.getpid(), signal.SIGKILL)
            return block
        meta = np.empty((0, 0, 0), "f4")
        name = "feature-" + 32 * "0"
        data = da.map_blocks(kill, features.feature.data, dtype="f4", meta=meta, name=name)
        features = features.assign(feature=(features.feature.dims, data))
        with dask.config.set(scheduler="sync"):
            td.save(features, sys.argv[1], progress=False)
        """
    )
    path = tmp_path / "f.zarr"
    assert subprocess.run([sys.executable, "-c", script, str(path)]).returncode == -signal.SIGKILL
    assert len(records(path)) == 7
    features = simulate_features(n_samples=400, proj_dim=8, chunks=16)
    whole, calls = counted(features)
    opened = save(whole, path)
    assert len(calls) == 50 - 7
    np.testing.assert_array_equal(opened.feature, features.feature)


def test_save__runs_on_the_active_client(process_client: Client, tmp_path: Path) -> None:
    def mark(block: np.ndarray) -> np.ndarray:
        return np.full_like(block, os.getpid())

    data = da.map_blocks(mark, FEATURES.out_to_loss.data, dtype="f4", meta=np.empty((0, 0), "f4"))
    features = FEATURES.assign(out_to_loss=(("sample", "checkpoint"), data))
    opened = save(features, tmp_path / "f.zarr")
    workers = set(process_client.run(os.getpid).values())
    assert set(opened.out_to_loss.values.astype(int).ravel().tolist()) <= workers


def test_save__shows_a_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    td.save(FEATURES, tmp_path / "f.zarr")
    assert "8/8" in capsys.readouterr().out  # 3 blocks and a gram matrix, 2 checkpoints


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("projector", {"kind": "simulated", "proj_dim": 8, "seed": 1}),
        ("task", "other"),
        ("source", "other data"),
        ("checkpoints", {"c0": "c0", "c1": "changed"}),
    ],
)
def test_save__other_spec_is_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    save(FEATURES, tmp_path / "f.zarr")
    other = FEATURES.assign_attrs({field: value})
    with pytest.raises(td.StoreMismatchError, match=rf"differ in {field}"):
        save(other, tmp_path / "f.zarr")
    np.testing.assert_array_equal(td.open(tmp_path / "f.zarr").feature, FEATURES.feature)


def test_save__other_block_layout_is_refused_with_the_remedy(tmp_path: Path) -> None:
    save(FEATURES, tmp_path / "f.zarr")
    other = simulate_features(n_samples=40, proj_dim=8, chunks=20).assign_attrs(FEATURES.attrs)
    with pytest.raises(td.StoreMismatchError, match=r"layout\['block'\]: expected 16, got 20"):
        save(other, tmp_path / "f.zarr")


def test_save__another_selection_is_not_taken_for_the_same(tmp_path: Path) -> None:
    """Same attrs, same sizes, other samples."""
    first, second = (FEATURES.isel(sample=slice(a, a + 16)) for a in (0, 16))
    save(first, tmp_path / "f.zarr")
    with pytest.raises(td.StoreMismatchError, match="differ in source"):
        save(second, tmp_path / "f.zarr")
    np.testing.assert_array_equal(save(first, tmp_path / "f.zarr").feature, first.feature)


def test_save__selected_checkpoints(tmp_path: Path) -> None:
    opened = save(FEATURES.isel(checkpoint=[1]), tmp_path / "f.zarr")
    np.testing.assert_array_equal(opened.feature, FEATURES.feature[..., 1:])
    assert opened.attrs["checkpoints"] == {"c1": "c1"}
    scores = td.score(opened, FEATURES.isel(checkpoint=[1]))
    assert scores.shape == (40, 40)


def test_save__selection_of_a_store(tmp_path: Path) -> None:
    opened = save(FEATURES, tmp_path / "f.zarr")
    part = save(opened.isel(sample=slice(16, 40)), tmp_path / "part.zarr")
    np.testing.assert_array_equal(part.feature, FEATURES.feature[16:])
    assert part.attrs["layout"] == {"samples": 24, "block": 16, "dtype": "float32"}
    np.testing.assert_allclose(part.gram, td.gram(FEATURES.isel(sample=slice(16, 40))), rtol=1e-5)


def test_save__without_provenance(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none of \['projector', .*assign_attrs"):
        save(FEATURES.drop_attrs(), tmp_path / "f.zarr")


def test_save__features_in_memory(tmp_path: Path) -> None:
    opened = save(FEATURES.compute(), tmp_path / "f.zarr")
    np.testing.assert_array_equal(opened.feature, FEATURES.feature)


def test_save__unequal_blocks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"equal chunks of samples.*\(3, 37\)"):
        save(FEATURES.chunk(sample=(3, 37)), tmp_path / "f.zarr")


def test_save__into_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"expected a new path.*notes.txt"):
        save(FEATURES, tmp_path)
    FEATURES.output.to_dataset().compute().drop_attrs().to_zarr(
        tmp_path / "other.zarr", consolidated=False
    )
    with pytest.raises(FileExistsError, match=r"other.zarr' without features"):
        save(FEATURES, tmp_path / "other.zarr")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_save__gram_asked_for_later(tmp_path: Path) -> None:
    opened = save(FEATURES, tmp_path / "f.zarr", gram=False)
    assert "gram" not in opened
    with pytest.raises(td.StoreMismatchError, match="made with gram=False"):
        save(FEATURES, tmp_path / "f.zarr")


class Killed(BaseException):
    """Ends a save as a signal would: nothing that it began is finished."""


def kill_at_write(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let this write to the disk, and all after it, never happen."""
    written = itertools.count(1)
    original_set, original_replace = LocalStore.set, os.replace

    async def set(store, key, value):
        if next(written) >= number:
            raise Killed
        await original_set(store, key, value)

    def replace(source, target):
        if next(written) >= number:
            raise Killed
        original_replace(source, target)

    monkeypatch.setattr(LocalStore, "set", set)
    monkeypatch.setattr(os, "replace", replace)


@pytest.mark.parametrize("number", [*range(1, 12), 15, 20])
def test_save__killed_while_the_store_was_made(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.zarr"
    with monkeypatch.context() as patched, dask.config.set(scheduler="sync"):
        kill_at_write(patched, number)
        with pytest.raises(Killed):
            save(FEATURES, path)
    with pytest.raises((FileNotFoundError, td.IncompleteFeaturesError)):
        td.open(path)
    opened = save(FEATURES, path)
    np.testing.assert_array_equal(opened.feature, FEATURES.feature)
    np.testing.assert_array_equal(opened.label, FEATURES.label)


def test_save__without_its_records_is_refused_and_kept(tmp_path: Path) -> None:
    save(FEATURES, tmp_path / "f.zarr")
    (tmp_path / "f.zarr" / "records").rename(tmp_path / "records")
    with pytest.raises(FileExistsError, match="has lost them"):
        save(FEATURES, tmp_path / "f.zarr")
    with pytest.raises(td.IncompleteFeaturesError):
        td.open(tmp_path / "f.zarr")
    (tmp_path / "records").rename(tmp_path / "f.zarr" / "records")
    np.testing.assert_array_equal(td.open(tmp_path / "f.zarr").feature, FEATURES.feature)


@pytest.mark.parametrize("field", ["dtype", "autocast", "float32_matmul_precision"])
def test_save__another_precision_is_refused_by_name(field: str, tmp_path: Path) -> None:
    save(FEATURES.assign_attrs({field: "this"}), tmp_path / "f.zarr")
    with pytest.raises(td.StoreMismatchError, match=f"differ in {field}: expected .*, got 'that'"):
        save(FEATURES.assign_attrs({field: "that"}), tmp_path / "f.zarr")


def test_save__float16(tmp_path: Path) -> None:
    opened = save(FEATURES, tmp_path / "f.zarr", dtype="float16")
    assert zarr.open_group(tmp_path / "f.zarr", mode="r")["feature"].dtype == np.float16
    assert opened.feature.dtype == np.float32
    exact = FEATURES.feature.values
    largest = np.abs(exact).max(axis=1, keepdims=True)
    assert (np.abs(opened.feature.values - exact) <= 2**-11 * largest).all()
    np.testing.assert_array_equal(opened.output, FEATURES.output)
    np.testing.assert_allclose(opened.gram, td.gram(opened), rtol=1e-12)
    assert td.verify(tmp_path / "f.zarr", checksums=True).empty
    with pytest.raises(
        td.StoreMismatchError, match=r"layout\['dtype'\]: expected .*, got 'float32'"
    ):
        save(FEATURES, tmp_path / "f.zarr")
    with pytest.raises(ValueError, match=r"expected dtype='float16', or None.*got 'float8'"):
        save(FEATURES, tmp_path / "f.zarr", dtype="float8")
    with pytest.raises(ValueError, match=r"expected float32 features.*got float64"):
        save(FEATURES.astype("f8"), tmp_path / "g.zarr", dtype="float16")


def test_open__missing_or_other(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no store"):
        td.open(tmp_path / "nowhere.zarr")
    xr.Dataset({"x": ("y", np.zeros(3))}).to_zarr(tmp_path / "x.zarr", consolidated=False)
    with pytest.raises(FileNotFoundError, match=r"x.zarr.* without features"):
        td.open(tmp_path / "x.zarr")


def test_open__incomplete(tmp_path: Path) -> None:
    save(FEATURES, tmp_path / "f.zarr")
    records(tmp_path / "f.zarr")[0].unlink()
    with pytest.raises(td.IncompleteFeaturesError, match=r"got 7 of 8 blocks.*td.save\(features"):
        td.open(tmp_path / "f.zarr")
    assert td.open(tmp_path / "f.zarr", require_complete=False).sizes["sample"] == 40


def test_records__say_what_they_are_of(tmp_path: Path) -> None:
    save(FEATURES, tmp_path / "f.zarr")
    contents = [json.loads(path.read_text()) for path in records(tmp_path / "f.zarr")]
    assert len({content["spec"] for content in contents}) == 1
    assert sorted(content["block"] for content in contents) == sorted([*"012", "gram"] * 2)


class _Reads:
    """Chunk files of ``feature`` that a store is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chunks: set[str] = set()
        original = MappedChunks.read_file

        def read_file(chunks, path):
            if "feature/c." in path:
                self.chunks.add(f"{Path(path).parts[-3]}:{Path(path).name}")
            return original(chunks, path)

        monkeypatch.setattr(MappedChunks, "read_file", read_file)


def test_query__reads_only_the_blocks_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top 10 of 5 targets among the samples of one source: 2 of 20 blocks, 1 of 4 of targets."""
    sources = np.where(np.arange(320) // 16 < 2, "web", "book").astype(object)
    train = simulate_features(n_samples=320, proj_dim=8, chunks=16)
    train = train.assign_coords(source=("sample", sources))
    targets = simulate_features(n_samples=40, proj_dim=8, chunks=10, seed=1)
    features = save(train, tmp_path / "train.zarr")
    saved_targets = save(targets, tmp_path / "targets.zarr", gram=False)
    reads = _Reads(monkeypatch)
    scores = td.score(features, saved_targets)
    top = td.top_k(scores.isel(target=slice(12, 17)), 10, where=scores.source == "web").compute()
    assert set(top.source.values.ravel().tolist()) == {"web"}
    by_store = [chunk.split(":")[0] for chunk in sorted(reads.chunks)]
    counts = {name: len(list(group)) for name, group in itertools.groupby(sorted(by_store))}
    assert counts == {"targets.zarr": 1 * 2, "train.zarr": 2 * 2}  # blocks × checkpoints


def test_save__same_place_for_every_worker(
    tmp_path: Path, process_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path is the notebook's, not the workers', which work elsewhere."""
    monkeypatch.chdir(tmp_path)
    opened = save(FEATURES, Path("f.zarr"))
    assert (tmp_path / "f.zarr" / "zarr.json").exists()
    np.testing.assert_array_equal(opened.feature, FEATURES.feature)
    td.to_zarr(td.score(opened, FEATURES), "scores.zarr")
    assert xr.open_zarr(tmp_path / "scores.zarr", consolidated=False).score.notnull().all()


@pytest.mark.parametrize("url", ["file://{}/f.zarr", "memory://{}/f.zarr"])
def test_save__urls(tmp_path: Path, url: str) -> None:
    opened = save(FEATURES, url.format(tmp_path))
    np.testing.assert_array_equal(opened.feature, FEATURES.feature)
    whole, calls = counted(FEATURES)
    save(whole, url.format(tmp_path))
    assert calls == []


def test_layout__last_block_may_be_smaller() -> None:
    assert _layout(FEATURES, None) == {"samples": 40, "block": 16, "dtype": "float32"}


@pytest.mark.parametrize("options", [{"retries": -1}, {"retries": "2"}, {"retries": True}])
def test_save__retries_are_a_number(tmp_path: Path, options: dict) -> None:
    with pytest.raises(ValueError, match=r"expected retries as 0, 1, 2, \.\.\., got"):
        td.save(simulate_features(n_samples=4, proj_dim=2), tmp_path / "f.zarr", **options)


def test_save__no_samples(tmp_path: Path) -> None:
    nothing = simulate_features(n_samples=4, proj_dim=2).isel(sample=slice(0))
    with pytest.raises(ValueError, match="at least one sample, got"):
        td.save(nothing, tmp_path / "f.zarr")


CALLS = {
    "save": lambda store: td.save(simulate_features(4, 2), store, progress=False),
    "open": td.open,
    "verify": td.verify,
    "repair": lambda store: td.verify(store, repair=True),
    "drop": lambda store: td.drop(store, where=lambda ds: ds.label == 1),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("inside", ["", "below"])
def test_store__file_where_a_folder_should_be(tmp_path: Path, call: str, inside: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match=r"expected a folder, got the file .*file'"):
        CALLS[call](tmp_path / "file" / inside)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("call", [name for name in CALLS if name != "save"])
def test_store__nothing_is_made_where_there_is_none(tmp_path: Path, call: str) -> None:
    with pytest.raises(FileNotFoundError, match="there is no store"):
        CALLS[call](tmp_path / "f.zarr")
    assert list(tmp_path.iterdir()) == []


def test_save__store_that_a_worker_does_not_see(tmp_path: Path) -> None:
    """As on a machine with another disk: the store is gone before the first block is written."""
    store = tmp_path / "f.zarr"

    def move(block: np.ndarray) -> np.ndarray:
        if block.size:
            store.rename(tmp_path / "elsewhere")
        return block

    data = da.map_blocks(move, FEATURES.feature.data, meta=np.empty((0, 0, 0), "f4"), name=WHOLE)
    with (
        dask.config.set(scheduler="sync"),
        pytest.raises(OSError, match="does not see it: try a path or URL that every worker"),
    ):
        save(FEATURES.assign(feature=(FEATURES.feature.dims, data)), store)
