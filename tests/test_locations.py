"""A path means the same on every worker, whatever its working directory; errors name the path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trakdask.locations import location


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


@pytest.mark.parametrize("url", ["memory://b/a.zarr", "s3://b/a.zarr/", "simplecache::s3://b/a"])
def test_location__other_urls_are_unchanged(url: str) -> None:
    assert location(url) == url


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (3, TypeError, r"got 3 \(int\)"),
        (None, TypeError, "got None"),
        (b"a.zarr", TypeError, r"got b'a.zarr' \(bytes\)"),
        ("", ValueError, "got ''"),
        ("  ", ValueError, "got '  '"),
        ("foo://b/a", ValueError, "'foo://b/a'.*'foo'"),
        ("simplecache::foo://b/a", ValueError, "'foo'"),
        ("a\0b", ValueError, "null"),
        ("a" * 300, OSError, "a{100}.*name too long"),
    ],
)
def test_location__refused(given: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=rf"(?i){words}"):
        location(given)  # type: ignore[arg-type]


def test_location__circle_of_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match=f"{tmp_path}/a/f.zarr"):
        location(tmp_path / "a" / "f.zarr")


def test_location__what_is_not_there_or_may_not_be_read_is_left_to_who_opens_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "no" / "where", tmp_path / "file" / "below"):
        assert location(path) == os.fspath(path)
