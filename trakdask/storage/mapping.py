"""Chunks of a local store, mapped into memory instead of copied.

zarr reads a chunk in an event loop and copies it twice, into pages that are new each time; that
takes longer than the products that a query computes from it. An uncompressed chunk is its file, up
to the checksum at the end, so it can be mapped as it is. The kernel then reads it once, as long as
it fits in memory, for all processes of a machine.
"""

from __future__ import annotations

import os
from typing import Any

import dask.array as da
import google_crc32c
import numpy as np
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec

from trakdask.files import Folder

__all__ = ["MappedChunks", "lazy_array"]

_CRC_BYTES = 4
#: Smaller files are read, which takes less time than to map them, and no entry in a table of which
#: a process has few.
_LEAST_MAPPED = 2**20

_verified: dict[str, tuple[int, int, int]] = {}
"""Files whose checksums this process has verified, and what they were like then."""


def lazy_array(folder: Folder, name: str, source: zarr.Array[Any], *, token: str) -> da.Array:
    """Return an array of a store, lazy, in its chunks.

    Parameters
    ----------
    folder
        The zarr group.
    name
        The name of the array in it.
    source
        The array.
    token
        The name of the tasks.
    """
    read = MappedChunks(folder, name, source) if _is_plain(folder, source) else source
    lazy: da.Array = da.from_array(
        read, chunks=source.chunks, name=token, meta=np.empty((0,) * source.ndim, source.dtype)
    )
    return lazy


def _is_plain(folder: Folder, source: zarr.Array[Any]) -> bool:
    """Return whether the chunks are local files of plain numbers, with a checksum at the end."""
    codecs = getattr(source.metadata, "codecs", ())
    kinds = tuple(map(type, codecs))
    is_plain = source.dtype.isnative and source.dtype.kind in "fiu"
    return folder.is_local and is_plain and kinds == (BytesCodec, Crc32cCodec)


class MappedChunks:
    """An array whose chunks are mapped, where whole ones are asked for; zarr reads the rest.

    zarr also reads a file that is lost, has another size, or not the bytes that its checksum was
    made of: it has the words for what is wrong.
    """

    def __init__(self, folder: Folder, name: str, source: zarr.Array[Any]) -> None:
        self._at, self._source = f"{folder.url}/{name}", source
        self.shape, self.dtype, self.ndim = source.shape, source.dtype, source.ndim

    def __getitem__(self, key: tuple[slice, ...]) -> np.ndarray:
        chunk = self._chunk(key)
        block = None
        if chunk is not None:
            block = self.read_file(f"{self._at}/{self._source.metadata.encode_chunk_key(chunk)}")
        if block is None:
            return np.asarray(self._source[key])
        sizes = (each.stop - each.start for each in key)
        return block[tuple(slice(size) for size in sizes)]  # the last chunks are padded

    def _chunk(self, key: tuple[slice, ...]) -> tuple[int, ...] | None:
        """Return the indices of the chunk that is asked for, if it is one and whole."""
        indices = []
        for each, size, chunk in zip(key, self.shape, self._source.chunks, strict=True):
            if not isinstance(each, slice) or each.step not in (None, 1):
                return None
            start, stop, _ = each.indices(size)
            if start % chunk or stop != min(start + chunk, size) or each.start is None:
                return None
            indices.append(start // chunk)
        return tuple(indices)

    def read_file(self, path: str) -> np.ndarray | None:
        """Return the content of a chunk's file, None if it is not as it should be."""
        n_bytes = int(np.prod(self._source.chunks)) * self.dtype.itemsize
        try:
            about = os.stat(path)
        except OSError:
            return None
        if about.st_size != n_bytes + _CRC_BYTES:
            return None
        if n_bytes < _LEAST_MAPPED:
            data = np.fromfile(path, np.uint8)
        else:  # pages are copied when they are written to, so that the file stays as it is
            data = np.asarray(np.memmap(path, np.uint8, mode="c"))
        if len(data) != about.st_size or not _is_whole(path, about, data):
            return None
        return data[:n_bytes].view(self.dtype).reshape(self._source.chunks)


def _is_whole(path: str, about: os.stat_result, data: np.ndarray) -> bool:
    """Return whether a file has the bytes that its checksum was made of, computed once."""
    state = (about.st_ino, about.st_mtime_ns, about.st_size)
    if _verified.get(path) != state:
        content = data[:-_CRC_BYTES]
        content.flags.writeable = False  # the function takes nothing else
        computed = google_crc32c.value(content)
        if data[-_CRC_BYTES:].view("<u4")[0] != computed:
            return False
        _verified[path] = state
    return True
