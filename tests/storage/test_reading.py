"""Mapped chunks against what zarr reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsspec
import google_crc32c
import numpy as np
import pytest
import xarray as xr
import zarr

import trakdask as td
from tests.storage.integers import features as integers
from trakdask.files import Folder
from trakdask.storage import reading
from trakdask.storage.group import Group
from trakdask.storage.reading import lazy_array, read_chunk
from trakdask.testing import simulate_features
from trakdask.variables import DERIVED

ROWS, WIDE = 10, 2**17  # chunks of 2 MiB are mapped; chunks of 4 rows of 3 are read


@pytest.fixture(params=[WIDE, 3])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Group:
    features = simulate_features(ROWS, request.param, 1, chunks=4)
    td.save(features, tmp_path / "f.zarr", estimator=None, progress=False)
    return Group.read(Folder(str(tmp_path / "f.zarr")))


def source(group: Group) -> np.ndarray:
    return zarr.open_group(group.folder.url, mode="r")["feature"][:]


def file(group: Group, block: int) -> Path:
    return Path(group.folder.url, f"feature/c.{block}.0.0")


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what checksums are computed of, here."""
    sizes: list[int] = []
    value = google_crc32c.value

    def counting(data: np.ndarray) -> int:
        sizes.append(len(data))
        return value(data)

    monkeypatch.setattr(reading.google_crc32c, "value", counting)
    return sizes


SELECTIONS = (
    slice(None), slice(4, 8), slice(5, 7), slice(1, 6), slice(8, 10), [9, 0, 3],
    slice(None, None, -1), np.array([True, False] * 5), 5,
)  # fmt: skip


def test_lazy_array__equals_what_zarr_reads(group: Group) -> None:
    data, expected = lazy_array(group, "feature"), source(group)
    assert data.chunks[0] == (4, 4, 2)
    for rows in SELECTIONS:
        np.testing.assert_array_equal(data[rows].compute(scheduler="sync"), expected[rows])


def test_chunks__are_mapped_where_they_are_large(group: Group) -> None:
    width = group.arrays["feature"]["shape"][1]
    rows = (slice(0, 4), slice(0, width), slice(0, 1))
    block = read_chunk(group.array("feature"), group.folder, "", rows)
    base = block
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap) == (block.shape[1] == WIDE)


def test_lazy_array__checksums_are_verified_once_of_each_file(
    group: Group, verified: list[int]
) -> None:
    for _ in range(2):
        lazy_array(group, "feature").compute(scheduler="sync")
    assert verified == [4 * 4 * group.arrays["feature"]["shape"][1]] * 3
    content = bytearray(file(group, 1).read_bytes())
    content[5] ^= 1
    file(group, 1).unlink()
    file(group, 1).write_bytes(content)
    lazy_array(group, "feature")[:4].compute()
    assert len(verified) == 3
    with pytest.raises(ValueError, match=r"feature/c\.1\.0\.0.*checksum"):
        lazy_array(group, "feature").compute(scheduler="sync")


def test_lazy_array__writing_to_a_block_leaves_the_file(group: Group) -> None:
    before = file(group, 0).read_bytes()
    block = lazy_array(group, "feature")[:4].compute(scheduler="sync")
    block += 1
    assert file(group, 0).read_bytes() == before
    np.testing.assert_array_equal(block, source(group)[:4] + 1)


N = 4
FEATURES = simulate_features(N, 3, chunks=2).assign_coords(number=("sample", np.arange(N) + 1))
MORE = simulate_features(N, 3, chunks=2, seed=1).assign_attrs(source="more")
MORE = MORE.assign_coords(number=("sample", np.arange(N) + 5))


def fill(store: Path) -> None:
    td.save(FEATURES, store, progress=False)
    td.drop(store, where=lambda ds: ds.number == 1)


def append(store: Path) -> None:
    td.save(MORE, store, append_dim="sample", progress=False)


def assign(store: Path) -> None:
    td.assign_coords(store, {"number": np.arange(N) + 11, "mine": np.ones(N)})


def drop(store: Path) -> None:
    td.drop(store, where=lambda ds: ds.number == 2)


def shown(store: Path) -> xr.Dataset:
    """Return the arrays that are no sums over samples; reading them once replaced is an error."""
    return td.open(store).drop_vars(DERIVED, errors="ignore").load()


@pytest.mark.parametrize("change", [append, assign, drop])
@pytest.mark.parametrize("function", ["assembled", "read_coords", "dropped_mask"])
def test_open__while_another_writer_commits_shows_the_store_before_or_after(
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    function: str,
) -> None:
    """Its commit comes before the first call of a function that reads more than ``zarr.json``."""
    before, read = shown(store), getattr(reading, function)

    def overtaken(*args: object, **options: object) -> object:
        monkeypatch.setattr(reading, function, read)
        change(store)
        return read(*args, **options)

    monkeypatch.setattr(reading, function, overtaken)
    opened, after = shown(store), shown(store)
    assert any(opened.identical(state) for state in (before, after))


@pytest.mark.parametrize("change", [append, assign])
def test_open__lazy_coords_that_were_replaced_are_an_error(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    store = tmp_path / "f.zarr"
    td.save(FEATURES, store, progress=False)
    opened = td.open(store, load_coords=False)
    change(store)
    with pytest.raises(td.errors.IncompleteFeaturesError, match="number/c"):
        opened.number.variable.compute()


@pytest.mark.parametrize("name", ["out_to_loss", "feature"])
def test_open__a_chunk_that_was_away_is_read_when_it_is_back(name: str) -> None:
    """At a URL, where chunks are kept in memory: what was absent must not be."""
    url, files = f"memory://away-{name}/f.zarr", fsspec.filesystem("memory").store
    opened = td.save(integers(slice(0, 40)), url, estimator="soft", progress=False)
    targets = integers(slice(40, 45))
    expected = td.group_score(opened, targets, "soft", by="label").compute()
    td.assign_coords(url, {"other": np.arange(40)})  # others names, so that nothing is in memory
    opened = td.open(url)
    key = next(key for key in files if key.startswith(f"/away-{name}/f.zarr/{name}/c"))
    away = files.pop(key)
    with pytest.raises(td.errors.IncompleteFeaturesError, match=name):
        td.group_score(opened, targets, "soft", by="label").compute()
    with pytest.raises(td.errors.IncompleteFeaturesError, match=name):
        td.drop(url, where="number == 3")
    files[key] = away
    found = td.group_score(opened, targets, "soft", by="label")
    np.testing.assert_array_equal(found, expected)
    left = td.drop(url, where="number == 3")
    assert np.isfinite(left.gram).all()
    files.clear()


@pytest.mark.parametrize("name", ["out_to_loss", "output", "feature_norm"])
def test_append__a_lost_chunk_is_not_packed_as_missing_values(tmp_path: Path, name: str) -> None:
    store = tmp_path / "f.zarr"
    td.save(integers(slice(0, 40)), store, progress=False)
    chunk = next(path for path in (store / name).rglob("*0") if path.is_file())
    content = chunk.read_bytes()
    chunk.unlink()
    more = integers(slice(40, 60))
    with pytest.raises(td.errors.IncompleteFeaturesError, match=name):
        td.save(more, store, append_dim="sample", progress=False)
    chunk.write_bytes(content)
    opened = td.save(more, store, append_dim="sample", progress=False)
    assert np.isfinite(opened[name]).all()
