"""The zarr stores that features are read from and written to.

Metadata are read and parsed here, not by zarr: it would read those of an array whenever it opens
it, and hand each request to its event loop, which takes longer than to read a small file.
"""

from __future__ import annotations

import asyncio
import functools
import json
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import ByteRequest, OffsetByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.core.metadata.v3 import ArrayV3Metadata
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, StorePath, WrapperStore

from trakdask.errors import IncompleteFeaturesError
from trakdask.files import UNCACHED, Folder, is_partial, retried_async

__all__ = [
    "METADATA",
    "Arrays",
    "Complete",
    "Recorded",
    "Writable",
    "array_of",
    "checksum",
    "read_attributes",
    "zarr_store",
]

METADATA = "zarr.json"
_MOST_READ = 1024
_read: OrderedDict[tuple[str, str, int, int], bytes] = OrderedDict()
"""Metadata of arrays, by the URL of the group, the name, and the size and checksum of the file."""
_lock = Lock()


def zarr_store(folder: Folder, *, read_only: bool = False) -> Store:
    """Return a folder as a zarr store."""
    if folder.is_local:
        return LocalStore(folder.url, read_only=read_only)
    options = {**UNCACHED, **folder.options}
    return _Retried(FsspecStore.from_url(folder.url, options, read_only=read_only))


def checksum(data: Any) -> int:
    """Return the CRC-32 of some bytes."""
    return zlib.crc32(data)


def read_attributes(folder: Folder) -> dict[str, Any]:
    """Return the attributes of a zarr group.

    Raises
    ------
    FileNotFoundError
        If there is none.
    ValueError
        If its metadata are no such metadata.
    """
    about = folder.read_json(METADATA)
    fields = {"zarr_format": 3, "node_type": "group"}
    if isinstance(about, dict) and about | fields == about:
        attributes = about.get("attributes", {})
        if isinstance(attributes, dict):
            return attributes
    raise ValueError(
        f"expected the metadata of a zarr v3 group in {folder.url}/{METADATA}, got {about!r:.60}; "
        "try td.verify(store, repair=True)"
    )


def array_of(metadata: bytes, store: Store, name: str) -> zarr.Array[Any]:
    """Return an array whose chunks are written even if they are all NaN: absent means missing.

    Parameters
    ----------
    metadata
        The content of its file of metadata.
    store, name
        Where its chunks are.
    """
    return zarr.Array(_opened(metadata, store, name))


def _opened(
    metadata: bytes, store: Store, name: str, *, write_empty_chunks: bool = True
) -> zarr.AsyncArray[Any]:
    config: Any = {"write_empty_chunks": write_empty_chunks}
    return zarr.AsyncArray(_parsed(metadata), StorePath(store, name), config)


@functools.lru_cache(_MOST_READ)
def _parsed(metadata: bytes) -> ArrayV3Metadata:
    return ArrayV3Metadata.from_dict(json.loads(metadata))


class _Retried(WrapperStore[Store]):
    """A store on a network, which refuses a request now and then."""

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        # Of a whole file s3fs would first ask how long it is, in a request of its own.
        part = byte_range or OffsetByteRequest(0)
        return await retried_async(lambda: self._store.get(key, prototype, part))

    async def set(self, key: str, value: Buffer) -> None:
        await retried_async(lambda: self._store.set(key, value))

    async def exists(self, key: str) -> bool:
        return await retried_async(lambda: self._store.exists(key))

    async def delete(self, key: str) -> None:
        await retried_async(lambda: self._store.delete(key))

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        async def listed() -> list[str]:
            return [name async for name in self._store.list_dir(prefix)]

        for name in await retried_async(listed):
            yield name


