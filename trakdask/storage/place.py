"""A folder on any file system: listed, never assumed; files in it appear whole or not at all."""

from __future__ import annotations

import asyncio
import builtins
import errno
import json
import os
import re
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import fsspec
from zarr.abc.store import Store
from zarr.core.buffer import Buffer
from zarr.storage import FsspecStore, LocalStore, WrapperStore

from trakdask.errors import IncompleteFeaturesError
from trakdask.locations import location

__all__ = ["Arrays", "Complete", "Place", "Recorded", "checksum", "explained", "is_partial"]

T = TypeVar("T")

_UNCACHED = {"use_listings_cache": False}
"""Other processes write: a listing of before, which fsspec would keep, knows nothing of that."""

_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial$")
"""How a file ends while it is written, here and in zarr: it gets its own name when it is whole."""
_WAITS_S = (0.1, 0.5, 2.0)
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}


@dataclass(frozen=True)
class Place:
    """A folder, by an absolute path or URL, and the options that fsspec opens it with."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def at(cls, store: str | os.PathLike[str], options: Mapping[str, Any] | None) -> Place:
        """Return where a store is, or would be; NotADirectoryError if a file is in the way."""
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(
                f"expected storage_options to be a mapping or None, got {options!r:.60}; try "
                "storage_options={'anon': True}"
            )
        place = cls(location(store), options or {})
        path = Path(place.url)
        if place.is_local and (file := next((p for p in (path, *path.parents) if p.is_file()), "")):
            raise NotADirectoryError(
                f"expected a folder, got the file {str(file)!r}; try another path"
            )
        return place

    def __truediv__(self, name: str) -> Place:
        return Place(f"{self.url}/{name}", self.options)

    @property
    def is_local(self) -> bool:
        """Whether it is a path of this machine's file systems."""
        return "://" not in self.url

    def zarr(self, *, read_only: bool = False) -> Store:
        """Return it as a zarr store."""
        if self.is_local:
            return LocalStore(self.url, read_only=read_only)
        options = {**_UNCACHED, **self.options}
        return _Patient(FsspecStore.from_url(self.url, options, read_only=read_only))

    def names(self) -> list[str]:
        """List what is in it but files half written; nothing where it does not exist."""
        fs, path = self._fs()

        def listed() -> list[str]:
            fs.invalidate_cache()
            try:
                return list(fs.ls(path, detail=False))
            except FileNotFoundError:
                return []

        found = (name.rstrip("/") for name in _patiently(listed))
        names = (name.rpartition("/")[2] for name in found if name != path)
        return sorted(name for name in names if not is_partial(name))

    def sizes(self) -> dict[str, int]:
        """Return the bytes of all files below it, by their relative paths; one listing."""
        if self.is_local:
            return dict(_sizes(self.url))
        fs, path = self._fs()

        def listed() -> dict[str, int]:
            fs.invalidate_cache()
            found = fs.find(path, detail=True)
            return {name[len(path) + 1 :]: info["size"] for name, info in found.items()}

        return _patiently(listed)

    def sweep(self) -> None:
        """Remove the files below it that were half written when their writer was killed."""
        if self.is_local:  # only there is a file written under another name first
            for path in [path for path, _ in _walk(self.url) if is_partial(path)]:
                self.remove(path)

    def require_no_links(self) -> None:
        """Refuse symbolic links below it, so that what is written there stays there.

        Raises
        ------
        ValueError
            If there is one; it names the link and where it leads.
        """
        if not self.is_local or not os.path.isdir(self.url):
            return
        for path, entry in _walk(self.url):
            if entry.is_symlink():
                raise ValueError(
                    f"expected plain files and folders in the store {self.url!r}, got the symbolic "
                    f"link {path!r} to {os.readlink(entry.path)!r}, and nothing is written through "
                    "links; try replacing the link by what it leads to"
                )

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        fs, path = self._fs()
        return bytes(_patiently(lambda: fs.cat_file(f"{path}/{name}")))

    def read_json(self, name: str) -> Any:
        """Return the content of a JSON file."""
        return json.loads(self.read(name))

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file; a reader finds the old one or the new one."""
        fs, path = self._fs()
        if self.is_local:
            with _written(f"{path}/{name}", data) as partial:
                os.replace(partial, f"{path}/{name}")
        else:
            _patiently(lambda: fs.pipe_file(f"{path}/{name}", data))

    def create(self, name: str, data: bytes) -> None:
        """Write a new file; FileExistsError if there is one, whoever else tries at the time.

        Or if it was written by this call, and only the answer was lost: look at the content.
        """
        fs, path = self._fs()
        if self.is_local:
            with _written(f"{path}/{name}", data) as partial:
                os.link(partial, f"{path}/{name}")
        else:
            _patiently(lambda: fs.pipe_file(f"{path}/{name}", data, mode="create"))

    def remove(self, name: str) -> None:
        """Remove a file or folder, if it is there."""
        fs, path = self._fs()
        with suppress(FileNotFoundError):
            _patiently(lambda: fs.rm(f"{path}/{name}", recursive=True))

    def _fs(self) -> tuple[Any, str]:
        fs, path = fsspec.core.url_to_fs(self.url, **{**_UNCACHED, **self.options})
        return fs, path.rstrip("/")


def explained(err: OSError, text: str) -> OSError:
    """Return the error with another text, of the same built-in class where it has one."""
    return OSError(err.errno, text) if err.errno else OSError(text)


def is_partial(name: str) -> bool:
    """Return whether a file was half written when its writer was killed: it is no content.

    Examples
    --------
    >>> is_partial(f"c.0.0.{32 * '0'}.partial"), is_partial("film.partial")
    (True, False)
    """
    return _PARTIAL.search(name) is not None


def checksum(data: Any) -> int:
    """Return the CRC-32 of some bytes."""
    return zlib.crc32(data)


@contextmanager
def _written(target: str, data: bytes) -> Iterator[str]:
    """Hold a file beside its target that is whole, and on the disk, before it gets its name."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    partial = f"{target}.{uuid4().hex}.partial"
    try:
        with builtins.open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield partial
    finally:
        with suppress(FileNotFoundError):
            os.unlink(partial)


