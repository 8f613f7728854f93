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
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from trakdask.errors import StoreBusyError
from trakdask.files import Folder, explained
from trakdask.storage.parts import LEASE, RECORDS

__all__ = ["lease"]

_RENEWED_EVERY_S = 15.0
_EXPIRES_AFTER_S = 120.0
_WATCHED_FOR_S = 2 * _RENEWED_EVERY_S

_log = logging.getLogger(__name__)


@contextmanager
def lease(folder: Folder, purpose: str) -> Iterator[None]:
    """Hold the lease of a store during the block, or be refused.

    The lease is a file ``records/lease-<n>.json``, created if absent. Who finds only an expired
    ``n`` creates ``n + 1``: of several, one succeeds. Who then sees another alive withdraws.

    No clock that can be set decides. A holder on this machine is alive as long as its process is,
    which is known by its number and its start in ticks since the machine booted. A holder on
    another machine that seems to have expired, by the clocks of the two, is watched for half a
    minute: it is alive if it renews its lease meanwhile.

    Raises
    ------
    StoreBusyError
        If another process holds it, or a lease cannot be read; and at the end, if it was taken away
        meanwhile.
    ValueError
        If there are symbolic links in the store: nothing is written through them.
    """
    folder.require_no_links()
    held = _acquire(folder, purpose)
    stop = threading.Event()
    renewer = threading.Thread(target=_renew, args=(folder, held, stop), daemon=True)
    renewer.start()
    try:
        yield
        _require_held(folder, held)
    finally:
        stop.set()
        renewer.join()
        with suppress(OSError):  # a full or vanished disk must not hide what happened before
            folder.remove(f"{RECORDS}/{held.name}")


@dataclass(frozen=True)
class _Held:
    name: str
    content: dict[str, Any]

    def encoded(self) -> bytes:
        return json.dumps({**self.content, "renewed": time.time()}).encode()


def _acquire(folder: Folder, purpose: str) -> _Held:
    before = _leases(folder)
    _require_free(folder, before)
    _watch(folder, before)
    number = max(map(_number, before), default=0) + 1
    held = _Held(f"{LEASE}{number}.json", _self(purpose))
    try:
        folder.create(f"{RECORDS}/{held.name}", held.encoded())
    except FileExistsError:
        now = _leases(folder)
        if now.get(held.name, {}).get("token") != held.content["token"]:
            _require_free(folder, now)
            raise StoreBusyError(
                f"expected to be the only writer of the store {folder.url!r}, but another process "
                "began to write at the same time; try again"
            ) from None
    except OSError as err:
        text = (
            f"expected to write to the store {folder.url!r}, but it cannot be written "
            f"({type(err).__name__}: {err}); try again when the cause is gone, or another folder"
        )
        raise explained(err, text) from err
    others = {name: holder for name, holder in _leases(folder).items() if name != held.name}
    try:
        _require_free(folder, others)
    except StoreBusyError:
        folder.remove(f"{RECORDS}/{held.name}")
        raise
    for name in others:
        _log.warning("the lease of %s has expired: taking over", _who(others[name]))
        folder.remove(f"{RECORDS}/{name}")
    return held


def _self(purpose: str) -> dict[str, Any]:
    process = psutil.Process()
    return {
        "token": uuid4().hex,
        "user": getpass.getuser() if "USER" in os.environ else "",
        "host": socket.gethostname(),
        "namespace": _namespace(),
        "boot": _boot(),
        "pid": process.pid,
        "process_started": _started(process.pid),
        "since": time.time(),
        "purpose": purpose,
    }


def _leases(folder: Folder) -> dict[str, dict[str, Any]]:
    leases = {}
    for name in (folder / RECORDS).names():
        if name.startswith(LEASE):
            with suppress(FileNotFoundError):  # given back since it was listed
                leases[name] = _parsed(folder, name)
    return leases


def _parsed(folder: Folder, name: str) -> dict[str, Any]:
    """Read a lease, or say what to do with a file that is not one."""
    data = folder.read(f"{RECORDS}/{name}")
    try:
        holder = json.loads(data)
        _number(name)
        float(holder["renewed"])
        return dict(holder)
    except (ValueError, TypeError, KeyError):
        raise StoreBusyError(
            f"expected a lease in {folder.url}/{RECORDS}/{name}, got {data[:40]!r}, which does not "
            "say who writes the store; try deleting that file if nobody does"
        ) from None


