"""One writer at a time: a file that says who it is, and that it still lives."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

import psutil

from trakdask.errors import StoreBusyError
from trakdask.files import Folder

# Eight renewals have to fail until a writer on another host is taken for dead.
_RENEWED_EVERY_S = 15.0
_EXPIRES_AFTER_S = 120.0

_log = logging.getLogger(__name__)


@contextmanager
def lock(folder: Folder, purpose: str, name: str = "lock") -> Iterator[Callable[[], None]]:
    """Be the only writer of a folder during the block, or be refused.

    The file ``name`` is created only if there is none. One whose process is dead, if it ran on this
    host, or that was not renewed for two minutes, if it ran elsewhere, is removed first.

    Yields
    ------
    A function that raises if the lock was taken away meanwhile; to be called before a commit.

    Raises
    ------
    StoreBusyError
        If another process holds it.
    """
    process = psutil.Process()
    ours = {
        "host": socket.gethostname(),
        "process": process.pid,
        "process_started": process.create_time(),
        "since": time.time(),
        "purpose": purpose,
        "token": uuid4().hex,
    }
    if (holder := _read(folder, name)) and _is_free(holder):
        _log.warning("%s is dead: its lock of %s is removed", _who(holder), folder.url)
        folder.remove(name)
    # Two processes may come to this point at once, and one may remove what the other has just
    # created: that one finds out before it commits.
    try:
        # Fails if the file is there, unlike a look and then a write.
        folder.create(name, _encoded(ours))
    except FileExistsError:
        holder = _read(folder, name)
        if holder.get("token") != ours["token"]:  # else a network lost the answer
            raise StoreBusyError(
                f"expected to be the only writer of {folder.url!r}, which is being written by "
                f"{_who(holder)}; try again when it is done, or delete {folder.url}/{name} if it "
                "is dead"
            ) from None
    stop = threading.Event()
    renewer = threading.Thread(target=_renew, args=(folder, name, ours, stop), daemon=True)
    renewer.start()

    def require_held() -> None:
        if (holder := _read(folder, name)).get("token") != ours["token"]:
            raise StoreBusyError(
                f"expected to be the only writer of {folder.url!r}, but its lock was taken away by "
                f"{_who(holder)}; try again when that is done"
            )

    try:
        yield require_held
    finally:
        stop.set()
        renewer.join()
        with suppress(OSError, StoreBusyError):  # a full disk must not hide what happened before
            # Never the lock of whoever took this one away.
            require_held()
            folder.remove(name)


def _encoded(holder: dict[str, Any]) -> bytes:
    return json.dumps({**holder, "renewed": time.time()}).encode()


def _read(folder: Folder, name: str) -> dict[str, Any]:
    """Return who holds the lock; empty if nobody does."""
    try:
        holder: dict[str, Any] = folder.read_json(name)
    except FileNotFoundError:
        return {}
    except ValueError as err:  # whatever it is, somebody means something by it
        return {"purpose": f"a lock that cannot be read: {err}"}
    return holder


def _is_free(holder: dict[str, Any]) -> bool:
    """Return whether who holds a lock is dead, or, on another host, was not heard of for long."""
    if holder.get("host") != socket.gethostname():
        return time.time() > float(holder.get("renewed", "inf")) + _EXPIRES_AFTER_S
    try:
        process = psutil.Process(holder["process"])
        # Another process may have the number of a dead one by now, and a killed process is a
        # zombie until its parent asks.
        is_other = abs(process.create_time() - holder["process_started"]) > 1
        return bool(is_other or process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _who(holder: dict[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("since", 0)))
    return (
        f"process {holder.get('process', '?')} on {holder.get('host', '?')} "
        f"({holder.get('purpose', '?')}, since {since})"
    )


def _renew(folder: Folder, name: str, ours: dict[str, Any], stop: threading.Event) -> None:
    while not stop.wait(_RENEWED_EVERY_S):
        try:
            if _read(folder, name).get("token") != ours["token"]:
                return  # taken away: whoever commits will notice
            folder.write(name, _encoded(ours))
        except OSError as err:
            _log.warning("could not renew the lock of %s: %s", folder.url, err)
