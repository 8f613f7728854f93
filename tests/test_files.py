"""Files appear whole or not at all, whatever happens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from trakdask.files import Folder, location, matching, replacing


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    if request.param == "local":
        yield Folder(str(tmp_path / "f"))
    else:
        yield Folder(f"memory://{tmp_path.name}/f")
        fsspec.filesystem("memory").store.clear()


def test_writing__an_error_changes_nothing(folder: Folder) -> None:
    folder.write("a", b"old")
    writing = folder.writing("a")
    writing.__enter__().write(b"half")
    assert not writing.__exit__(KeyError, KeyError(), None)
    assert folder.files() == {"a"}
    assert folder.read("a") == b"old"


def test_writing__a_killed_writer_leaves_a_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    folder = Folder(str(tmp_path))
    folder.write("a", b"old")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        patched.setattr(os, "unlink", killed)
        with pytest.raises(Killed):
            folder.write("a", b"new")
    assert folder.names() == ["a"]
    assert folder.read("a") == b"old"
    assert folder.files() == {"a"}
    assert len(os.listdir(tmp_path)) == 2
    folder.sweep()
    assert os.listdir(tmp_path) == ["a"]


def test_writing__the_content_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, replace, fsync = [], os.replace, os.fsync

    def synced(descriptor: int) -> None:
        steps.append(("fsync", os.fstat(descriptor).st_size))
        fsync(descriptor)

    def replaced(source: str, target: str) -> None:
        steps.append(("replace", os.stat(source).st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    folder = Folder(str(tmp_path))
    folder.write("a", b"123")
    with folder.writing("b", durable=False) as file:
        file.write(b"4567")
    assert steps == [("fsync", 3), ("replace", 3), ("replace", 4)]


def test_replacing__a_folder_that_a_kill_left_between_two_names(tmp_path: Path) -> None:
    target, partial = tmp_path / "f", tmp_path / ".f.partial"
    (tmp_path / ".f.partial.old").mkdir()
    with replacing(target, partial=partial) as path:
        assert target.is_dir()  # the earlier one, until the new one is complete
        path.mkdir()
        (path / "new").touch()
    assert os.listdir(tmp_path) == ["f"]
    assert os.listdir(target) == ["new"]


def test_create__where_no_folder_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below /proc; once in a while the partial file alone is gone, which is tried again."""
    write, failures = Path.write_bytes, 1

    def fail(path: Path, data: bytes) -> int:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise FileNotFoundError(path)
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", fail)
    folder = Folder.at(tmp_path / "f")
    folder.create("a", b"first")
    assert folder.read("a") == b"first"
    failures = 1000
    with pytest.raises(FileNotFoundError):
        folder.create("b", b"never")


def test_location__local_paths_are_absolute_and_other_urls_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = str(tmp_path / "a.zarr")
    for path in ("a.zarr", "./a.zarr", "a.zarr/", "b/../a.zarr", Path("a.zarr"), "~/a.zarr"):
        assert location(path) == expected
    for url in (f"file://{expected}", f"local://{expected}"):
        assert location(url) == expected
    for url in ("memory://b/a.zarr", "s3://b/a.zarr/", "zip://x::simplecache::s3://b"):
        assert location(url) == url
    assert Folder.at("memory://bucket/a/") == Folder("memory://bucket/a")


ODD = (
    *("a::b", "file:train", "memory:x", "a#b?c=%20", "~x y", "C:\\t", "x[1]*", "simplecache::t"),
    *("a::s3://b", "s3:/b/c", "1st://b", "://b"),
)
"""Names of local folders that look like URLs, chains of protocols, patterns or homes."""


@pytest.mark.parametrize("name", ODD)
def test_folder__has_its_name_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (f"runs/{name}", name, Path(name), f"{name}/", f"{tmp_path}/deep/{name}"):
        folder = Folder.at(path)
        folder.write("f", b"content")
        file = Path(path).absolute() / "f"
        assert file.read_bytes() == folder.read("f") == b"content"
        assert matching(str(file)) == (fsspec.filesystem("file"), [str(file)])
        with folder.open("f") as opened:
            assert opened.read(1) == b"c"
        folder.remove("f")
        assert folder.names() == []
