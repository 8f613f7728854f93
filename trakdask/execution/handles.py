"""Send large objects to workers through a shared folder instead of through the task graph.

A :class:`Spooled` handle represents its object in tasks. In the process that created it, the handle
returns the object itself. Pickling the handle writes the object to the spool folder, once per
content, and sends only the path; another process loads the object on first use and caches it.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import pickle
import shutil
import socket
import stat
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import cloudpickle
import numpy as np

from trakdask.execution.fingerprints import fingerprint, unpicklable
from trakdask.execution.memory_maps import is_plain_array, memmap_location, open_memmap
from trakdask.files import Folder

__all__ = ["SPOOL_VARIABLE", "Spooled", "spool_folder"]

SPOOL_VARIABLE = "TRAKDASK_SPOOL"
"""Environment variable that names the spool folder."""

INLINE_BYTES = 16 * 1024
"""Objects whose pickle is at most this large are sent inside the handle, without a folder."""

LARGE_BYTES = 64 * 1024**2
_MAX_LARGE_CACHED = 4
_MAX_SMALL_CACHED = 1024

_Location = tuple[Callable[..., Any], tuple[Any, ...], int]
"""How another process opens the object: a function, its arguments, and the size in bytes."""

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
    The folder is ``$TRAKDASK_SPOOL``, which all workers must be able to read. If the variable is
    not set, it is a temporary folder that is removed when this process exits; that suffices for
    workers on this machine. Files in a folder that you named remain there and are reused. Anyone
    who can write to the folder can run code in the workers. Therefore a new folder is accessible to
    its owner only, a folder that others can write to is rejected, and files of other users (except
    root) are never unpickled.

    Cost: one hash of the content on creation and one write when first pickled. Objects of up to
    16 kB are sent inside the handle. A read-only ``np.memmap`` is neither read nor written: it is
    identified by the path, size and modification time of its file, which the workers must be able
    to read. In other processes arrays are read-only memory maps, and other objects are unpickled
    once; the four most recently used objects larger than 64 MiB stay in memory. Handles and the
    cache are thread-safe.

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

    __slots__ = ("__weakref__", "_location", "_object", "token")

    token: str

    def __init__(self, obj: Any, token: str | None = None) -> None:
        self._object = obj
        self._location: _Location | None = None
        self.token = fingerprint(obj) if token is None else token
        with _lock:
            _live[self.token] = self

    def get(self) -> Any:
        """Return the object itself where it was created, and a cached copy in other processes.

        Raises
        ------
        FileNotFoundError
            If this process cannot see the spool folder of the process that wrote the object.
        """
        if self._location is not None and self._object is _ABSENT:
            return _opened(self.token, self._location)
        return self._object

    def __dask_tokenize__(self) -> tuple[str, str]:
        return type(self).__name__, self.token

    def __repr__(self) -> str:
        return f"Spooled({self.token[:16]})"

    def __reduce__(self) -> tuple[Callable[..., Spooled], tuple[str, _Location]]:
        with _lock:
            # The file may have gone: someone cleaned the folder, or TRAKDASK_SPOOL changed.
            if self._object is not _ABSENT and not _is_in_folder(self._location):
                self._location = _store(self._object, self.token)
            assert self._location is not None
            return _restore, (self.token, self._location)


_ABSENT = object()


def _restore(token: str, location: _Location) -> Spooled:
    with _lock:
        if (live := _live.get(token)) is not None:
            return live
        handle = Spooled(_ABSENT, token)
        handle._location = location
        return handle


# ----------------------------------------------------------------------------------------- writing


def spool_folder() -> Path:
    """Return the folder that this process spools to, creating it if it does not exist.

    Returns
    -------
    ``$TRAKDASK_SPOOL``, or a temporary folder that is removed when this process exits.

    Raises
    ------
    PermissionError
        If others can write to the named folder, and so could run code in the workers.
    NotADirectoryError
        If the path is a file.
    """
    if named := os.environ.get(SPOOL_VARIABLE):
        folder = Path(named).absolute()
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(
                f"expected a folder in {SPOOL_VARIABLE}, got the file {str(folder)!r}; try the "
                "path of a folder"
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(os.stat(folder), str(folder))
        return folder
    return _temporary_folder(os.getpid())


@functools.cache
def _temporary_folder(pid: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="trakdask-spool-"))
    atexit.register(_remove_folder, folder, pid)
    return folder


def _remove_folder(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child also runs its parent's exit functions
        shutil.rmtree(folder, ignore_errors=True)


def _is_in_folder(location: _Location | None) -> bool:
    if location is None:
        return False
    opener, args, _ = location
    if opener in (_open_array, _open_pickle):
        return Path(args[0]).parent == spool_folder() and os.path.exists(args[0])
    return True


def _store(obj: Any, token: str) -> _Location:
    if (location := memmap_location(obj)) is not None:
        return open_memmap, location, 0
    stem = spool_folder() / hashlib.sha256(token.encode()).hexdigest()
    if is_plain_array(obj) and obj.nbytes > INLINE_BYTES:
        path = stem.with_suffix(".npy")
        _write_once(path, lambda file: np.save(file, obj, allow_pickle=False))
        return _open_array, (str(path),), 0
    path = stem.with_suffix(".pkl")
    _write_once(path, functools.partial(_pickle_into, obj))
    size = path.stat().st_size
    if size > INLINE_BYTES:
        return _open_pickle, (str(path),), size
    inline = path.read_bytes()
    return pickle.loads, (inline,), size


def _write_once(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    if path.exists():
        return
    is_temporary = SPOOL_VARIABLE not in os.environ
    folder = Folder(str(path.parent))
    with folder.writing(path.name, mode=0o600, durable=not is_temporary) as file:
        write(file)


def _pickle_into(obj: Any, file: Any) -> None:
    try:
        cloudpickle.dump(obj, file)
    except Exception as err:
        raise unpicklable(obj, err) from err


# ----------------------------------------------------------------------------------------- reading

_opened_small: OrderedDict[str, Any] = OrderedDict()
_opened_large: OrderedDict[str, Any] = OrderedDict()


def _opened(token: str, location: _Location) -> Any:
    opener, args, size = location
    large = size > LARGE_BYTES
    cache, limit = (
        (_opened_large, _MAX_LARGE_CACHED) if large else (_opened_small, _MAX_SMALL_CACHED)
    )
    with _lock:  # held while opening, so that two threads do not both load a large object
        if token not in cache:
            cache[token] = _open(opener, args)
        cache.move_to_end(token)
        while len(cache) > limit:
            cache.popitem(last=False)
        return cache[token]


def _open(opener: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return opener(*args)
    except FileNotFoundError as err:
        if err.filename is None or str(err.filename) != args[0]:
            raise  # the object itself raised it while it was unpickled
        raise FileNotFoundError(
            "expected a file that the process which built the graph wrote or memory-mapped, got no "
            f"file {args[0]} on host {socket.gethostname()}; try setting {SPOOL_VARIABLE} to a "
            "folder that all workers can read (memory-mapped files must be on such a disk, too), "
            "and building the graph again"
        ) from err


def _open_array(path: str) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _open_pickle(path: str) -> Any:
    _require_private(os.stat(os.path.dirname(path)), os.path.dirname(path))
    with open(path, "rb") as file:
        # The open file is checked, not the path, which may have been replaced in the meantime.
        _require_private(os.fstat(file.fileno()), path)
        return pickle.load(file)


def _require_private(status: os.stat_result, path: str) -> None:
    """Reject a file or folder that others could have written: unpickling would run their code."""
    if not hasattr(os, "getuid"):  # not POSIX
        return
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if status.st_uid not in (os.getuid(), 0) or others:
        raise PermissionError(
            f"expected a spool that only user {os.getuid()} can write to, got {path!r} of user "
            f"{status.st_uid} with the mode {stat.S_IMODE(status.st_mode):o} (its files are "
            "unpickled, so anyone who can write there could run code in this process); try "
            f"chmod go-w, or setting {SPOOL_VARIABLE} to a folder of your own, with workers that "
            "run as the same user"
        )
