"""Folders on any file system, whose files appear whole or not at all.

fsspec's transactions write to the system's temporary folder and move from there, which is no rename
across disks; zarr renames as well, but forces nothing onto the disk and writes no other files.
Requests that fail on a network are repeated by the file systems of fsspec themselves.
"""

from __future__ import annotations

import builtins
import functools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import fsspec

UNCACHED = {"use_listings_cache": False}
"""Options of fsspec: other processes write, so that a listing it has kept may be out of date."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial$")
"""How a file ends while it is written, here and in zarr: it gets its own name when it is whole."""


@dataclass(frozen=True)
class Folder:
    """A folder, which need not exist, by its absolute path or URL.

    Parameters
    ----------
    url
        As :func:`location` returns it.
    options
        Options with which fsspec opens the URL.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def at(cls, path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Folder:
        """Return the folder of a path or URL that a user has given.

        Raises
        ------
        ValueError
            If nobody can list or write files at such a URL.
        TypeError
            If the options are not by name.
        NotADirectoryError
            If a file is in the way.
        """
        url = location(path)
        if not isinstance(options, Mapping | None):
            raise TypeError(f"expected storage_options by name, got {options!r:.60}; try {{}}")
        # Without a slash at its end, but the root of a file system is only a slash, or "memory://".
        folder = cls(url if url.endswith("://") else url.rstrip("/") or "/", options or {})
        if folder.url.startswith(("http://", "https://")):
            raise ValueError(
                f"expected a place to write to, got {folder.url!r}; try s3:// or gs://"
            )
        if folder.is_local and os.path.isfile(folder.url):
            raise NotADirectoryError(
                f"expected a folder, got the file {folder.url!r}; try another path"
            )
        return folder

    def __truediv__(self, name: str) -> Folder:
        return Folder(f"{self.url}/{name}", self.options)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.url.rpartition("/")[2]

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether it is on a file system of this machine."""
        return "://" not in self.url

    def names(self) -> list[str]:
        """List the files and folders in it, without partial files; none if it does not exist."""
        fs, path = self._fs()
        try:
            if self.is_local:  # fsspec takes eight times as long
                names = os.listdir(path)
            else:
                # In a chain of protocols, fsspec gives UNCACHED to the first alone.
                fs.invalidate_cache()
                paths = (inside.rstrip("/") for inside in fs.ls(path, detail=False))
                names = [inside.rpartition("/")[2] for inside in paths if inside != path]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in names if not _PARTIAL.search(name))

    def files(self) -> set[str]:
        """Return the relative paths of all files below it, without partial ones."""
        fs, path = self._fs()
        if self.is_local:  # fsspec would ask for the size of each
            paths = [f"{at}/{name}" for at, _, names in os.walk(path) for name in names]
        else:
            fs.invalidate_cache()
            paths = fs.find(path)
        return {file[len(path) + 1 :] for file in paths if not _PARTIAL.search(file)}

    def sweep(self) -> None:
        """Remove partial files that killed writers have left anywhere below it."""
        if self.is_local:  # only there is a file written under another name first
            for path in Path(self.url).rglob("*.partial"):
                if _PARTIAL.search(path.name):
                    path.unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        fs, path = self._fs()
        try:  # of a whole file s3fs would first ask how long it is, in a request of its own
            return bytes(fs.cat_file(f"{path}/{name}", start=0))
        except OSError:  # an empty file has no range of bytes; other errors come again
            return bytes(fs.cat_file(f"{path}/{name}"))

    def read_json(self, name: str) -> Any:
        """Return the content of a JSON file; a ValueError names it if it is damaged."""
        text = self.read(name)
        try:
            return json.loads(text)
        except ValueError as err:
            raise ValueError(
                f"expected JSON in {self.url}/{name}, got {text[:40]!r}; try restoring that file"
            ) from err

    def open(self, name: str) -> IO[bytes]:
        """Open a file to read parts of it."""
        fs, path = self._fs()
        return fs.open(f"{path}/{name}")

    def write(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Write or replace a file; readers see the old content or the new."""
        if self.is_local:
            with self.writing(name, durable=durable) as file:
                file.write(data)
        else:
            fs, path = self._fs()
            fs.pipe_file(f"{path}/{name}", data)

    @contextmanager
    def writing(self, name: str, *, durable: bool = True) -> Iterator[IO[bytes]]:
        """Write or replace a file piece by piece; if the block raises, nothing has changed.

        Parameters
        ----------
        name
            Path of the file in the folder.
        durable
            Force a local file onto the disk before it gets its name.

        Yields
        ------
        A local file with another name, ``file.name``, to be written as it is or by that name.
        """
        if self.is_local:
            with (
                replacing(f"{self.url}/{name}", durable=durable) as partial,
                builtins.open(partial, "xb") as file,
            ):
                yield file
        else:  # object stores show a file when it has been sent as a whole
            fs, path = self._fs()
            with tempfile.NamedTemporaryFile() as file:
                yield file
                file.flush()
                fs.put_file(file.name, f"{path}/{name}")

    def create(self, name: str, data: bytes) -> None:
        """Write a file that must not exist yet.

        Raises
        ------
        FileExistsError
            If it exists, also if another process has just written it; or if this call did, and the
            answer of a network was lost: look at the content.
        """
        fs, path = self._fs()
        if not self.is_local:
            fs.pipe_file(f"{path}/{name}", data, mode="create")
            return
        for tries_left in range(9, -1, -1):
            try:
                # A link, unlike a rename, fails if there is a file of that name: of several
                # processes one succeeds.
                with replacing(f"{path}/{name}", durable=True, give_name=os.link) as partial:
                    partial.write_bytes(data)
                return
            except FileNotFoundError:  # another process has just swept the partial file
                if not tries_left:  # or no folder can be made there, as below /proc
                    raise

    def remove(self, name: str = "") -> None:
        """Remove a file or folder in it, or the folder itself, if it exists."""
        fs, path = self._fs()
        with suppress(FileNotFoundError):
            fs.rm(f"{path}/{name}".rstrip("/"), recursive=True)

    def _fs(self) -> tuple[Any, str]:
        options = {**UNCACHED, **self.options}
        if self.is_local:  # whose name may look like anything, such as a chain of protocols
            return fsspec.filesystem("file", **options), self.url
        # At each call, since a folder is pickled with tasks; fsspec keeps one instance for the same
        # options.
        fs, path = fsspec.core.url_to_fs(self.url, **options)
        return fs, path.rstrip("/")


def is_url(path: str) -> bool:
    """Return whether a text is a URL; anything else is a local path, whatever is in it.

    Protocols before it, as in ``simplecache::s3://bucket``, must be known to fsspec: a folder may
    be named ``a::b``.

    Examples
    --------
    >>> is_url("s3://bucket/a"), is_url("simplecache::s3://bucket/a")
    (True, True)
    >>> is_url("runs/a::b"), is_url("file:a"), is_url("a::s3://b")
    (False, False, False)
    """
    first, _, rest = path.partition("::")
    if rest and first in fsspec.available_protocols():
        return is_url(rest)
    return bool(_SCHEME.match(path))


def location(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a local folder; other URLs are returned unchanged.

    Workers may have a different working directory than the process that calls this.

    Raises
    ------
    TypeError
        If it is not a path.
    ValueError
        If it is empty, or a URL with a protocol that fsspec does not know.
    ImportError
        If the package that opens such URLs is not installed.

    Examples
    --------
    >>> location("train.zarr/") == os.path.join(os.getcwd(), "train.zarr")
    True
    >>> location("memory://bucket/train.zarr")
    'memory://bucket/train.zarr'
    """
    url = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(url, str) or not url.strip():
        error = ValueError if isinstance(url, str) else TypeError
        remedy = "xr.open_zarr" if hasattr(url, "list_prefix") else "'features.zarr'"  # of zarr
        raise error(f"expected a path or URL as text, got {url!r:.60}; try {remedy}")
    if url.startswith(("file://", "local://")):
        url = url.partition("://")[2]
    elif is_url(url):
        for part in url.split("::"):  # of an archive, the last part may be a local file
            if not os.path.exists(part):
                fsspec.get_filesystem_class(part.partition("://")[0])  # is there one?
        return url
    return os.path.abspath(os.path.expanduser(url))


def matching(pattern: str) -> tuple[Any, list[str]]:
    """Return a file system, and the paths on it that a path, URL or pattern names, sorted.

    A file that exists is itself, whatever signs of a pattern are in its name.
    """
    place = location(pattern)
    if is_url(place):
        fs, _, paths = fsspec.get_fs_token_paths(place)
        return fs, sorted(paths)
    fs = fsspec.filesystem("file")
    is_pattern = any(sign in place for sign in "*?[") and not os.path.exists(place)
    return fs, sorted(fs.glob(place)) if is_pattern else [place]


@contextmanager
def naming(path: str, remedy: str) -> Iterator[None]:
    """Let errors of a disk or a network say which path they are about, if they do not.

    A full disk says nothing but that it is full.
    """
    try:
        yield
    except OSError as err:
        if err.filename is not None or path in str(err):
            raise
        text = f"expected to write {path}, but could not ({type(err).__name__}: {err}); {remedy}"
        # With its number it is of the same built-in class, such as PermissionError.
        raise (OSError(err.errno, text) if err.errno else OSError(text)) from err


@contextmanager
def replacing(
    path: str | os.PathLike[str],
    *,
    partial: str | os.PathLike[str] | None = None,
    durable: bool = False,
    give_name: Callable[[str, str], None] | None = None,
) -> Iterator[Path]:
    """Give another path to write a local file or folder at, which then takes the place of ``path``.

    If the block raises, the file at ``path`` is as it was, and the new one is removed.

    Parameters
    ----------
    path
        Path of the file, which is replaced if it exists.
    partial
        The other path, beside ``path``; by default a unique one. A fixed one is for places that
        nobody sweeps, with one writer at a time: what a killed one has left there is removed.
    durable
        Force a file onto the disk before it gets its name.
    give_name
        Function that gives the name; by default one that replaces a file or folder.
    """
    # Beside the target, because a rename is atomic only within a file system.
    target, new = os.fspath(path), Path(partial or f"{os.fspath(path)}.{uuid4().hex}.partial")
    old = Path(f"{new}.old")
    if partial is not None:
        _remove(new)
        # A kill between the two renames below has left the earlier folder under this name.
        if old.is_dir() and not os.path.lexists(target):
            os.rename(old, target)
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield new
        # Else a rename may reach the disk before the content, and a power failure leave an empty
        # file.
        if durable:
            with builtins.open(new, "r+b") as file:
                os.fsync(file.fileno())
        if give_name is not None or not os.path.isdir(target):
            (give_name or os.replace)(str(new), target)
        else:
            _remove(old)  # a folder cannot be renamed onto another one
            os.rename(target, old)
            os.rename(new, target)
            _remove(old)
    finally:
        _remove(new)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