def _sizes(folder: str) -> Iterator[tuple[str, int]]:
    for path, entry in _walk(folder):
        with suppress(FileNotFoundError):  # another's temporary file, gone by now
            yield path, entry.stat(follow_symlinks=False).st_size


def _walk(folder: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield all that is below a folder but folders, by relative paths."""
    waiting = [(folder, "")]
    while waiting:
        path, prefix = waiting.pop()
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, f"{prefix}{entry.name}/"))
                else:
                    yield f"{prefix}{entry.name}", entry


def _may_pass(err: OSError) -> bool:
    lasting = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
    return not isinstance(err, (*lasting, PermissionError)) and err.errno not in _LASTING


def _patiently(call: Callable[[], T]) -> T:
    """Call again where an error may pass: a network refuses a request now and then."""
    for wait in _WAITS_S:
        try:
            return call()
        except OSError as err:
            if not _may_pass(err):
                raise
            time.sleep(wait)
    return call()


async def _patiently_async(call: Callable[[], Awaitable[T]]) -> T:
    for wait in _WAITS_S:
        try:
            return await call()
        except OSError as err:
            if not _may_pass(err):
                raise
            await asyncio.sleep(wait)
    return await call()


class _Patient(WrapperStore[Store]):
    """A store on a network: asked again where an error may pass."""

    async def get(self, *args: Any, **options: Any) -> Buffer | None:
        return await _patiently_async(lambda: self._store.get(*args, **options))

    async def set(self, key: str, value: Buffer) -> None:
        await _patiently_async(lambda: self._store.set(key, value))

    async def exists(self, key: str) -> bool:
        return await _patiently_async(lambda: self._store.exists(key))

    async def delete(self, key: str) -> None:
        await _patiently_async(lambda: self._store.delete(key))

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        async def listed() -> list[str]:
            return [name async for name in self._store.list_dir(prefix)]

        for name in await _patiently_async(listed):
            yield name


class Arrays(WrapperStore[Store]):
    """A zarr store that shows no folder of the names that are hidden, and nothing half written.

    zarr would warn that it does not recognize them.
    """

    def __init__(self, store: Store, hidden: frozenset[str] = frozenset()) -> None:
        super().__init__(store)
        self._hidden = hidden

    def _with_store(self, store: Store) -> Arrays:
        return type(self)(store, self._hidden)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """List what is in a folder."""
        async for name in self._store.list_dir(prefix):
            if name.rstrip("/") not in self._hidden and not is_partial(name):
                yield name


class Complete(WrapperStore[Store]):
    """A store whose files are those that were written.

    zarr would read a lost chunk as fill values, and changed bytes as other numbers, without a word.

    Parameters
    ----------
    store
        What it wraps.
    place
        Where that is.
    token
        What tells its content from others', for names of tasks.
    may_lack
        Names of arrays whose absent chunks mean fill values.
    known
        Size and checksum of files, by their paths; what is read of others is not checked here.
    """

    def __init__(
        self,
        store: Store,
        place: Place,
        token: str = "",
        may_lack: tuple[str, ...] = (),
        known: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(store)
        self._about = place, token, may_lack, known or {}

    def _with_store(self, store: Store) -> Complete:
        return type(self)(store, *self._about)

    def __dask_tokenize__(self) -> tuple[str, ...]:
        place, token, *_ = self._about
        return type(self).__name__, place.url, token

    async def get(self, key: str, *args: Any, **options: Any) -> Buffer | None:
        """Read one file."""
        found = await self._store.get(key, *args, **options)
        place, _, may_lack, known = self._about
        name, *chunk = key.split("/")
        if found is None:
            is_chunk = chunk and chunk[0].partition(".")[0] == "c"
            if key in known or (is_chunk and name not in may_lack):
                raise IncompleteFeaturesError(
                    f"expected the file {key!r} in the store {place.url!r}, but it was lost; try "
                    "td.verify(store, repair=True), then td.save(features, store) to compute what "
                    "is missing"
                )
        elif key in known:
            data = found.as_numpy_array()
            if [data.nbytes, checksum(data)] != list(known[key]):
                raise ValueError(
                    f"expected the file {key!r} of the store {place.url!r} as it was written, got "
                    "other bytes (its checksum differs); try td.verify(store, checksums=True), "
                    "which says how to restore it"
                )
        return found


class Recorded(WrapperStore[Store]):
    """Remembers the size and checksum of every file that is written through it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.written: dict[str, list[int]] = {}

    async def set(self, key: str, value: Buffer) -> None:
        """Write one file."""
        await self._store.set(key, value)
        data = value.as_numpy_array()
        self.written[key] = [data.nbytes, checksum(data)]
