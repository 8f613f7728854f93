"""One writer of a file at a time, on a disk of this machine or at a URL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from trakdask.errors import StoreBusyError
from trakdask.files import Folder
from trakdask.storage.lock import lock

__all__ = ["locked"]

_LOOKED_EVERY_S = 0.1


@contextmanager
def locked(folder: Folder, name: str, patience_s: float) -> Iterator[None]:
    """Keep others from writing a file during the block, after waiting for those who do.

    Raises
    ------
    StoreBusyError
        If another process keeps it locked for longer than the patience.
    OSError
        If the lock cannot be written.
    """
    with (_file if folder.is_local else _lease)(folder, name, patience_s):
        yield


@contextmanager
def _file(folder: Folder, name: str, patience_s: float) -> Iterator[None]:
    lock = Path(folder.url, f"{name}.lock")
    try:
        with FileLock(lock, timeout=patience_s):
            try:
                yield
            finally:
                with suppress(OSError):  # while it is held: waiting processes notice
                    lock.unlink()
    except Timeout as err:
        raise StoreBusyError(
            f"expected to be the only writer of {folder.url + '/' + name!r}, but another process "
            f"has kept it locked for {patience_s:g} s; try again"
        ) from err


@contextmanager
def _lease(folder: Folder, name: str, patience_s: float) -> Iterator[None]:
    """Hold a lease as those of stores: if its holder ends, others take it over."""
    deadline = time.monotonic() + patience_s
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock(folder / f"{name}.lock", "mark samples"))
                break
            except StoreBusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOKED_EVERY_S)
        yield
