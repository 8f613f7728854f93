"""Where stores are: folders, URLs, and ``Store`` objects of zarr."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zarr.abc.buffer import Buffer
from zarr.abc.store import OffsetByteRequest, Store
from zarr.buffer import default_buffer_prototype
from zarr.core.sync import sync  # no public module of zarr runs the coroutines of a Store
from zarr.storage import FsspecStore, LocalStore, StorePath

from trakdask.files import UNCACHED, Folder

StoreLike = str | os.PathLike[str] | Store
"""Where features are: a folder, an fsspec URL, or an object of zarr."""


@dataclass(frozen=True)
class Content(Folder):
    """The content of a zarr ``Store`` object, such as a zip file or a session of icechunk."""

    store: Store = field(kw_only=True)
    prefix: str = ""

    def __truediv__(self, name: str) -> Content:
        return replace(self, prefix=f"{self.prefix}{name}/")

    @property
    def is_local(self) -> bool:
        """Whether its files can be opened by a path."""
        return False

    def names(self) -> list[str]:
        """List the files and folders in it."""
        return sorted(name.strip("/") for name in sync(_all(self.store.list_dir, self.prefix)))

    def files(self) -> set[str]:
        """Return the relative paths of all that is below it."""
        paths = sync(_all(self.store.list_prefix, self.prefix))
        return {path.removeprefix(self.prefix) for path in paths}

    def read(self, name: str) -> bytes:
        """Return the content of a key."""
        value = sync(self.store.get(f"{self.prefix}{name}", default_buffer_prototype()))
        if value is None:
            raise FileNotFoundError(f"{self.prefix}{name} in {self.url}")
        return value.to_bytes()


async def _all(names: Callable[[str], AsyncIterator[str]], prefix: str) -> list[str]:
    return [name async for name in names(prefix)]


class _Files(FsspecStore):
    """Files at a URL, each read in one request."""

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Buffer | None:
        # s3fs would first ask how long a whole file is, in a request of its own.
        return await super().get(key, prototype, byte_range or OffsetByteRequest(0))


def zarr_store(folder: Folder, *, read_only: bool = False) -> Store:
    """Return a folder as a zarr store."""
    if isinstance(folder, Content):
        return folder.store
    if folder.is_local:
        return LocalStore(folder.url, read_only=read_only)
    options = {**UNCACHED, **folder.options}
    return _Files.from_url(folder.url, options, read_only=read_only)


def readable(store: StoreLike, options: Mapping[str, Any] | None) -> Folder:
    """Return where a store is read."""
    if isinstance(store, Store):
        return Content(str(store), store=sync(StorePath.open(store, "")).store)
    return Folder.at(store, options)


def writable(store: StoreLike, options: Mapping[str, Any] | None) -> Folder:
    """Return where a store is written, which is a folder or URL that all workers reach."""
    if isinstance(store, Store):
        raise TypeError(
            f"expected a path or URL to write to, got {store} ({type(store).__name__}); what tasks "
            "write into a session of icechunk or into memory would have to come back to you: try "
            "td.save(features, 'train.zarr'), then xr.open_zarr('train.zarr').to_zarr(store)"
        )
    return Folder.at(store, options)
