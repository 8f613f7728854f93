"""Stores that are made to hurt: nothing runs, nothing outside is touched, nothing is allocated."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import zarr

import trakdask as td
from trakdask.files import Folder
from trakdask.storage.verification import inventory
from trakdask.testing import simulate_features

FEATURES = simulate_features(n_samples=40, proj_dim=8, chunks=16)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    td.save(FEATURES, tmp_path / "f.zarr", progress=False)
    return tmp_path / "f.zarr"


def change(path: Path, **values: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **values}))


def change_attrs(store: Path, **values: object) -> None:
    attrs = json.loads((store / "zarr.json").read_text())["attributes"]
    change(store / "zarr.json", attributes={**attrs, **values})


class Evil:
    """Unpickling it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_open__pickled_objects_of_the_older_format_do_not_run(tmp_path: Path) -> None:
    """Format 2 has a codec that unpickles; we never write it, and must never read it."""
    group = zarr.open_group(tmp_path / "old.zarr", mode="w", zarr_format=2)
    group.attrs["layout"] = {"samples": 1, "block": 1, "dtype": "float32"}
    (tmp_path / "old.zarr/label").mkdir()
    metadata = {
        "zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|O", "fill_value": None,
        "compressor": None, "filters": [{"id": "pickle", "protocol": 5}], "order": "C",
    }  # fmt: skip
    (tmp_path / "old.zarr/label/.zarray").write_text(json.dumps(metadata))
    values = np.array([Evil(tmp_path / "mark")], dtype=object)
    (tmp_path / "old.zarr/label/0").write_bytes(pickle.dumps(values))
    with pytest.raises(FileNotFoundError, match="older zarr format 2"):
        td.open(tmp_path / "old.zarr")
    with pytest.raises(FileExistsError, match="older zarr format 2"):
        td.save(FEATURES, tmp_path / "old.zarr", progress=False)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("require_complete", [True, False])
@pytest.mark.parametrize(
    "ids", [{"c0": "../../../outside", "c1": 1}, {"c0": -1, "c1": 1}, {"c0": True}, [1, 2], None]
)
def test_open__folders_that_are_no_numbers(
    store: Path, ids: object, require_complete: bool
) -> None:
    change_attrs(store, checkpoint_ids=ids)
    with pytest.raises(ValueError, match="expected whole numbers"):
        td.open(store, require_complete=require_complete)


@pytest.mark.parametrize("samples", [10**15, 10**11])
def test_open__huge_shapes(store: Path, samples: int) -> None:
    block = 10**9
    for name in ("feature", "output", "out_to_loss", "error", "label"):
        metadata = json.loads((store / name / "zarr.json").read_text())
        metadata["shape"][0] = samples
        metadata["chunk_grid"]["configuration"]["chunk_shape"][0] = block
        change(store / name / "zarr.json", **metadata)
    change_attrs(store, layout={"samples": samples, "block": block, "dtype": "float32"})
    with pytest.raises(td.IncompleteFeaturesError):
        td.open(store)
    with pytest.raises(ValueError, match=r"of the store .* got [0-9,]+ bytes and"):
        td.open(store, require_complete=False)


def test_open__more_samples_than_it_says(store: Path) -> None:
    change(store / "feature/zarr.json", shape=[10**15, 8, 2])
    with pytest.raises(ValueError, match=r"feature/zarr.json.*other bytes"):
        td.open(store)
    with pytest.raises(ValueError, match=r"'feature' .*\(40, 16\), got \(10+, 16\)"):
        td.open(store, require_complete=False)


def test_open__huge_blocks(store: Path) -> None:
    metadata = json.loads((store / "feature/zarr.json").read_text())
    metadata["shape"][1] = 10**12
    metadata["chunk_grid"]["configuration"]["chunk_shape"][1] = 10**12
    change(store / "feature/zarr.json", **metadata)
    with pytest.raises(ValueError, match=r"feature/zarr.json.*other bytes"):
        td.open(store)
    with pytest.raises(ValueError, match=r"'feature' of the store .* got [0-9,]+ bytes and"):
        td.open(store, require_complete=False)


def test_open__endless_blocks(store: Path) -> None:
    change_attrs(store, layout={"samples": 10**18, "block": 1, "dtype": "float32"})
    for call in (td.open, lambda path: td.verify(path, repair=False)):
        if call is not td.open:  # its list of files agrees with it
            path = next(store.glob("records/*/template.json"))
            content = json.loads(path.read_text())
            del content["zarr.json"]
            path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="no more than 10,000,000 blocks"):
            call(store)


def test_verify__repair_writes_only_inside(store: Path) -> None:
    """A list of files that names another place is not followed there."""
    path = next(store.glob("records/*/template.json"))
    content = json.loads(path.read_text())
    evil = {"bytes": 1, "checksum": 0, "content": "mine"}
    absolute = store.parent / "absolute"
    content["../outside/zarr.json"] = content[f"{absolute}/zarr.json"] = evil
    path.write_text(json.dumps(content))
    with pytest.raises(FileNotFoundError, match=r"readable template\.json"):
        td.verify(store, repair=True)
    with pytest.raises(ValueError, match="outside"):
        inventory(Folder(str(store)))
    assert not (store.parent / "outside").exists()
    assert not absolute.exists()


def test_write__never_through_a_link(store: Path, tmp_path: Path) -> None:
    """A store from others may have links that lead elsewhere: all writers refuse them."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (store / "label/zarr.json").unlink()
    (store / "label").rename(tmp_path / "label")
    (store / "label").symlink_to(elsewhere)
    calls = [
        lambda: td.verify(store, repair=True),
        lambda: td.save(FEATURES, store, progress=False),
        lambda: td.drop(store, where=lambda ds: ds.label == 1),
        lambda: td.assign_coords(store, {"label": FEATURES.label.values}),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"symbolic link 'label' to '.*elsewhere'"):
            call()
    assert list(elsewhere.iterdir()) == []
    assert not list(store.glob("records/lease-*"))


@pytest.mark.parametrize("name", ["records", "parts", "drops", "assigned"])
def test_write__never_through_a_link_in_place_of_a_folder(
    store: Path, tmp_path: Path, name: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if (store / name).exists():
        (store / name).rename(elsewhere / name)
    (store / name).symlink_to(elsewhere / name if name == "records" else elsewhere)
    before = sorted(elsewhere.rglob("*"))
    with pytest.raises(ValueError, match=f"symbolic link '{name}'"):
        td.verify(store, repair=True)
    with pytest.raises(ValueError, match=f"symbolic link '{name}'"):
        td.save(FEATURES, store, progress=False)
    assert sorted(elsewhere.rglob("*")) == before


def test_verify__copy_of_metadata_that_was_changed_is_not_written(store: Path) -> None:
    path = next(store.glob("records/*/template.json"))
    content = json.loads(path.read_text())
    content["label/zarr.json"]["content"] = "{}"
    path.write_text(json.dumps(content))
    (store / "label/zarr.json").unlink()
    with pytest.raises(ValueError, match=r"copy of 'label/zarr.json'.*backup"):
        td.verify(store, repair=True)
    assert not (store / "label/zarr.json").exists()
