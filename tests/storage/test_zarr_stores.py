"""What is read and written here against what zarr itself reads and writes."""

from __future__ import annotations

import asyncio
import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest
import zarr
from dask.base import tokenize
from zarr.abc.store import Store
from zarr.core.buffer import Buffer
from zarr.core.sync import sync

import trakdask as td
from trakdask.files import Folder
from trakdask.storage import zarr_stores as module
from trakdask.storage.parts import Part
from trakdask.storage.snapshot import find_part
from trakdask.storage.zarr_stores import Recorded, array_of, read_attributes, zarr_store
from trakdask.testing import simulate_features


def saved(path: Path, **options: object) -> Part:
    features = simulate_features(n_samples=6, chunks=4, **({"proj_dim": 3} | options))
    td.save(features, path, gram=False, progress=False)
    return find_part(Folder.at(path))


def test_array__writes_what_zarr_writes_itself(tmp_path: Path) -> None:
    ours, _ = saved(tmp_path / "ours"), saved(tmp_path / "theirs")
    values = np.full((2, 3, 1), np.nan, "f4")
    values[0, 1, 0] = 5
    key = (slice(4, 6), slice(None), slice(0, 1))
    store = Recorded(zarr_store(ours.folder))
    array_of(ours.writable(["feature"]).metadata("feature"), store, "feature")[key] = values
    zarr.open_group(tmp_path / "theirs", mode="r+")["feature"][key] = values
    for file in (tmp_path / "theirs/feature").iterdir():
        assert (tmp_path / "ours/feature" / file.name).read_bytes() == file.read_bytes()
    assert list(store.written) == ["feature/c.1.0.0"]


def test_array__of_nothing_but_nan_is_written(tmp_path: Path) -> None:
    part = saved(tmp_path / "f.zarr")
    file = tmp_path / "f.zarr/output/c.0.0"
    file.unlink()
    metadata = part.writable(["output"]).metadata("output")
    array_of(metadata, zarr_store(part.folder), "output")[:4, :1] = np.nan
    assert file.exists()


def test_array__metadata_are_read_once_by_a_process(tmp_path: Path) -> None:
    part = saved(tmp_path / "f.zarr")
    arrays = pickle.loads(pickle.dumps(part.writable(["feature"])))
    store = zarr_store(part.folder)
    array_of(arrays.metadata("feature"), store, "feature")
    (tmp_path / "f.zarr/feature/zarr.json").unlink()
    assert array_of(arrays.metadata("feature"), store, "feature").shape == (6, 3, 2)
    assert len(pickle.dumps(arrays)) < 500


def test_array__a_store_made_anew_is_not_written_by_old_metadata(tmp_path: Path) -> None:
    path = tmp_path / "f.zarr"
    old = saved(path).writable(["feature"])
    array_of(old.metadata("feature"), zarr_store(old.folder), "feature")
    Folder.at(path).remove()
    new = saved(path, proj_dim=5).writable(["feature"])
    assert array_of(new.metadata("feature"), zarr_store(new.folder), "feature").shape == (6, 5, 2)


def test_array__changed_metadata_are_an_error(tmp_path: Path) -> None:
    part = saved(tmp_path / "f.zarr")
    arrays = part.writable(["feature"])
    module._read.clear()
    file = tmp_path / "f.zarr/feature/zarr.json"
    file.write_text(file.read_text().replace('"float32"', '"float64"'))
    with pytest.raises(ValueError, match=r"feature/zarr\.json"):
        array_of(arrays.metadata("feature"), zarr_store(part.folder), "feature")


def test_array__the_last_thousand_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_READ", 2)
    arrays = saved(tmp_path / "f.zarr").writable(["feature", "output", "out_to_loss", "gram"])
    assert list(arrays.known) == ["feature", "output", "out_to_loss"]
    for name in arrays.known:
        array_of(arrays.metadata(name), zarr_store(arrays.folder), name)
    assert [name for _, name, *_ in module._read] == ["output", "out_to_loss"]


class Refusing(Recorded):
    """A disk that refuses the files of one array, and takes its time for those of another."""

    async def set(self, key: str, value: Buffer) -> None:
        if key.startswith("output"):
            raise OSError("this disk is full")
        for _ in range(100):
            await asyncio.sleep(0)
        await super().set(key, value)


def test_write__what_is_refused_is_raised_when_all_others_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = saved(tmp_path / "f.zarr", n_checkpoints=1)
    store = Refusing(zarr_store(part.folder))
    monkeypatch.setattr(module, "Recorded", lambda _: store)
    names = ["output", "out_to_loss", "feature"]
    shapes = {"output": (4, 1), "out_to_loss": (4, 1), "feature": (4, 3, 1)}
    values = {name: np.ones(shapes[name], "f4") for name in names}
    with pytest.raises(OSError, match="full"):
        part.writable(names).write(values, (slice(0, 4), ...))
    assert sorted(store.written) == ["feature/c.0.0.0", "out_to_loss/c.0.0"]
    assert (zarr.open_group(tmp_path / "f.zarr", mode="r")["feature"][:4] == 1).all()


def test_write__of_a_sparse_array_has_no_chunk_of_fill_values(tmp_path: Path) -> None:
    part = saved(tmp_path / "f.zarr", n_checkpoints=1)
    arrays = part.writable(["output", "out_to_loss"])
    empty = {name: np.full((4, 1), np.nan, "f4") for name in arrays.known}
    files = arrays.write(empty, (slice(0, 4), ...), sparse=("out_to_loss",))
    assert list(files) == ["output/c.0.0"]
    assert not (tmp_path / "f.zarr/out_to_loss/c.0.0").exists()


