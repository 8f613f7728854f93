"""Files appear whole or not at all, whatever happens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from trakdask.files import Folder, is_url, location, matching, replacing


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    if request.param == "local":
        yield Folder(str(tmp_path / "f"))
    else:
        yield Folder(f"memory://{tmp_path.name}/f")
        fsspec.filesystem("memory").store.clear()


def test_write__is_read_and_replaced(folder: Folder) -> None:
    assert folder.names() == []
    folder.write("a", b"old")
    folder.write("a", b"new")
    (folder / "sub").write("b", b"{}")
    assert folder.read("a") == b"new"
    assert (folder / "sub").read_json("b") == {}
    assert folder.names() == ["a", "sub"]
    assert folder.files() == {"a", "sub/b"}
    with folder.open("a") as file:
        assert file.read(1) == b"n"
    folder.remove("sub")
    assert folder.names() == ["a"]
    folder.remove()
    folder.remove()
    assert folder.names() == []


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


@pytest.mark.parametrize("name", ["unique", "fixed"])
def test_replacing__a_folder_whole_or_not_at_all(tmp_path: Path, name: str) -> None:
    target = tmp_path / "made" / "f"
    partial = None if name == "unique" else tmp_path / "made" / ".f.partial"
    if partial:
        partial.mkdir(parents=True)
        (partial / "left by a killed writer").touch()
    for content in ("old", "new"):
        with replacing(target, partial=partial) as path:
            path.mkdir()
            (path / content).touch()
        assert os.listdir(target) == [content]
    failing = replacing(target, partial=partial)
    failing.__enter__().mkdir()
    assert not failing.__exit__(KeyError, KeyError(), None)
    assert os.listdir(target) == ["new"]
    assert os.listdir(target.parent) == ["f"]


def test_replacing__a_folder_that_a_kill_left_between_two_names(tmp_path: Path) -> None:
    target, partial = tmp_path / "f", tmp_path / ".f.partial"
    (tmp_path / ".f.partial.old").mkdir()
    with replacing(target, partial=partial) as path:
        assert target.is_dir()  # the earlier one, until the new one is complete
        path.mkdir()
        (path / "new").touch()
    assert os.listdir(tmp_path) == ["f"]
    assert os.listdir(target) == ["new"]


def test_create__only_once(folder: Folder) -> None:
    folder.create("a", b"first")
    with pytest.raises(FileExistsError):
        folder.create("a", b"second")
    assert folder.files() == {"a"}
    assert folder.read("a") == b"first"
    if folder.is_local:
        with pytest.raises(NotADirectoryError, match=f"got the file '{folder.url}/a'"):
            Folder.at(f"{folder.url}/a")


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
    for url in ("memory://b/a.zarr", "s3://b/a.zarr/", "simplecache::s3://b/a"):
        assert location(url) == url


@pytest.mark.parametrize("path", ["", "  ", b"a.zarr", None, "foo://b/a", "simplecache::foo://b/a"])
def test_location__refused(path: object) -> None:
    with pytest.raises((TypeError, ValueError), match="foo" if "foo" in str(path) else repr(path)):
        location(path)  # type: ignore[arg-type]


ODD = (
    "a::b",
    "file:train",
    "memory:x",
    "a#b?c=%20",
    "~x y",
    "C:\\t",
    "x[1]*",
    "simplecache::t",
    "a::s3://b",
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


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://b/c", True), ("simplecache::s3://b/c", True), ("zip://x::simplecache::s3://b", True),
        ("s3:/b/c", False), ("a::memory://b", False), ("runs/s3://b", False), ("://b", False),
        ("simplecache::b", False), ("1st://b", False),
    ],
)  # fmt: skip
def test_is_url(path: str, expected: bool) -> None:
    assert is_url(path) == expected


def test_folder__of_a_url_with_a_slash_at_its_end() -> None:
    assert Folder.at("memory://bucket/a/") == Folder("memory://bucket/a")
