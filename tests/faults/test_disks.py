"""Disks that are full or closed, and a network that refuses: clear errors, nothing lost.

The oracle is the features themselves, and the count of blocks that are computed after the mend.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import dask
import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import trakdask as td
from tests.storage.integers import counted
from trakdask.testing import simulate_features

LARGE = simulate_features(n_samples=2048, proj_dim=128, n_checkpoints=1, chunks=256)  # 8 × 128 KiB
SCORES = td.score(LARGE, LARGE, td.Trak(damping=0.1))
NOISE = np.random.default_rng(0).random(2048)
SMALL = simulate_features(n_samples=40, proj_dim=8, chunks=16)


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[None]:
    """Mount a small disk, or skip where that is not allowed."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("tmpfs cannot be mounted")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_save__disk_full(tmp_path: Path) -> None:
    with tmpfs(tmp_path, "size=768k"), dask.config.set(scheduler="sync"):
        features, calls = counted(LARGE)
        with pytest.raises(OSError, match="No space left") as caught:
            td.save(features, tmp_path / "f.zarr", estimator=None, progress=False)
        assert caught.value.errno == 28
        done = len(list(tmp_path.glob("f.zarr/feature/records/*")))
        assert 1 <= done < 8
        assert list(tmp_path.rglob("*.partial")) == []
        subprocess.run(["mount", "-o", "remount,size=8m", tmp_path], check=True)
        features, calls = counted(LARGE)
        opened = td.save(features, tmp_path / "f.zarr", estimator=None, progress=False)
        assert len(calls) == 8 - done + 1  # to compare
        np.testing.assert_array_equal(opened.feature, LARGE.feature)
        assert td.verify(tmp_path / "f.zarr", checksums=True).empty


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda f: td.drop(f / "f.zarr", where=lambda ds: ds.label == 1), "f.zarr"),
        (lambda f: td.assign_coords(f / "f.zarr", {"mine": NOISE}), "f.zarr"),
        (lambda f: td.to_zarr(SCORES, f / "s.zarr"), "s.zarr"),
        (lambda f: td.to_parquet(SCORES, f / "s.parquet"), "s.parquet"),
    ],
    ids=["drop", "assign_coords", "to_zarr", "to_parquet"],
)
def test_changes_and_exports__disk_full_names_the_path(
    tmp_path: Path, write: Callable[[Path], object], name: str
) -> None:
    with tmpfs(tmp_path, "size=4m"), dask.config.set(scheduler="sync"):
        td.save(LARGE, tmp_path / "f.zarr", progress=False)
        before = td.open(tmp_path / "f.zarr").load()
        left = shutil.disk_usage(tmp_path).free
        (tmp_path / "filled").write_bytes(bytes(left - left % 4096 - 5 * 4096))
        with pytest.raises(OSError, match="No space left") as caught:
            write(tmp_path)
        assert caught.value.errno == 28
        assert str(tmp_path / name) in str(caught.value)
        assert "try " in str(caught.value)
        assert td.open(tmp_path / "f.zarr").load().identical(before)


def test_save__read_only_disk(tmp_path: Path) -> None:
    with tmpfs(tmp_path, "size=4m"):
        opened = td.save(SMALL, tmp_path / "f.zarr", progress=False)
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        for name in ("f.zarr", "new.zarr"):
            with pytest.raises(OSError, match="Read-only file system"):
                td.save(SMALL, tmp_path / name, progress=False)
        np.testing.assert_array_equal(td.open(tmp_path / "f.zarr").feature, opened.feature)
        assert td.verify(tmp_path / "f.zarr", checksums=True).empty


class RefusingFileSystem(MemoryFileSystem):
    """A store on a network that refuses all requests after some number."""

    protocol = "refusing"
    store: dict[str, object] = {}  # noqa: RUF012 - as in the class it extends
    pseudo_dirs = [""]  # noqa: RUF012
    requests = itertools.count(1)
    after = 10**9

    @classmethod
    def ask(cls) -> None:
        number = next(cls.requests)
        if number > cls.after:
            raise ConnectionResetError("503 slow down")


def _asking(name: str) -> Callable[..., object]:
    def call(self: RefusingFileSystem, *args: object, **options: object) -> object:
        self.ask()
        return getattr(super(RefusingFileSystem, self), name)(*args, **options)

    return call


for name in ("cat_file", "pipe_file", "ls"):
    setattr(RefusingFileSystem, name, _asking(name))


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> type[RefusingFileSystem]:
    fsspec.register_implementation("refusing", RefusingFileSystem, clobber=True)
    RefusingFileSystem.store.clear()
    RefusingFileSystem.pseudo_dirs[:] = [""]
    monkeypatch.setattr(RefusingFileSystem, "requests", itertools.count(1))
    return RefusingFileSystem


@pytest.mark.parametrize("after", [3, 30])
def test_save__network_goes_away(
    after: int, refusing: type[RefusingFileSystem], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "refusing://bucket/f.zarr"
    with dask.config.set(scheduler="sync"):
        monkeypatch.setattr(refusing, "after", after)
        with pytest.raises(OSError, match="503 slow down"):
            td.save(SMALL, url, progress=False)
        done = sum("feature/records/" in name for name in refusing.store)
        monkeypatch.setattr(refusing, "after", 10**9)
        for name in [name for name in refusing.store if name.endswith("/lock")]:
            del refusing.store[name]  # it could not be given back
        features, calls = counted(SMALL)
        np.testing.assert_array_equal(td.save(features, url, progress=False).feature, SMALL.feature)
        assert len(calls) == 6 - done + bool(done)
