"""Lazy arrays of a store.

A chunk of numbers in a local store is its file, up to the checksum at the end, so it is mapped:
zarr copies it twice, into pages that are new each time, which takes longer than the products that
a query computes from it.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import dask.array as da
import google_crc32c
import numpy as np
from dask.base import tokenize

from trakdask.arrays.stored import Read, reader, stored
from trakdask.errors import IncompleteFeaturesError
from trakdask.storage.group import SCALE, Group, chunks_of, separator_of

__all__ = ["Chunks", "decoded", "lazy_array", "lazy_feature"]

_CRC_BYTES = 4
_LEAST_MAPPED = 2**20
"""Bytes of a file; a smaller one is read in less time, and a process may have few maps."""

_verified: dict[str, tuple[int, int, int]] = {}
"""Files whose checksums this process has compared, and what they were like then."""


def lazy_array(group: Group, name: str, *, complete: bool = True) -> da.Array:
    """Return an array of numbers, lazy, in its chunks.

    Parameters
    ----------
    group, name
        The store, and the name of the array.
    complete
        Whether an absent chunk is an error, when it is read; else it reads as NaN.
    """
    chunks = Chunks(group, name, complete=complete)
    path = group.chunk_path(name, (0,))
    token = tokenize(group.folder.url, group.attrs["saved"], path, chunks.shape, complete)
    sizes = da.core.normalize_chunks(chunks_of(group.arrays[name]), chunks.shape)
    name = f"open-{name.replace('_', '-')}-{token}"
    return stored(chunks.__getitem__, sizes, chunks.dtype, name)


def lazy_feature(group: Group, *, complete: bool = True) -> da.Array:
    """Return the features of a store in the dtype that they are used in."""
    feature = lazy_array(group, "feature", complete=complete)
    if SCALE not in group.arrays:
        return feature
    return decoded(feature, lazy_array(group, SCALE, complete=complete))


def decoded(halves: da.Array, scale: da.Array) -> da.Array:
    """Return features that are stored as float16 as float32, lazy."""
    if (rows := reader(halves)) and (scales := reader(scale)):
        read = functools.partial(_read_decoded, rows, scales)
        name = "feature-of-half-" + tokenize(halves, scale)
        return stored(read, halves.chunks, np.float32, name)
    feature: da.Array = da.blockwise(
        _decode, "spc", halves, "spc", scale, "sc",
        name="feature-of-half-" + tokenize(halves.name, scale.name), align_arrays=False,
        dtype=np.float32, meta=np.empty((0, 0, 0), np.float32),
    )  # fmt: skip
    return feature


def _read_decoded(halves: Read, scale: Read, key: tuple[slice, ...]) -> np.ndarray:
    return _decode(halves(key), scale((key[0], key[2])))


def _decode(halves: np.ndarray, scale: np.ndarray) -> np.ndarray:
    is_missing = np.isnan(scale)  # a block that was never stored
    _, exponent = np.frexp(np.where(is_missing, 1, scale))
    feature: np.ndarray = np.ldexp(halves.astype(np.float32), exponent[:, None, :] - 1)
    feature[is_missing[:, 0]] = np.nan
    return feature


class Chunks:
    """An array of numbers in a store, of which tasks read parts of single chunks."""

    def __init__(self, group: Group, name: str, *, complete: bool) -> None:
        self._array, self._complete = group.array(name, read_only=True), complete
        self._folder, self._prefix = group.folder, group.chunk_path(name, ())
        self._separator = separator_of(group.arrays[name])
        self.shape, self.dtype, self.ndim = (
            self._array.shape, self._array.dtype, self._array.ndim
        )  # fmt: skip

    def __getitem__(self, key: tuple[slice, ...]) -> np.ndarray:
        path, within = self._chunk(key)
        if path is not None and self._folder.is_local:
            data = _mapped(f"{self._folder.url}/{path}", self._array.chunks, self.dtype)
            if data is not None:
                return data[within]
        try:
            block = np.asarray(self._array[key])
        except ValueError as err:
            raise ValueError(
                f"expected {path or self._prefix!r} in {self._folder.url!r} as it was written, got "
                f"other bytes ({err}); try td.verify(store, checksums=True, repair=True), then "
                "td.save(features, store)"
            ) from err
        # zarr reads an absent chunk as NaN, without a word.
        if self._complete and path is not None and np.isnan(block).all():
            folder, _, name = path.rpartition("/")
            if name not in (self._folder / folder).names():
                raise IncompleteFeaturesError(
                    f"expected the chunk {path!r} in the store {self._folder.url!r}, but it is "
                    "gone; try td.open(store) again if the store was changed since, or "
                    "td.verify(store, repair=True), which says what to do"
                )
        return block

    def _chunk(self, key: tuple[slice, ...]) -> tuple[str | None, tuple[slice, ...]]:
        """Return the file of the chunk that is asked for, if it is one, and where in it."""
        index: list[int] = []
        within: list[slice] = []
        if not all(isinstance(each, slice) for each in key):
            return None, ()
        for each, size, chunk in zip(key, self.shape, self._array.chunks, strict=True):
            start, stop, step = each.indices(size)
            if step != 1 or start >= stop or start // chunk != (stop - 1) // chunk:
                return None, ()
            index.append(start // chunk)
            within.append(slice(start - index[-1] * chunk, stop - index[-1] * chunk))
        return self._separator.join([self._prefix, *map(str, index)]), tuple(within)


def _mapped(path: str, chunks: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray | None:
    """Return the content of a chunk; None if it is not as it should be, which zarr then says."""
    n_bytes = int(np.prod(chunks)) * dtype.itemsize
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
    state = (about.st_ino, about.st_mtime_ns, about.st_size)
    if _verified.get(path) != state:
        content = data[:-_CRC_BYTES]
        content.flags.writeable = False  # the function takes nothing else
        if data[-_CRC_BYTES:].view("<u4")[0] != google_crc32c.value(content):
            return None
        _verified[path] = state
    return data[:n_bytes].view(dtype).reshape(chunks)
