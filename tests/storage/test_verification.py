"""Damage of every kind is found, named, and mended by computing nothing else again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import trakdask as td
from tests.storage.integers import counted, save
from trakdask.testing import simulate_features
from trakdask.variables import DERIVED

DAYS = pd.date_range("2026-01-01", periods=40).values
FEATURES = simulate_features(n_samples=40, proj_dim=8, chunks=16).assign_coords(
    animal=("sample", ["cat", "dog"] * 20),
    day=("sample", DAYS),
    zero=("sample", np.zeros(40)),
    of_all=0,
)


def fill(store: Path) -> None:
    td.save(FEATURES, store, progress=False)


def save_and_count(store: Path) -> int:
    """Save again; return how many blocks were computed beside the one that is compared."""
    features, calls = counted(FEATURES)
    opened = save(features, store)
    for name in ("feature", "output", "out_to_loss", *FEATURES.coords):
        np.testing.assert_array_equal(opened[name], FEATURES[name])
    np.testing.assert_allclose(opened.gram, td.gram(FEATURES), rtol=1e-6, atol=1e-5)
    assert td.verify(store, checksums=True).empty
    return len(calls) - 1


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = (truncate, flip, Path.unlink)


def chunk_of(store: Path, name: str) -> Path:
    return min(
        path for path in (store / name).rglob("*") if path.is_file() and path.name != "zarr.json"
    )


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    ("path", "block", "n_lost"), [("feature/c.2.0.1", 2, 1), ("out_to_loss/c/0/1", -1, 3)]
)
def test_verify__chunk(
    store: Path, path: str, block: int, n_lost: int, damage: Callable[[Path], None]
) -> None:
    """A chunk of a small array has the rows of many blocks, which are all computed again."""
    name = path.partition("/")[0]
    opened, before = td.open(store), td.open(store).compute()
    damage(store / path)
    (fault,) = td.verify(store, checksums=True).to_dict("records")
    assert (fault["path"], fault["block"], fault["checkpoint"]) == (path, block, 1)
    assert "td.save(features, store)" in fault["remedy"]
    # No reader takes it for numbers.
    with pytest.raises((ValueError, td.errors.IncompleteFeaturesError), match=path):
        opened[name].compute()
    td.verify(store, checksums=True, repair=True)
    with pytest.raises(td.errors.IncompleteFeaturesError):
        td.open(store)
    lost = xr.open_zarr(store)[name].isnull()
    assert lost.any(set(lost.dims) - {"sample"}).sum() == {1: 8, 3: 40}[n_lost]
    assert save_and_count(store) == n_lost
    xr.testing.assert_equal(td.open(store).compute(), before)
    assert not (store / "feature/records").exists()


@pytest.mark.parametrize(("name", "damage"), list(zip(DERIVED, DAMAGE * 2, strict=False)))
def test_verify__sums(
    tmp_path: Path, name: str, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trakdask.derived.LEAST_DIM", 0)  # eigenvectors as of many columns
    store = tmp_path / "f.zarr"
    before = save(FEATURES, store, estimator="soft").load()
    damage(chunk_of(store, name))
    with pytest.raises((ValueError, td.errors.IncompleteFeaturesError), match=f"{name}/c"):
        td.open(store)[name].compute()
    (fault,) = td.verify(store, checksums=True, repair=True).to_dict("records")
    assert fault["path"].startswith(f"{name}/")
    after = save(FEATURES, store, estimator="soft")
    np.testing.assert_allclose(after[name], before[name], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "damage"),
    [("animal", truncate), ("zero", truncate), ("animal", flip), ("zero", Path.unlink)],
)
def test_verify__coord(store: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(chunk_of(store, name))
    with pytest.raises((ValueError, td.errors.IncompleteFeaturesError), match=name):
        td.open(store)
    (fault,) = td.verify(store, checksums=True).to_dict("records")
    assert f"td.assign_coords(store, {{{name!r}: values}})" in fault["remedy"]
    td.assign_coords(store, {name: FEATURES[name].values})
    assert save_and_count(store) == 0


@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_open__metadata(store: Path, damage: Callable[[Path], None]) -> None:
    damage(store / "zarr.json")
    with pytest.raises((ValueError, FileNotFoundError), match=r"f\.zarr"):
        td.open(store)
    with pytest.raises((ValueError, FileExistsError), match=r"f\.zarr"):
        td.save(FEATURES, store, progress=False)


def test_save__sweeps_partial_files_and_leaves_others(store: Path) -> None:
    partial = store / f"feature/c.0.0.0.{32 * 'a'}.partial"
    partial.write_text("half")
    (store / "notes.txt").write_text("mine")
    assert save_and_count(store) == 0
    assert not partial.exists()
    assert (store / "notes.txt").read_text() == "mine"


def test_open__names_follow_the_content(store: Path) -> None:
    name = td.open(store).feature.data.name
    assert td.open(store).feature.data.name == name
    shutil.rmtree(store)
    td.save(FEATURES, store, progress=False)
    assert td.open(store).feature.data.name != name
