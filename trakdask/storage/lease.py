"""One writer at a time: a lease file with who holds it, renewed while they live."""

from __future__ import annotations

import getpass
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import psutil

from trakdask.errors import StoreBusyError
from trakdask.storage.piece import RECORDS
from trakdask.storage.place import Place, explained

__all__ = ["PREFIX", "lease"]

PREFIX = "lease-"
_RENEWED_EVERY_S = 15.0
_EXPIRES_AFTER_S = 120.0

_log = logging.getLogger(__name__)


@contextmanager
def lease(place: Place, purpose: str) -> Iterator[None]:
    """Hold the lease of a store during the block, or be refused.

    The lease is a file ``records/lease-<n>.json``, created if absent. Who finds only an expired
    ``n`` creates ``n + 1``: of several, one succeeds. Who then sees another alive withdraws.

    Raises
    ------
    StoreBusyError
        If another process holds it; and at the end, if it was taken away meanwhile.
    """
    held = _acquire(place, purpose)
    stop = threading.Event()
    renewer = threading.Thread(target=_renew, args=(place, held, stop), daemon=True)
    renewer.start()
    try:
        yield
        _require_held(place, held)
    finally:
        stop.set()
        renewer.join()
        with suppress(OSError):  # a full or vanished disk must not hide what happened before
            place.remove(f"{RECORDS}/{held.name}")


@dataclass(frozen=True)
class _Held:
    name: str
    content: dict[str, Any]

    def encoded(self) -> bytes:
        return json.dumps({**self.content, "renewed": time.time()}).encode()


def _acquire(place: Place, purpose: str) -> _Held:
    before = _leases(place)
    _refuse_if_held(place, before)
    number = max((int(name[len(PREFIX) : -len(".json")]) for name in before), default=0) + 1
    held = _Held(f"{PREFIX}{number}.json", _self(purpose))
    try:
        place.create(f"{RECORDS}/{held.name}", held.encoded())
    except FileExistsError:
        now = _leases(place)
        if now.get(held.name, {}).get("token") != held.content["token"]:
            _refuse_if_held(place, now)
            raise StoreBusyError(f"another took the store {place.url!r}. Try again.") from None
    except OSError as err:
        text = (
            f"the store {place.url!r} cannot be written ({type(err).__name__}: {err}); needed to "
            "write there. Mend the cause, or choose another folder."
        )
        raise explained(err, text) from err
    others = {name: found for name, found in _leases(place).items() if name != held.name}
    try:
        _refuse_if_held(place, others)
    except StoreBusyError:
        place.remove(f"{RECORDS}/{held.name}")
        raise
    for name in others:
        _log.warning("the lease of %s has expired: taking over", _who(others[name]))
        place.remove(f"{RECORDS}/{name}")
    return held


def _self(purpose: str) -> dict[str, Any]:
    process = psutil.Process()
    return {
        "token": uuid4().hex,
        "user": getpass.getuser() if "USER" in os.environ else "",
        "host": socket.gethostname(),
        "namespace": _namespace(),
        "pid": process.pid,
        "process_started": process.create_time(),
        "since": time.time(),
        "purpose": purpose,
    }


def _leases(place: Place) -> dict[str, dict[str, Any]]:
    found = {}
    for name in (place / RECORDS).names():
        if name.startswith(PREFIX) and name.endswith(".json"):
            with suppress(FileNotFoundError):  # given back since it was listed
                found[name] = _parsed(place.read(f"{RECORDS}/{name}"))
    return found


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except ValueError:  # torn by a file system without atomic writes; its writer is long gone
        return {}


def _refuse_if_held(place: Place, leases: dict[str, dict[str, Any]]) -> None:
    for name, found in leases.items():
        if _is_alive(found):
            left = found["renewed"] + _EXPIRES_AFTER_S - time.time()
            raise StoreBusyError(
                f"the store {place.url!r} is being written by {_who(found)}; needed to be the only "
                f"writer. Wait for it, or end it; if it is dead, wait {max(left, 0):.0f} s or "
                f"delete {place.url}/{RECORDS}/{name}."
            )


def _is_alive(found: dict[str, Any]) -> bool:
    """Return whether the holder lives: asked of this machine, else by when it last renewed."""
    here = (socket.gethostname(), _namespace())
    if (found.get("host"), found.get("namespace")) == here and not _process_lives(found):
        return False
    return time.time() < float(found.get("renewed", 0)) + _EXPIRES_AFTER_S


def _namespace() -> int:
    """Tell containers apart that share a host name: each counts its own processes."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def _process_lives(found: dict[str, Any]) -> bool:
    try:
        started = psutil.Process(int(found["pid"])).create_time()
    except (psutil.NoSuchProcess, KeyError, ValueError):
        return False
    return bool(abs(started - float(found["process_started"])) < 1)


def _who(found: dict[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(found.get("since", 0))))
    user = f"{found['user']} in " if found.get("user") else ""
    return (
        f"{user}process {found.get('pid', '?')} on {found.get('host', '?')} "
        f"({found.get('purpose', '?')}, since {since})"
    )


def _renew(place: Place, held: _Held, stop: threading.Event) -> None:
    while not stop.wait(_RENEWED_EVERY_S):
        try:
            if held.name not in (place / RECORDS).names():
                return  # taken away: `lease` will say so
            place.write(f"{RECORDS}/{held.name}", held.encoded())
        except OSError as err:
            _log.warning("could not renew the lease of %s: %s", place.url, err)


def _require_held(place: Place, held: _Held) -> None:
    found = _leases(place)
    if found.get(held.name, {}).get("token") != held.content["token"] or len(found) > 1:
        now = ", ".join(_who(each) for name, each in found.items() if name != held.name)
        raise StoreBusyError(
            f"the lease of the store {place.url!r} was taken away while this process wrote"
            f"{f', by {now}' if now else ''}; needed to be the only writer. Look at the store with "
            "td.verify(store, checksums=True) once the other is done."
        )
