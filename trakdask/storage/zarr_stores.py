"""The zarr stores that features are read from and written to."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from zarr.abc.store import ByteRequest, OffsetByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import FsspecStore, LocalStore, WrapperStore

from trakdask.errors import IncompleteFeaturesError
from trakdask.files import UNCACHED, Folder, is_partial, retried_async

__all__ = ["Arrays", "Complete", "Recorded", "checksum", "zarr_store"]


def zarr_store(folder: Folder, *, read_only: bool = False) -> Store:
    """Return a folder as a zarr store."""
    if folder.is_local:
        return LocalStore(folder.url, read_only=read_only)
    options = {**UNCACHED, **folder.options}
    return _Retried(FsspecStore.from_url(folder.url, options, read_only=read_only))


def checksum(data: Any) -> int:
    """Return the CRC-32 of some bytes."""
    return zlib.crc32(data)


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
    folder
        Where that is.
    token
        What tells its content from others', for names of tasks.
    may_lack
        Names of arrays whose absent chunks mean fill values.
    known
        Size and checksum of files, by their paths; what is read of others is not checked here.
    may_be_replaced
        Whether a later edit of the store removes these files. Features that were opened before it
        then miss them, and the error says to open the store again.
    """

    def __init__(
        self,
        store: Store,
        folder: Folder,
        token: str = "",
        may_lack: tuple[str, ...] = (),
        known: Mapping[str, Sequence[int]] | None = None,
        may_be_replaced: bool = False,
    ) -> None:
        super().__init__(store)
        self._about = folder, token, may_lack, known or {}, may_be_replaced

    def _with_store(self, store: Store) -> Complete:
        return type(self)(store, *self._about)

    def __dask_tokenize__(self) -> tuple[str, ...]:
        folder, token, *_ = self._about
        return type(self).__name__, folder.url, token

    async def get(self, key: str, *args: Any, **options: Any) -> Buffer | None:
        """Read one file."""
        value = await self._store.get(key, *args, **options)
        folder, _, may_lack, known, may_be_replaced = self._about
        name, *chunk = key.split("/")
        if value is None:
            is_chunk = chunk and chunk[0].partition(".")[0] == "c"
            if key in known or (is_chunk and name not in may_lack):
                raise IncompleteFeaturesError(_lost(folder, key, may_be_replaced=may_be_replaced))
        elif key in known:
            data = value.as_numpy_array()
            if [data.nbytes, checksum(data)] != list(known[key]):
                raise ValueError(
                    f"expected the file {key!r} of the store {folder.url!r} as it was written, got "
                    "other bytes (its checksum differs); try td.verify(store, checksums=True), "
                    "which says how to restore it"
                )
        return value


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
    """Remembers the size and checksum of every file that is written through it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.written: dict[str, list[int]] = {}

    async def set(self, key: str, value: Buffer) -> None:
        """Write one file."""
        await self._store.set(key, value)
        data = value.as_numpy_array()
        self.written[key] = [data.nbytes, checksum(data)]
