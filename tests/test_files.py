"""Files appear whole or not at all, whatever happens; passing errors of a network do not show."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from trakdask.files import Folder, location, retried


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    if request.param == "local":
        yield Folder(str(tmp_path / "f"))
    else:
        yield Folder(f"memory://{tmp_path.name}/f")
        fsspec.filesystem("memory").store.clear()


@pytest.fixture
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trakdask.files._WAITS_S", (0.0, 0.0, 0.0))


class Refusing:
    """Raises some errors, then returns 7."""

    def __init__(self, *errors: OSError) -> None:
        self.errors = list(errors)

    def __call__(self) -> int:
        if self.errors:
            raise self.errors.pop(0)
        return 7


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
    assert len(folder.files()) == 2
    folder.sweep()
    assert folder.files() == {"a"}


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


def test_writing__for_the_owner_alone(tmp_path: Path) -> None:
    with Folder(str(tmp_path)).writing("a", mode=0o600) as file:
        assert Path(file.name).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_create__only_once(folder: Folder) -> None:
    folder.create("a", b"first")
    with pytest.raises(FileExistsError):
        folder.create("a", b"second")
    assert folder.files() == {"a"}
    assert folder.read("a") == b"first"


@pytest.mark.parametrize("given", ["a.zarr", "./a.zarr", "a.zarr/", "b/../a.zarr", Path("a.zarr")])
def test_location__local_paths_are_absolute(
    given: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert location(given) == str(tmp_path / "a.zarr")


def test_location__file_urls_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = str(tmp_path / "a.zarr")
    for url in (f"file://{expected}", f"local://{expected}", "~/a.zarr", expected):
        assert location(url) == expected


@pytest.mark.parametrize("n_errors", [0, 1, 3])
def test_retried__errors_that_pass(n_errors: int, without_waiting: None) -> None:
    errors = [OSError("503 slow down")] * n_errors
    assert retried(Refusing(*errors)) == 7


@pytest.mark.parametrize(
    ("errors", "n_left"),
    [
        ([OSError("503 slow down")] * 5, 1),
        ([OSError(errno.ENOSPC, "full"), OSError()], 1),
        ([FileNotFoundError("x"), OSError()], 1),
        ([PermissionError("x"), OSError()], 1),
    ],
)
def test_retried__errors_that_last(
    errors: list[OSError], n_left: int, without_waiting: None
) -> None:
    call = Refusing(*errors)
    with pytest.raises(type(errors[0]), match=str(errors[0].args[-1])):
        retried(call)
    assert len(call.errors) == n_left
