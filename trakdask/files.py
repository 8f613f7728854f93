"""Folders on any file system, whose files appear whole or not at all.

fsspec's transactions write to the system's temporary folder and move from there, which is no rename
across disks; zarr renames as well, but forces nothing onto the disk and writes no other files.
"""

from __future__ import annotations

import builtins
import errno
import functools
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar
from uuid import uuid4

import fsspec

__all__ = ["UNCACHED", "Folder", "explained", "is_partial", "location", "retried"]

T = TypeVar("T")

UNCACHED = {"use_listings_cache": False}
"""Options of fsspec: other processes write, so that a listing it has kept may be out of date."""

_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial$")
"""How a file ends while it is written, here and in zarr: it gets its own name when it is whole."""
_WAITS_S = (0.1, 0.5, 2.0)
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}


@dataclass(frozen=True)
class Folder:
    """A folder, which need not exist, by its absolute path or URL.

    Parameters
    ----------
    url
        As :func:`location` returns it.
    options
        What fsspec opens the URL with.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def at(cls, path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Folder:
        """Return the folder of a path or URL that a user has given.

        Raises
        ------
        TypeError
            If the options are no mapping, or the path is no text.
        ValueError
            If nobody can list or write files at such a URL.
        NotADirectoryError
            If a file is in the way.
        """
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(
                f"expected storage_options to be a mapping or None, got {options!r:.60}; try "
                "storage_options={'anon': True}"
            )
        folder = cls(location(path), options or {})
        if folder.url.startswith(("http://", "https://")):
            raise ValueError(
                f"expected a place to write to, got {folder.url!r}; try s3:// or gs://"
            )
        local = Path(folder.url)
        for each in (local, *local.parents) if folder.is_local else ():
            if each.is_file():
                raise NotADirectoryError(
                    f"expected a folder, got the file {str(each)!r}; try another path"
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

        def listed() -> list[str]:
            if self.is_local:
                return os.listdir(self.url)
            fs, path = self._fs()
            fs.invalidate_cache()
            paths = (each.rstrip("/") for each in fs.ls(path, detail=False))
            return [each.rpartition("/")[2] for each in paths if each != path]

        try:
            return sorted(name for name in retried(listed) if not _PARTIAL.search(name))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self) -> dict[str, int]:
        """Return the bytes of all files below it, by their relative paths, from one listing."""
        if self.is_local:
            return dict(_sizes(self.url))
        fs, path = self._fs()

        def listed() -> dict[str, int]:
            fs.invalidate_cache()
            files = fs.find(path, detail=True)
            return {name[len(path) + 1 :]: info["size"] for name, info in files.items()}

        return retried(listed)

    def sweep(self, prefix: str = "") -> None:
        """Remove partial files that killed writers have left anywhere below it.

        Parameters
        ----------
        prefix
            Of the relative paths to look at; all by default.
        """
        if self.is_local:  # only there is a file written under another name first
            paths = [path for path, _ in _walk(self.url) if path.startswith(prefix)]
            for path in filter(_PARTIAL.search, paths):
                self.remove(path)

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        if self.is_local:
            return retried(Path(self.url, name).read_bytes)
        fs, path = self._fs()
        return retried(lambda: _content(fs, f"{path}/{name}"))

    def read_json(self, name: str) -> Any:
        """Return the content of a JSON file."""
        return json.loads(self.read(name))

    def open(self, name: str) -> IO[bytes]:
        """Open a file to read parts of it."""
        fs, path = self._fs()
        file: IO[bytes] = retried(lambda: fs.open(f"{path}/{name}"))
        return file

    def write(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Write or replace a file; readers see the old content or the new."""
        if self.is_local:
            with self.writing(name, durable=durable) as file:
                file.write(data)
        else:
            fs, path = self._fs()
            retried(lambda: fs.pipe_file(f"{path}/{name}", data))

    @contextmanager
    def writing(self, name: str, *, mode: int = 0o666, durable: bool = True) -> Iterator[IO[bytes]]:
        """Write or replace a file piece by piece; if the block raises, nothing has changed.

        Parameters
        ----------
        name
            Path of the file in the folder.
        mode
            Permissions of a local file, less the process's umask.
        durable
            Force a local file onto the disk before it gets its name.

        Yields
        ------
        A local file with another name, ``file.name``, to be written as it is or by that name.
        """
        if self.is_local:
            target = f"{self.url}/{name}"
            with _partial(target, mode) as file:
                yield file
                _finish(file, durable=durable)
                os.replace(file.name, target)
        else:  # object stores show a file when it has been sent as a whole
            fs, path = self._fs()
            with tempfile.NamedTemporaryFile() as file:
                yield file
                file.flush()
                retried(lambda: fs.put_file(file.name, f"{path}/{name}"))

    def create(self, name: str, data: bytes) -> None:
        """Write a file that must not exist yet.

        Raises
        ------
        FileExistsError
            If it exists, also if another process has just written it; or if this call did, and the
            answer of a network was lost: look at the content.
        """
        fs, path = self._fs()
        if self.is_local:
            with _partial(f"{path}/{name}", 0o666) as file:
                file.write(data)
                _finish(file, durable=True)
                os.link(file.name, f"{path}/{name}")
        else:
            retried(lambda: fs.pipe_file(f"{path}/{name}", data, mode="create"))

    def remove(self, name: str = "") -> None:
        """Remove a file or folder in it, or the folder itself, if it exists."""
        fs, path = self._fs()
        with suppress(FileNotFoundError):
            retried(lambda: fs.rm(f"{path}/{name}".rstrip("/"), recursive=True))

    def _fs(self) -> tuple[Any, str]:
        fs, path = fsspec.core.url_to_fs(self.url, **{**UNCACHED, **self.options})
        return fs, path.rstrip("/")