class Slow(Recorded):
    """A store that writes the first of three arrays last."""

    async def set(self, key: str, value: Buffer) -> None:
        while key.startswith("output") and len(self.written) < 2:
            await asyncio.sleep(0)
        await super().set(key, value)


def test_write__files_are_in_the_order_of_the_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = saved(tmp_path / "f.zarr", n_checkpoints=1)
    monkeypatch.setattr(module, "Recorded", Slow)
    names = ["output", "feature", "out_to_loss"]
    values = {name: np.ones((4, 3, 1) if name == "feature" else (4, 1), "f4") for name in names}
    files = part.writable(names).write(values, (slice(0, 4), ...))
    assert list(files) == ["output/c.0.0", "feature/c.0.0.0", "out_to_loss/c.0.0"]
    for path, about in files.items():
        data = (tmp_path / "f.zarr" / path).read_bytes()
        assert about == [len(data), zlib.crc32(data)]


def test_recorded__sizes_checksums_and_metadata_of_what_is_written(tmp_path: Path) -> None:
    store = Recorded(zarr_store(Folder(str(tmp_path))))
    group = zarr.create_group(store, zarr_format=3)
    group.create_array("a", data=np.arange(3))
    group.update_attributes({"later": 1})
    files = {path: (tmp_path / path).read_bytes() for path in store.written}
    assert sorted(files) == ["a/c/0", "a/zarr.json", "zarr.json"]
    expected = {path: [len(data), zlib.crc32(data)] for path, data in files.items()}
    assert store.written == expected
    assert store.metadata == {path: files[path] for path in ("zarr.json", "a/zarr.json")}


@pytest.mark.parametrize(
    "about",
    [
        *("[]", "{}", "no json", '{"zarr_format": 3, "node_type": "array"}'),
        '{"zarr_format": 2, "node_type": "group"}',
        '{"zarr_format": 3, "node_type": "group", "attributes": []}',
    ],
)
def test_read_attributes__of_what_is_no_group(tmp_path: Path, about: str) -> None:
    (tmp_path / "zarr.json").write_text(about)
    with pytest.raises(ValueError):  # noqa: PT011  (json has its own words)
        read_attributes(Folder(str(tmp_path)))


def test_read_attributes__are_those_that_zarr_wrote(tmp_path: Path) -> None:
    attributes = {"a": [1, {"b": None}], "c": "d"}
    zarr.create_group(tmp_path / "with", zarr_format=3, attributes=attributes)
    zarr.create_group(tmp_path / "without", zarr_format=3)
    assert read_attributes(Folder(str(tmp_path / "with"))) == attributes
    assert read_attributes(Folder(str(tmp_path / "without"))) == {}
    with pytest.raises(FileNotFoundError):
        read_attributes(Folder(str(tmp_path)))


def test_store__metadata_are_read_once_and_not_pickled(tmp_path: Path) -> None:
    part = saved(tmp_path / "f.zarr")
    first, second = part.store(), part.store()
    assert first.array("feature").shape == (6, 3, 2)
    (tmp_path / "f.zarr/feature/zarr.json").unlink()
    assert second.array("feature").shape == (6, 3, 2)
    with pytest.raises(td.IncompleteFeaturesError, match=r"feature/zarr\.json"):
        pickle.loads(pickle.dumps(second)).array("feature")
    with pytest.raises(td.IncompleteFeaturesError, match=r"feature/zarr\.json"):
        pickle.loads(pickle.dumps(part)).store().array("feature")


def test_store__that_need_not_be_complete_checks_nothing(tmp_path: Path) -> None:
    part = saved(tmp_path / "f.zarr", n_checkpoints=1)
    (tmp_path / "f.zarr/feature/c.0.0.0").unlink()
    file = tmp_path / "f.zarr/output/zarr.json"
    file.write_text(file.read_text() + " ")
    loose = part.store(complete=False)
    assert np.isnan(loose.array("feature")[:4]).all()
    assert loose.array("output").shape == (6, 1)
    with pytest.raises(KeyError, match="gram"):
        loose.array("gram")
    with pytest.raises(td.IncompleteFeaturesError, match=r"c\.0\.0\.0"):
        part.store().array("feature")[:4]
    with pytest.raises(ValueError, match=r"output/zarr\.json"):
        part.store().array("output")


def test_store__checks_the_same_once_zarr_has_wrapped_another(tmp_path: Path) -> None:
    part = saved(tmp_path / "f.zarr", n_checkpoints=1)
    (tmp_path / "f.zarr/feature/c.0.0.0").unlink()
    (tmp_path / "f.zarr/feature/c.1.0.0.0123456789abcdef0123456789abcdef.partial").touch()
    for store in (part.store(), part.store(complete=False)):
        again = store.with_read_only(True)
        assert sync(_listed(again)) == sync(_listed(store))
        assert "records" not in sync(_listed(again))
    with pytest.raises(td.IncompleteFeaturesError, match=r"c\.0\.0\.0"):
        part.store().with_read_only(True).array("feature")[:4]


async def _listed(store: Store) -> list[str]:
    return sorted([name async for name in store.list_dir("")])


def test_store__is_told_from_another_at_its_path(tmp_path: Path) -> None:
    path = tmp_path / "f.zarr"
    part = saved(path)
    before = tokenize(part.store())
    assert before == tokenize(part.store(only=["feature"]))
    Folder.at(path).remove()
    assert tokenize(saved(path).store()) != before
    assert tokenize(saved(tmp_path / "other.zarr").store()) != before
