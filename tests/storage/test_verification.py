"""Damage of every kind is found, named, and mended by computing nothing else again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import xarray as xr

import trakdask as td
from trakdask.testing import simulate_features

WHOLE = "feature-" + 32 * "0"
PARTIAL = f"{32 * 'a'}.partial"
FEATURES = simulate_features(n_samples=40, proj_dim=8, chunks=16)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    td.save(FEATURES, tmp_path / "f.zarr", progress=False)
    return tmp_path / "f.zarr"


def save_and_count(store: Path) -> int:
    """Save again; return how many blocks were computed for it, and check all of the result."""
    calls: list[int] = []

    def count(block: np.ndarray) -> np.ndarray:
        calls.append(bool(block.size))
        return block

    data = da.map_blocks(
        count, FEATURES.feature.data, dtype="f4", meta=np.empty((0, 0, 0), "f4"), name=WHOLE
    )
    counted = FEATURES.assign(feature=(FEATURES.feature.dims, data))
    opened = td.save(counted, store, progress=False)
    whole = xr.merge([FEATURES, td.gram(FEATURES)], compat="override", join="override").compute()
    for name in ("feature", "output", "out_to_loss", "label"):
        np.testing.assert_array_equal(opened[name], whole[name])
    np.testing.assert_allclose(opened.gram, whole.gram, rtol=1e-6, atol=1e-5)
    assert td.verify(store, checksums=True).empty
    return sum(calls)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_verify__nothing_is_wrong(store: Path) -> None:
    for checksums in (False, True):
        found = td.verify(store, checksums=checksums)
        assert found.empty
        assert list(found) == ["path", "found", "block", "checkpoint", "remedy"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [(truncate, "513 bytes instead of 516"), (Path.unlink, "no such file")],
)
def test_verify__torn_or_lost_chunk(
    store: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(store / "feature/c.1.0.0")
    (fault,) = td.verify(store).to_dict("records")
    assert (fault["path"], fault["block"], fault["checkpoint"]) == ("feature/c.1.0.0", "1", 0)
    assert words in fault["found"]
    assert "td.save(features, store)" in fault["remedy"]
    assert save_and_count(store) == 1  # sizes are looked at by every save


def test_verify__bit_flip(store: Path) -> None:
    flip(store / "feature/c.2.0.1")
    assert td.verify(store).empty
    (fault,) = td.verify(store, checksums=True).to_dict("records")
    assert (fault["path"], fault["block"], fault["checkpoint"]) == ("feature/c.2.0.1", "2", 1)
    with pytest.raises(ValueError, match="checksum"):  # no reader takes it for numbers
        td.open(store).feature.compute()
    td.verify(store, checksums=True, repair=True)
    with pytest.raises(td.IncompleteFeaturesError, match="7 of 8"):
        td.open(store)
    assert save_and_count(store) == 1


def test_verify__damaged_gram(store: Path) -> None:
    flip(store / "gram/c.0.0.1")
    (fault,) = td.verify(store, checksums=True, repair=True).to_dict("records")
    assert (fault["path"], fault["block"]) == ("gram/c.0.0.1", "gram")
    assert save_and_count(store) == 0


@pytest.mark.parametrize("name", ["zarr.json", "feature/zarr.json", "label/zarr.json"])
@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_verify__metadata(store: Path, name: str, damage: Callable[[Path], None]) -> None:
    before = (store / name).read_bytes()
    damage(store / name)
    (fault,) = td.verify(store).to_dict("records")
    assert fault["path"] == name
    td.verify(store, repair=True)
    assert (store / name).read_bytes() == before
    assert save_and_count(store) == 0


def test_save__damaged_metadata_are_not_another_store(store: Path) -> None:
    truncate(store / "zarr.json")
    with pytest.raises(FileExistsError, match=r"damaged.*td.verify\(store, repair=True\)"):
        td.save(FEATURES, store, progress=False)
    with pytest.raises(FileNotFoundError, match=r"td.verify\(store\)"):
        td.open(store)


def test_verify__damaged_record(store: Path) -> None:
    record = next(store.glob("records/*/*/1.json"))
    truncate(record)
    (fault,) = td.verify(store, checksums=True, repair=True).to_dict("records")
    assert fault["path"] == str(record.relative_to(store))
    assert save_and_count(store) == 1


def test_verify__coord(store: Path) -> None:
    flip(store / "label/c/0")
    assert td.verify(store).empty
    (fault,) = td.verify(store, checksums=True).to_dict("records")
    assert fault["path"] == "label/c/0"
    assert "td.assign_coords(store, {'label': values})" in fault["remedy"]


@pytest.fixture
def store_of_text(tmp_path: Path) -> tuple[Path, xr.Dataset]:
    days = pd.date_range("2026-01-01", periods=40).values
    features = FEATURES.assign_coords(
        animal=("sample", ["cat", "dog"] * 20), day=("sample", days), weight=("sample", [0.5] * 40)
    )
    td.save(features, tmp_path / "t.zarr", progress=False)
    return tmp_path / "t.zarr", features


@pytest.mark.parametrize("name", ["label", "animal", "day", "weight"])
@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("file", ["c/0", "zarr.json"])
def test_open__damaged_coord_is_refused_and_restored(
    store_of_text: tuple[Path, xr.Dataset], name: str, damage: Callable[[Path], None], file: str
) -> None:
    store, features = store_of_text
    damage(store / name / file)
    with pytest.raises((ValueError, td.IncompleteFeaturesError), match=f"{name}.*td.verify"):
        td.open(store)
    assert f"{name}/{file}" in set(td.verify(store, checksums=True, repair=True).path)
    opened = td.save(features, store, progress=False)
    np.testing.assert_array_equal(opened[name], features[name])
    assert td.verify(store, checksums=True).empty


def test_open__lost_folder_of_a_coord(store_of_text: tuple[Path, xr.Dataset]) -> None:
    store, features = store_of_text
    shutil.rmtree(store / "animal")
    with pytest.raises(td.IncompleteFeaturesError, match=r"'animal/zarr.json'.*was lost"):
        td.open(store)
    assert set(td.verify(store, repair=True).path) == {"animal/zarr.json", "animal/c/0"}
    with pytest.raises(td.IncompleteFeaturesError, match="animal/c/0"):
        td.open(store)
    opened = td.save(features, store, progress=False)
    np.testing.assert_array_equal(opened.animal, features.animal)
    assert td.verify(store, checksums=True).empty


@pytest.mark.parametrize("name", ["label", "animal", "day"])
def test_open__damaged_coord_is_assigned_again(
    store_of_text: tuple[Path, xr.Dataset], name: str
) -> None:
    """Whoever has no features left, but knows the values, loses nothing."""
    store, features = store_of_text
    flip(store / name / "c/0")
    opened = td.assign_coords(store, {name: features[name].values})
    np.testing.assert_array_equal(opened[name], features[name])
    assert td.verify(store, checksums=True).empty


def test_open__flipped_bit_in_the_metadata_of_an_array(store: Path) -> None:
    path = store / "out_to_loss/zarr.json"
    path.write_text(path.read_text().replace("loss", "lass", 1))
    with pytest.raises(ValueError, match=r"out_to_loss/zarr.json.*other bytes"):
        td.open(store)
    td.verify(store, repair=True)
    assert save_and_count(store) == 0


def test_open__lost_list_of_files(store: Path) -> None:
    next(store.glob("records/*/template.json")).unlink()
    with pytest.raises(td.IncompleteFeaturesError, match=r"template.json.*require_complete=False"):
        td.open(store)
    copy = td.save(td.open(store, require_complete=False), store.parent / "g.zarr", progress=False)
    np.testing.assert_array_equal(copy.feature, FEATURES.feature)
    np.testing.assert_array_equal(copy.label, FEATURES.label)


def test_verify__foreign_and_partial_files(store: Path) -> None:
    (store / "feature/notes.txt").write_text("mine")
    (store / f"feature/c.0.0.0.{PARTIAL}").write_text("half")
    found = td.verify(store).set_index("path").found
    assert dict(found) == {
        "feature/notes.txt": "a foreign file",
        f"feature/c.0.0.0.{PARTIAL}": "left half written by a writer that was killed",
    }
    td.verify(store, repair=True)
    assert list(td.verify(store).path) == ["feature/notes.txt"]
    assert (store / "feature/notes.txt").read_text() == "mine"


def test_save__sweeps_partial_files(store: Path) -> None:
    (store / f"feature/c.0.0.0.{PARTIAL}").write_text("half")
    assert save_and_count(store) == 0


def test_verify__without_its_list_of_files(store: Path) -> None:
    template = next(store.glob("records/*/template.json"))
    truncate(template)
    with pytest.raises(FileNotFoundError, match=r"readable template\.json.*new store"):
        td.verify(store)
    with pytest.raises(FileNotFoundError, match="there is no store"):
        td.verify(store.parent / "nowhere")


def test_records__hold_sizes_and_checksums(store: Path) -> None:
    record = json.loads(min(store.glob("records/*/*/0.json")).read_text())
    assert {path: size for path, (size, _) in record["files"].items()} == {
        "feature/c.0.0.0": 16 * 8 * 4 + 4,
        "feature_norm/c.0.0": 16 * 8 + 4,
        "output/c.0.0": 16 * 4 + 4,
        "out_to_loss/c.0.0": 16 * 4 + 4,
    }


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
@pytest.mark.parametrize("lost", ["feature/c.1.0.1", "output/c.0.0", "gram/c.0.0.0"])
def test_open__lost_chunk_raises_when_it_is_read(store: Path, lost: str, scheduler: str) -> None:
    opened = td.open(store)
    (store / lost).unlink()
    name = lost.partition("/")[0]
    for ds in (opened, td.open(store)):
        with (
            dask.config.set(scheduler=scheduler),
            pytest.raises(td.IncompleteFeaturesError, match=rf"'{lost}'.* was lost.*repair=True"),
        ):
            ds[name].compute()
    looked_at = td.open(store, require_complete=False)
    assert looked_at[name].isnull().any()
    assert save_and_count(store) == ("gram" not in lost)


def test_open__lost_chunk_on_a_worker_process(store: Path, process_client) -> None:
    (store / "feature/c.1.0.1").unlink()
    opened = td.open(store)
    with pytest.raises(td.IncompleteFeaturesError, match=r"'feature.* was lost"):
        td.score(opened, opened.isel(sample=slice(4)), damping=0.1).compute()


def test_open__lost_chunk_of_a_coord(store: Path) -> None:
    (store / "label/c/0").unlink()
    with pytest.raises(td.IncompleteFeaturesError, match=r"'label/c/0'.* was lost"):
        td.open(store)


def test_open__coord_that_is_zero_everywhere(tmp_path: Path) -> None:
    zero = FEATURES.assign_coords(label=FEATURES.label * 0, of_all=0)
    opened = td.save(zero, tmp_path / "f.zarr", progress=False)
    np.testing.assert_array_equal(opened.label, 0)


def test_open__names_follow_the_content(store: Path) -> None:
    name = td.open(store).feature.data.name
    assert td.open(store).feature.data.name == name
    shutil.rmtree(store)
    td.save(FEATURES, store, progress=False)
    assert td.open(store).feature.data.name != name


def test_open__record_of_a_run_that_cannot_be_read(store: Path) -> None:
    """It only tells when and where: no number needs it."""
    (run,) = store.glob("records/*/runs/*")
    truncate(run)
    opened = td.open(store)
    np.testing.assert_array_equal(opened.feature, FEATURES.feature)
    assert opened.attrs["saved"] == {}