class Arrays(WrapperStore[Store]):
    """A zarr store that shows no folder of the names that are hidden, and nothing half written.

    zarr would warn that it does not recognize them.

    Parameters
    ----------
    store
        What it wraps.
    folder
        Where that is.
    hidden
        Names of folders.
    metadata
        Content of metadata that was read already, by their paths; more is added. Left behind when
        the store is pickled.
    """

    def __init__(
        self,
        store: Store,
        folder: Folder,
        hidden: frozenset[str] = frozenset(),
        metadata: dict[str, bytes] | None = None,
    ) -> None:
        super().__init__(store)
        self._folder, self._hidden = folder, hidden
        self._metadata = {} if metadata is None else metadata

    def _with_store(self, store: Store) -> Arrays:
        return Arrays(store, self._folder, self._hidden, self._metadata)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_metadata": {}}

    def array(self, name: str) -> zarr.Array[Any]:
        """Return one of its arrays; chunks that are written to it are written if all NaN, too.

        Raises
        ------
        KeyError
            If there is none of this name, and there should be none.
        """
        return array_of(self.metadata(name), self, name)

    def metadata(self, name: str) -> bytes:
        """Return the content of the metadata of one of its arrays, as :meth:`array` does."""
        key = f"{name}/{METADATA}"
        if key not in self._metadata:
            try:
                data = self._folder.read(key)
            except (FileNotFoundError, NotADirectoryError):
                self._require_known(key, None)
                raise KeyError(name) from None
            self._require_known(key, data)
            self._metadata[key] = data
        return self._metadata[key]

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read one file."""
        if byte_range is None and key in self._metadata:
            return prototype.buffer.from_bytes(self._metadata[key])
        try:
            value = await self._store.get(key, prototype, byte_range)
        except FileNotFoundError:  # the folder of a local store is gone
            self._require_known(key, None)
            raise
        self._require_known(key, None if value is None else value.as_numpy_array())
        return value

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """List what is in a folder."""
        async for name in self._store.list_dir(prefix):
            if name.rstrip("/") not in self._hidden and not is_partial(name):
                yield name

    def _require_known(self, key: str, data: Any) -> None:
        """Reject content that is not what it should be."""


class Complete(Arrays):
    """A store whose files are those that were written.

    zarr would read a lost chunk as fill values, and changed bytes as other numbers, without a word.

    Parameters
    ----------
    store, folder, hidden, metadata
        As those of :class:`Arrays`.
    known
        Size and checksum of files, by their paths; what is read of others is not checked here.
    token
        What tells its content from others', for names of tasks.
    may_lack
        Names of arrays whose absent chunks mean fill values.
    may_be_replaced
        Whether a later edit of the store removes these files. Features that were opened before it
        then miss them, and the error says to open the store again.
    """

    def __init__(
        self,
        store: Store,
        folder: Folder,
        known: Mapping[str, Sequence[int]],
        *,
        token: str,
        may_lack: tuple[str, ...] = (),
        may_be_replaced: bool = False,
        hidden: frozenset[str] = frozenset(),
        metadata: dict[str, bytes] | None = None,
    ) -> None:
        super().__init__(store, folder, hidden, metadata)
        self._known, self._token = known, token
        self._may_lack, self._may_be_replaced = may_lack, may_be_replaced

    def _with_store(self, store: Store) -> Complete:
        return Complete(
            store, self._folder, self._known, token=self._token, may_lack=self._may_lack,
            may_be_replaced=self._may_be_replaced, hidden=self._hidden, metadata=self._metadata,
        )  # fmt: skip

    def __dask_tokenize__(self) -> tuple[str, ...]:
        return type(self).__name__, self._folder.url, self._token

    def _require_known(self, key: str, data: Any) -> None:
        name, *chunk = key.split("/")
        if data is None:
            is_chunk = chunk and chunk[0].partition(".")[0] == "c"
            if key in self._known or (is_chunk and name not in self._may_lack):
                raise IncompleteFeaturesError(
                    _lost(self._folder, key, may_be_replaced=self._may_be_replaced)
                )
        elif key in self._known and [len(data), checksum(data)] != list(self._known[key]):
            raise ValueError(
                f"expected the file {key!r} of the store {self._folder.url!r} as it was written, "
                "got other bytes (its checksum differs); try td.verify(store, checksums=True), "
                "which says how to restore it"
            )


def _lost(folder: Folder, key: str, *, may_be_replaced: bool) -> str:
    if may_be_replaced:
        return (
            f"expected the file {key!r} in {folder.url!r}, but it is gone: features that were "
            "opened before a td.save, td.drop, td.assign_coords or td.calibrate changed the store "
            "refer to what that has replaced; try td.open(store) again, and td.verify(store, "
            "repair=True) if that does not help"
        )
    return (
        f"expected the file {key!r} in the store {folder.url!r}, but it was lost; try "
        "td.verify(store, repair=True), then td.save(features, store) to compute what is missing"
    )


class Recorded(WrapperStore[Store]):
    """Remembers the size and checksum of every file that is written through it.

    And the last content of metadata, by their paths.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.written: dict[str, list[int]] = {}
        self.metadata: dict[str, bytes] = {}

    async def set(self, key: str, value: Buffer) -> None:
        """Write one file."""
        await self._store.set(key, value)
        data = value.as_numpy_array()
        self.written[key] = [data.nbytes, checksum(data)]
        if key.endswith(METADATA):
            self.metadata[key] = value.to_bytes()


