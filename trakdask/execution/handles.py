"""Send large objects to workers as files instead of inside the task graph.

A :class:`Spooled` handle represents its object in tasks. In the process that created it, the handle
returns the object itself. Pickling the handle writes the object to the spool, once per content, and
sends only where it is; another process opens it on first use and caches it. :class:`SpooledFile`
does the same for a file that exists already.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import cloudpickle
import numpy as np

from trakdask.execution.fingerprints import fingerprint, unpicklable
from trakdask.execution.memory_maps import (
    FileVersion,
    MemmapLocation,
    file_version,
    is_plain_array,
    memmap_location,
    open_memmap,
)
from trakdask.execution.spool import (
    SpoolFile,
    fetched,
    is_current,
    local_path,
    offer,
    require_private,
    spool_folder,
    uploaded,
    write_once,
)

__all__ = ["Spooled", "SpooledFile"]

INLINE_BYTES = 16 * 1024
"""Objects whose pickle is at most this large are sent inside the handle, without a file."""

LARGE_BYTES = 64 * 1024**2
_MAX_LARGE_CACHED = 4
_MAX_SMALL_CACHED = 1024


@dataclass(frozen=True)
class _Location:
    """How another process gets the object: from bytes, a memory-mapped file, or a spool file."""

    inline: bytes | None = None
    mapped: tuple[MemmapLocation, FileVersion | None] | None = None
    file: SpoolFile | None = None


_lock = threading.RLock()
_live: weakref.WeakValueDictionary[str, Spooled] = weakref.WeakValueDictionary()


class Spooled:
    """Wrap an object in a handle that can be pickled without the object.

    Parameters
    ----------
    obj
        An object that tasks need: a numpy array, a torch dataset or module, a callable. The handle
        refers to it without copying it, so do not modify it afterwards.
    token
        Identifies the content: objects with equal tokens must be interchangeable. By default the
        content is hashed (:func:`fingerprint`).

    Raises
    ------
    TypeError
        If no token is given and the object cannot be pickled.

    Notes
    -----
    The spool is ``$TRAKDASK_SPOOL``: a folder, or a URL that fsspec knows, such as
    ``s3://bucket/spool``. If the variable is not set, it is a temporary folder that is removed when
    this process exits. A process that sees the file opens it there. Otherwise it fetches a copy,
    once: from the URL, or through the scheduler of the cluster, which asks this process for it.
    Files in a spool that you named remain there and are reused.

    Whoever can write to the folder can run code in the workers. Therefore a new folder is
    accessible to its owner only, a folder that others can write to is rejected, and files of other
    users (except root) are never unpickled. What comes from a URL is compared with its sha256.

    Cost: one hash of the content on creation and one write when first pickled. Objects of up to
    16 kB are sent inside the handle. A read-only ``np.memmap`` is neither read nor written: it is
    identified by the path, size and modification time of its file, and is sent only to workers that
    do not see that file. In other processes arrays are read-only memory maps, and other objects are
    unpickled once; the four most recently used objects larger than 64 MiB stay in memory. Handles
    and the cache are thread-safe.

    Examples
    --------
    >>> import pickle
    >>> import numpy as np
    >>> array = np.zeros(1_000_000)
    >>> handle = Spooled(array)
    >>> handle.get() is array
    True
    >>> len(pickle.dumps(handle)) < 1000
    True
    """

    __slots__ = ("__weakref__", "_location", "_mapped", "_object", "_storing", "token")

    token: str

    def __init__(self, obj: Any, token: str | None = None) -> None:
        self._object = obj
        mapped = memmap_location(obj)
        # Of the file as it is now: workers must not map what is written there later.
        self._mapped = None if mapped is None else (mapped, file_version(mapped[0]))
        self._location: _Location | None = None
        self._storing = threading.Lock()
        self.token = fingerprint(obj) if token is None else token
        with _lock:
            _live[self.token] = self

    def get(self) -> Any:
        """Return the object itself where it was created, and a cached copy in other processes.

        Raises
        ------
        FileNotFoundError
            If this process neither sees the file nor gets a copy of it; the message names the host.
        """
        if self._location is not None and self._object is _ABSENT:
            return _opened(self.token, self._location)
        return self._object

    def __dask_tokenize__(self) -> tuple[str, str]:
        return type(self).__name__, self.token

    def __repr__(self) -> str:
        return f"Spooled({self.token[:16]})"

    def __reduce__(self) -> tuple[Callable[..., Spooled], tuple[str, _Location]]:
        if self._object is not _ABSENT:
            with self._storing:
                # The file may have gone: someone cleaned the folder, or TRAKDASK_SPOOL changed.
                if self._location is None or not _is_current(self._location):
                    self._location = self._stored()
            if self._location.file is not None:
                name = self._location.file.name
                # Not under a lock: this may wait for the scheduler, which unpickles handles.
                offer(name, functools.partial(_path_to_send, self.token, name))
        assert self._location is not None
        return _restore, (self.token, self._location)

    def _stored(self) -> _Location:
        name = hashlib.sha256(self.token.encode()).hexdigest()
        if self._mapped is not None:
            (path, *_), _ = self._mapped
            return _Location(mapped=self._mapped, file=SpoolFile(f"{name}.npy", path))
        return _store(self._object, name)


_ABSENT = object()


def _restore(token: str, location: _Location) -> Spooled:
    with _lock:
        if (live := _live.get(token)) is not None:
            return live
        handle = Spooled(_ABSENT, token)
        handle._location = location
        return handle


class SpooledFile:
    """Refer to a file that exists already, at a path or URL, so that any process can read it.

    Parameters
    ----------
    place
        Absolute path, or a URL that fsspec knows.
    token
        Identifies the content, as a file name without suffix. Readers compare what they read with
        what they expect, since the file may change.
    """

    def __init__(self, place: str, token: str) -> None:
        name = f"{token}{Path(place).suffix}"
        is_url = "://" in place
        self.place = place
        self._file = SpoolFile(name, "" if is_url else place, url=place if is_url else None)

    def paths(self) -> Iterator[str]:
        """Yield paths to read in this order until the content is the expected one.

        The path itself comes first if it exists here, then that of a copy from the process that
        created this handle: another host may have another file at the same path.

        Raises
        ------
        FileNotFoundError
            If there is neither; the message names the host.
        """
        is_here = os.path.exists(self._file.path)
        if is_here:
            yield self._file.path
        try:
            copy = fetched(self._file)
        except FileNotFoundError:
            if not is_here:
                raise
        else:
            yield copy
            os.unlink(copy)  # who asks for more expected something else

    def __reduce__(self) -> tuple[Callable[..., SpooledFile], tuple[str, SpoolFile]]:
        file = self._file
        if file.path and os.path.exists(file.path):
            offer(file.name, functools.partial(str, file.path))
            file = uploaded(file) if file.url is None else file
        return _restore_file, (self.place, file)


def _restore_file(place: str, file: SpoolFile) -> SpooledFile:
    handle = SpooledFile.__new__(SpooledFile)
    handle.place, handle._file = place, file
    return handle


# ----------------------------------------------------------------------------------------- writing


def _is_current(location: _Location) -> bool:
    return location.mapped is not None or location.file is None or is_current(location.file)


def _store(obj: Any, name: str) -> _Location:
    if is_plain_array(obj) and obj.nbytes > INLINE_BYTES:
        return _Location(file=uploaded(_write_array(obj, f"{name}.npy")))
    path = spool_folder() / f"{name}.pkl"
    write_once(path, functools.partial(_pickle_into, obj))
    size = path.stat().st_size
    if size > INLINE_BYTES:
        return _Location(file=uploaded(SpoolFile(path.name, str(path), size)))
    return _Location(inline=path.read_bytes())


def _write_array(array: np.ndarray[Any, Any], name: str) -> SpoolFile:
    path = spool_folder() / name
    write_once(path, lambda file: np.save(file, array, allow_pickle=False))
    return SpoolFile(name, str(path), path.stat().st_size)


def _pickle_into(obj: Any, file: IO[bytes]) -> None:
    try:
        cloudpickle.dump(obj, file)
    except Exception as err:
        raise unpicklable(obj, err) from err


def _path_to_send(token: str, name: str) -> str:
    """Return the path of a spool file for a worker; that of a memory map is written only now."""
    path = spool_folder() / name
    if not path.exists() and (live := _live.get(token)) is not None:
        if live._mapped is not None:
            (mapped, *_), version = live._mapped
            if file_version(mapped) != version:
                raise OSError(f"{mapped} was changed since it was memory-mapped")
        if name.endswith(".npy"):
            return _write_array(live.get(), name).path
        write_once(path, functools.partial(_pickle_into, live.get()))
    return str(path)


# ----------------------------------------------------------------------------------------- reading

_opened_small: OrderedDict[str, Any] = OrderedDict()
_opened_large: OrderedDict[str, Any] = OrderedDict()
_opening: weakref.WeakValueDictionary[str, _Turn] = weakref.WeakValueDictionary()


class _Turn:
    """A lock that can be held weakly: one for each object that is being opened."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def _opened(token: str, location: _Location) -> Any:
    """Open an object once, however many threads ask, and keep what was used last.

    While one is opened, others can be opened and handles unpickled: a worker's event loop does
    that, and it brings the file.
    """
    with _lock:
        turn = _opening.setdefault(token, _Turn())
    with turn.lock:
        for cache in (_opened_small, _opened_large):
            with _lock:
                if token in cache:
                    cache.move_to_end(token)
                    return cache[token]
        obj = _open(location)
        size = location.file.size if location.file is not None else None
        is_large = (size or 0) > LARGE_BYTES and not isinstance(obj, np.memmap)
        cache, most = (
            (_opened_large, _MAX_LARGE_CACHED) if is_large else (_opened_small, _MAX_SMALL_CACHED)
        )
        with _lock:
            cache[token] = obj
            while len(cache) > most:
                cache.popitem(last=False)
        return obj


def _open(location: _Location) -> Any:
    if location.inline is not None:
        return pickle.loads(location.inline)
    assert location.file is not None
    if location.mapped is not None:
        mapped, version = location.mapped
        if version is not None and file_version(mapped[0]) == version:
            return open_memmap(*mapped)
        return _open_array(fetched(location.file))
    path = local_path(location.file)
    return _open_array(path) if path.endswith(".npy") else _open_pickle(path)


def _open_array(path: str) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _open_pickle(path: str) -> Any:
    require_private(os.stat(os.path.dirname(path)), os.path.dirname(path))
    with open(path, "rb") as file:
        # The open file is checked, not the path, which may have been replaced in the meantime.
        require_private(os.fstat(file.fileno()), path)
        return pickle.load(file)
