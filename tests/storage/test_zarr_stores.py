"""Arrays to write to against what zarr itself opens and writes."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import zarr

import trakdask as td
from trakdask.files import Folder
from trakdask.storage import zarr_stores as module
from trakdask.storage.parts import Part
from trakdask.storage.snapshot import find_part
from trakdask.storage.zarr_stores import Recorded, zarr_store
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
    ours.writable(["feature"]).array("feature", store)[key] = values
    zarr.open_group(tmp_path / "theirs", mode="r+")["feature"][key] = values
    for file in (tmp_path / "theirs/feature").iterdir():
        assert (tmp_path / "ours/feature" / file.name).read_bytes() == file.read_bytes()
    assert list(store.written) == ["feature/c.1.0.0"]


def test_array__of_nothing_but_nan_is_written(tmp_path: Path) -> None:
    part = saved(tmp_path / "f.zarr")
    file = tmp_path / "f.zarr/output/c.0.0"
    file.unlink()
    part.writable(["output"]).array("output", zarr_store(part.folder))[:4, :1] = np.nan
    assert file.exists()


def test_array__metadata_are_read_once_by_a_process(tmp_path: Path) -> None:
    part = saved(tmp_path / "f.zarr")
    arrays = pickle.loads(pickle.dumps(part.writable(["feature"])))
    store = zarr_store(part.folder)
    arrays.array("feature", store)
    (tmp_path / "f.zarr/feature/zarr.json").unlink()
    assert arrays.array("feature", store).shape == (6, 3, 2)
    assert len(pickle.dumps(arrays)) < 500


def test_array__a_store_made_anew_is_not_written_by_old_metadata(tmp_path: Path) -> None:
    path = tmp_path / "f.zarr"
    old = saved(path).writable(["feature"])
    old.array("feature", zarr_store(old.folder))
    Folder.at(path).remove()
    new = saved(path, proj_dim=5).writable(["feature"])
    assert new.array("feature", zarr_store(new.folder)).shape == (6, 5, 2)


def test_array__changed_metadata_are_an_error(tmp_path: Path) -> None:
    part = saved(tmp_path / "f.zarr")
    arrays = part.writable(["feature"])
    module._read.clear()
    file = tmp_path / "f.zarr/feature/zarr.json"
    file.write_text(file.read_text().replace('"float32"', '"float64"'))
    with pytest.raises(ValueError, match=r"feature/zarr\.json"):
        arrays.array("feature", zarr_store(part.folder))


def test_array__the_last_thousand_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_READ", 2)
    arrays = saved(tmp_path / "f.zarr").writable(["feature", "output", "out_to_loss", "gram"])
    assert list(arrays.known) == ["feature", "output", "out_to_loss"]
    for name in arrays.known:
        arrays.array(name, zarr_store(arrays.folder))
    assert [name for _, name, *_ in module._read] == ["output", "out_to_loss"]