def location(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a local folder; other URLs are returned unchanged.

    Workers may have a different working directory than the process that calls this.

    Raises
    ------
    TypeError
        If it is not a path.
    ValueError
        If it is empty, cannot be a file name, or is a URL with a protocol unknown to fsspec.
    ImportError
        If the package that opens such URLs is not installed.
    OSError
        If the path is too long or contains a cycle of symbolic links.

    Examples
    --------
    >>> location("train.zarr/") == os.path.join(os.getcwd(), "train.zarr")
    True
    >>> location("memory://bucket/train.zarr")
    'memory://bucket/train.zarr'
    """
    given = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(given, str):
        raise TypeError(
            f"expected a path or URL as text, got {given!r:.60} ({type(given).__name__}); try "
            "'features.zarr'"
        )
    if not given.strip():
        raise ValueError(f"expected a path or URL, got {given!r}; try 'features.zarr'")
    if "://" in given:
        _require_known(given)
        if not given.startswith(("file://", "local://")):
            return given
    local: str = os.path.abspath(fsspec.core.url_to_fs(given)[1])
    _require_path(local)
    return local


def explained(err: OSError, text: str) -> OSError:
    """Return the error with another text, of the same built-in class where it has one."""
    return OSError(err.errno, text) if err.errno else OSError(text)


def is_partial(name: str) -> bool:
    """Return whether a file is still being written, or its writer was killed: it has no content.

    Examples
    --------
    >>> is_partial(f"c.0.0.{32 * '0'}.partial"), is_partial("film.partial")
    (True, False)
    """
    return _PARTIAL.search(name) is not None


def retried(call: Callable[[], T]) -> T:
    """Return what a call returns, repeating it after errors of a network that may pass."""
    for wait in _WAITS_S:
        try:
            return call()
        except OSError as err:
            if not _may_pass(err):
                raise
            time.sleep(wait)
    return call()


def _may_pass(err: OSError) -> bool:
    lasting = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
    return not isinstance(err, (*lasting, PermissionError)) and err.errno not in _LASTING


@contextmanager
def _partial(target: str, mode: int) -> Iterator[IO[bytes]]:
    """Open a new file beside its target, which is removed at the end if it still has its name."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    partial = f"{target}.{uuid4().hex}.partial"
    try:
        with builtins.open(partial, "xb", opener=functools.partial(os.open, mode=mode)) as file:
            yield file
    finally:
        with suppress(FileNotFoundError):
            os.unlink(partial)


def _finish(file: IO[bytes], *, durable: bool) -> None:
    file.flush()
    if durable:
        os.fsync(file.fileno())


def _content(fs: Any, path: str) -> bytes:
    try:  # of a whole file s3fs would first ask how long it is, in a request of its own
        return bytes(fs.cat_file(path, start=0))
    except OSError:  # an empty file has no range of bytes; and what is wrong is wrong again
        return bytes(fs.cat_file(path))


def _sizes(folder: str) -> Iterator[tuple[str, int]]:
    for path, entry in _walk(folder):
        with suppress(FileNotFoundError):  # another's temporary file, gone by now
            yield path, entry.stat(follow_symlinks=False).st_size


def _walk(folder: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield everything below a folder, if it exists, except folders, by relative paths."""
    waiting = [(folder, "")]
    while waiting:
        path, prefix = waiting.pop()
        with suppress(FileNotFoundError), os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, f"{prefix}{entry.name}/"))
                else:
                    yield f"{prefix}{entry.name}", entry


def _require_known(url: str) -> None:
    for part in url.split("::"):
        protocol = part.partition("://")[0]
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError as err:
            raise ValueError(
                f"expected a path, or a URL that fsspec knows, got {url!r} with the unknown "
                f"protocol {protocol!r}; try file://, s3:// or gs://"
            ) from err
        except ImportError as err:
            raise ImportError(
                f"expected a package that opens {protocol!r} URLs such as {url!r}, got none "
                f"({err}); try installing it"
            ) from err


def _require_path(path: str) -> None:
    """Reject a path that the file system cannot represent, whether or not it exists."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return  # whoever opens the path reports these
    except OSError as err:
        raise OSError(
            err.errno,
            f"expected a path to a folder, got {path!r:.200} ({err.strerror}); try another path",
        ) from err
    except ValueError as err:  # a NUL character, or text that cannot be encoded as a file name
        raise ValueError(
            f"expected a path to a folder, got {path!r:.200} ({err}); try another path"
        ) from err