@dataclass(frozen=True)
class Writable:
    """Arrays of a group that tasks write to, which read their metadata once; small when pickled.

    zarr would read them for each block: ten requests on an object store, against five to write it.

    Parameters
    ----------
    folder
        The group.
    known
        Size and checksum of the arrays' metadata, by the names of the arrays.
    """

    folder: Folder
    known: Mapping[str, tuple[int, int]]

    @classmethod
    def among(
        cls, folder: Folder, names: Iterable[str], files: Mapping[str, Sequence[int]]
    ) -> Writable:
        """Return those of the named arrays whose metadata are among some files."""
        paths = {name: f"{name}/{METADATA}" for name in names}
        return cls(folder, {n: (files[p][0], files[p][1]) for n, p in paths.items() if p in files})

    def write(
        self,
        values: Mapping[str, np.ndarray],
        at: tuple[Any, ...],
        sparse: Collection[str] = (),
    ) -> dict[str, list[int]]:
        """Write the same selection of some arrays, all at the same time.

        Parameters
        ----------
        values
            By the names of the arrays.
        at
            The selection.
        sparse
            Names of arrays that have no chunk where all values are fill values.

        Returns
        -------
        Size and checksum of the files that were written, in the order of the arrays.
        """
        store = Recorded(zarr_store(self.folder))
        arrays = {
            name: _opened(self.metadata(name), store, name, write_empty_chunks=name not in sparse)
            for name in values
        }

        async def written() -> list[BaseException | None]:
            writes = (arrays[name].setitem(at, values[name]) for name in values)
            return await asyncio.gather(*writes, return_exceptions=True)

        for error in sync(written()):  # none is under way any more when the first is raised
            if error is not None:
                raise error
        names = list(values)
        return dict(
            sorted(store.written.items(), key=lambda item: names.index(item[0].partition("/")[0]))
        )

    def metadata(self, name: str) -> bytes:
        """Return the metadata of an array, or raise a ValueError if others were written since."""
        size, known = self.known[name]
        key = (self.folder.url, name, size, known)
        with _lock:
            if key not in _read:
                path = f"{name}/{METADATA}"
                source = Complete(
                    zarr_store(self.folder), self.folder, {path: (size, known)}, token=""
                )
                try:
                    _read[key] = source.metadata(name)
                except IncompleteFeaturesError as err:
                    if self.folder.names():
                        raise
                    raise FileNotFoundError(f"no such folder: {self.folder.url}") from err
            _read.move_to_end(key)
            while len(_read) > _MOST_READ:
                _read.popitem(last=False)
            return _read[key]