def _number(name: str) -> int:
    return int(name[len(LEASE) :].removesuffix(".json"))


def _require_free(folder: Folder, leases: dict[str, dict[str, Any]]) -> None:
    for name, holder in leases.items():
        if _is_alive(holder):
            raise StoreBusyError(_busy(folder, name, holder))


def _busy(folder: Folder, name: str, holder: dict[str, Any]) -> str:
    left = max(float(holder["renewed"]) + _EXPIRES_AFTER_S - time.time(), 0)
    wait = "" if _is_here(holder) else f"wait {left:.0f} s or "
    return (
        f"expected to be the only writer of the store {folder.url!r}, which is being written by "
        f"{_who(holder)}; try again when it is done, or end it; if it is dead, {wait}delete "
        f"{folder.url}/{RECORDS}/{name}"
    )


def _watch(folder: Folder, leases: dict[str, dict[str, Any]]) -> None:
    """Raise if one of the leases, which seem to have expired, is renewed while we look.

    The clocks of two machines may differ, and may be set: what is watched needs neither.
    """
    elsewhere = {name: holder for name, holder in leases.items() if not _is_here(holder)}
    deadline = time.monotonic() + _WATCHED_FOR_S
    if elsewhere:
        _log.warning(
            "the lease of %s seems to have expired: watching it for %.0f s",
            ", ".join(map(_who, elsewhere.values())), _WATCHED_FOR_S,
        )  # fmt: skip
    while elsewhere and time.monotonic() < deadline:
        time.sleep(_WATCHED_FOR_S / 30)
        now = _leases(folder)
        for name in list(elsewhere):
            if name not in now:
                del elsewhere[name]
            elif now[name] != elsewhere[name]:
                raise StoreBusyError(_busy(folder, name, now[name]))


def _is_alive(holder: dict[str, Any]) -> bool:
    """Return whether the holder lives: asked of this machine, else by when it last renewed."""
    if _is_here(holder):
        return _process_lives(holder)
    return time.time() < float(holder["renewed"]) + _EXPIRES_AFTER_S


def _is_here(holder: dict[str, Any]) -> bool:
    """Return whether the holder runs on this machine, and counts processes as we do.

    Machines may share a name; after a reboot, this one counts as another.
    """
    here = (socket.gethostname(), _namespace(), _boot())
    return (holder.get("host"), holder.get("namespace"), holder.get("boot")) == here


def _namespace() -> int:
    """Tell containers apart that share a host name: each counts its own processes."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def _boot() -> str:
    """Return what tells this start of the machine from all others; "" where it has no name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _process_lives(holder: dict[str, Any]) -> bool:
    try:
        pid = int(holder["pid"])
        ended = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return not ended and _started(pid) == holder["process_started"]
    except (psutil.NoSuchProcess, KeyError, ValueError, TypeError):
        return False


def _started(pid: int) -> str:
    """Return when a process started: not by the clock, which may be set while it runs.

    Raises
    ------
    psutil.NoSuchProcess
        If there is none.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:  # no such process; or not Linux, where no clock can change this:
        return str(psutil.Process(pid).create_time())
    # The command, in parentheses, may contain anything. The 22nd field is in ticks since the boot.
    return f"tick {status.rpartition(')')[2].split()[19]}"


def _who(holder: dict[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(holder.get("since", 0))))
    user = f"{holder['user']} in " if holder.get("user") else ""
    return (
        f"{user}process {holder.get('pid', '?')} on {holder.get('host', '?')} "
        f"({holder.get('purpose', '?')}, since {since})"
    )


def _renew(folder: Folder, held: _Held, stop: threading.Event) -> None:
    while not stop.wait(_RENEWED_EVERY_S):
        try:
            if held.name not in (folder / RECORDS).names():
                return  # taken away: `lease` will say so
            folder.write(f"{RECORDS}/{held.name}", held.encoded())
        except OSError as err:
            _log.warning("could not renew the lease of %s: %s", folder.url, err)


def _require_held(folder: Folder, held: _Held) -> None:
    leases = _leases(folder)
    if leases.get(held.name, {}).get("token") != held.content["token"] or len(leases) > 1:
        now = ", ".join(_who(each) for name, each in leases.items() if name != held.name)
        raise StoreBusyError(
            f"expected to be the only writer of the store {folder.url!r}, but its lease was taken "
            f"away meanwhile{f', by {now}' if now else ''}; try td.verify(store, checksums=True) "
            "once the other is done"
        )
