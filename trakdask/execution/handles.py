"""Driver-side objects that reach workers through a folder instead of through the task graph.

A :class:`Spooled` handle stands for its object in tasks. Inside the process that made it, it gives
back the very object. Pickling the handle writes the object to the spool folder, once per content,
and sends the path; another process opens it when it is first asked for, and keeps it.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import io
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
from typing import Any

import cloudpickle
import numpy as np

from trakdask.execution.fingerprints import fingerprint, unpicklable
from trakdask.execution.memory_maps import is_plain_array, memmap_place, open_memmap

__all__ = ["SPOOL_VARIABLE", "Spooled", "spool_folder"]

SPOOL_VARIABLE = "TRAKDASK_SPOOL"
"""Environment variable that names the spool folder."""

INLINE_BYTES = 16 * 1024
"""An object that pickles to at most this travels in the handle: no shared folder is needed."""

LARGE_BYTES = 64 * 1024**2
_LARGE_KEPT = 4
_SMALL_KEPT = 1024

_Location = tuple[Callable[..., Any], tuple[Any, ...], int]
"""How to open an object in another process: a function, its arguments, the bytes it occupies."""

_lock = threading.RLock()
_live: weakref.WeakValueDictionary[str, Spooled] = weakref.WeakValueDictionary()


class Spooled:
    """Hold an object so that its handle can be pickled without it.

    Parameters
    ----------
    obj
        What tasks need: a numpy array, a torch dataset or module, a callable. It is held, not
        copied: do not change it afterwards.
    token
        Name of the content. Objects with equal tokens must be interchangeable. Without it, the
        content is hashed (:func:`fingerprint`).

    Raises
    ------
    TypeError
        If no token is given and the object cannot be pickled.

    Notes
    -----
    The folder is ``$TRAKDASK_SPOOL``, which all workers must see, or a temporary one of this
    process that is removed at its exit: enough for workers on this machine. Files of a folder that
    was named stay, and are used again. Whoever can write there can run code in the workers: so it
    is made for its owner alone, one that others can write to is refused, and nothing is unpickled
    that belongs to another user (but root).

    Cost: one hash of the content now; one write at the first pickling. Contents up to 16 kB
    travel in the handle. A read-only ``np.memmap`` is neither read nor written: its file is named
    by path, size and modification time, and must be seen by the workers. In other processes arrays
    are memory maps (read-only) and other objects are unpickled once; the last four larger
    than 64 MiB are kept. Handles and the cache may be used from any thread.

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
        """Return the object: itself where it was made, a copy kept by the process elsewhere.

        Raises
        ------
        FileNotFoundError
            If this process does not see the spool folder of the process that wrote the object.
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
            # The file may be gone: a named folder is swept, or its name was changed.
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
    """Return the folder that this process spools to, made if it is missing.

    Returns
    -------
    ``$TRAKDASK_SPOOL``, or a temporary folder of this process, removed at its exit.

    Raises
    ------
    PermissionError
        If others can write to the folder that was named, and so run code in the workers.
    NotADirectoryError
        If it is a file.
    """
    if named := os.environ.get(SPOOL_VARIABLE):
        folder = Path(named).absolute()
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(
                f"expected a folder in {SPOOL_VARIABLE}, got the file {str(folder)!r}; try another"
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
    if os.getpid() == pid:  # a forked child runs its parent's exit functions
        shutil.rmtree(folder, ignore_errors=True)


def _is_in_folder(location: _Location | None) -> bool:
    if location is None:
        return False
    opener, args, _ = location
    if opener in (_open_array, _open_pickle):
        return Path(args[0]).parent == spool_folder() and os.path.exists(args[0])
    return True


def _store(obj: Any, token: str) -> _Location:
    if (place := memmap_place(obj)) is not None:
        return open_memmap, place, 0
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


def _write_once(path: Path, write: Callable[[io.BufferedWriter], None]) -> None:
    if path.exists():
        return
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    try:
        with open(descriptor, "wb") as file:
            write(file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


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
    cache, kept = (_opened_large, _LARGE_KEPT) if large else (_opened_small, _SMALL_KEPT)
    with _lock:  # held while opening: two threads must not both load a large object
        if token not in cache:
            cache[token] = _open(opener, args)
        cache.move_to_end(token)
        while len(cache) > kept:
            cache.popitem(last=False)
        return cache[token]


def _open(opener: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return opener(*args)
    except FileNotFoundError as err:
        if err.filename is None or str(err.filename) != args[0]:
            raise  # raised by the object itself, while it was unpickled
        raise FileNotFoundError(
            f"{args[0]} is not there on host {socket.gethostname()}; needed the file that the "
            f"process which built the graph wrote or mapped. Set {SPOOL_VARIABLE} to a folder that "
            "all workers see (and keep memory-mapped files on such a disk), then build the graph "
            "again."
        ) from err


def _open_array(path: str) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _open_pickle(path: str) -> Any:
    _require_private(os.stat(os.path.dirname(path)), os.path.dirname(path))
    with open(path, "rb") as file:
        _require_private(os.fstat(file.fileno()), path)  # of what is read, whatever its name is now
        return pickle.load(file)


def _require_private(status: os.stat_result, path: str) -> None:
    """Refuse what others could have written: unpickling it would run their code."""
    if not hasattr(os, "getuid"):  # not POSIX
        return
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if status.st_uid not in (os.getuid(), 0) or others:
        raise PermissionError(
            f"expected a spool that only user {os.getuid()} can write to, got {path!r} of user "
            f"{status.st_uid} with the mode {stat.S_IMODE(status.st_mode):o}: what is there is "
            f"unpickled, so whoever writes it runs code here. Try chmod go-w, or {SPOOL_VARIABLE} "
            "as a folder of your own, with workers of the same user"
        )
