"""Send files to workers through the scheduler, for workers that do not see the driver's disk.

A worker asks the scheduler for a file by name. If the scheduler does not have it, it asks all
clients; the one that wrote the file sends it, once. The scheduler keeps it on its disk, for workers
that ask later, so that no death of a worker loses it. Nothing is sent until somebody asks.

Clients register while they pickle a graph, under a lock that their event loop may be waiting for.
So nobody waits for the registration, and a worker may ask a little before the scheduler knows.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import time
import weakref
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast
from uuid import uuid4

from distributed import Client, Scheduler, SchedulerPlugin, get_worker
from distributed.utils import sync

from trakdask.execution.spool import COURIERS, OFFERS, spool_folder

__all__ = ["MAX_BYTES", "Delivery", "SpoolServer"]

MAX_BYTES = 8 * 1024**3
"""Larger files are not sent through the scheduler: they would fill its disk."""

_TOPIC = "trakdask-spool"
_CHUNK_BYTES = 16 * 1024**2
_PATIENCE_S = 60.0
"""How long a worker waits for the next bytes of a file before it gives up."""
_ARRIVAL_S = 5.0
"""How long it waits for the scheduler to know a client that sends files."""
_NAME = re.compile(r"[0-9a-z-]+\.[a-z]+")

_log = logging.getLogger(__name__)
_serving: weakref.WeakSet[Client] = weakref.WeakSet()
_running: set[asyncio.Future[None]] = set()
"""Kept here, because an event loop holds its tasks weakly."""


class Delivery:
    """The way through the scheduler, for the spool."""

    def offer(self) -> None:
        """Let all clients of this process send files to workers that ask for them."""
        for client in list(Client._instances):
            if client.status == "running" and client not in _serving:
                _serving.add(client)
                _serve(client)

    def fetch(self, name: str, target: IO[bytes]) -> None:
        """Copy a file of the process that built the graph, from within a task.

        Raises
        ------
        ValueError
            If this is not called in a task of a worker.
        OSError
            If the process that has the file has gone, or does not find it anymore.
        """
        try:
            worker = get_worker()
        except ValueError:
            raise ValueError("this process is not a worker of a distributed cluster") from None
        read = functools.partial(sync, worker.loop, worker.scheduler.trakdask_spool_read, name=name)
        target.seek(0)
        size, deadline = None, time.monotonic() + _ARRIVAL_S
        while size is None or target.tell() < size:
            answer = read(offset=target.tell())
            if answer is None:
                _wait_for_the_scheduler(deadline)
                continue
            size = answer["size"]
            target.write(answer["data"])
        target.truncate()

    def folder(self) -> Path | None:
        """Return a folder that is removed with the worker that runs this task; None in no task."""
        try:
            worker = get_worker()
        except ValueError:
            return None
        folder = Path(worker.local_directory) / "trakdask-spool"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder


def _wait_for_the_scheduler(deadline: float) -> None:
    """Wait a moment: as long as nobody has registered, the scheduler does not know the request."""
    if time.monotonic() > deadline:
        raise OSError("the scheduler takes no plugins, and so cannot hand out files")
    time.sleep(0.2)


# ----------------------------------------------------------------------------------- the scheduler


@dataclass
class _Upload:
    """A file that a client was asked for."""

    progress: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str = ""

    def report(self) -> None:
        self.progress.set()
        self.progress = asyncio.Event()


class SpoolServer(SchedulerPlugin):
    """The scheduler's part: it hands out files, and asks clients for those that it lacks."""

    name = "trakdask-spool"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Add the requests that this plugin answers."""
        self._scheduler = scheduler
        self._uploads: dict[str, _Upload] = {}
        self._senders: set[str] = set()
        self._arrived = asyncio.Event()
        scheduler.handlers["trakdask_spool_serve"] = self.serve
        scheduler.handlers["trakdask_spool_read"] = self.read
        scheduler.handlers["trakdask_spool_write"] = self.write

    async def serve(self, client: str) -> None:
        """Take note of a client that sends files when it is asked, and ask for what is missing."""
        self._senders.add(client)
        self._arrived.set()
        for name in self._uploads:
            self._scheduler.log_event(_TOPIC, name)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Let workers ask others for what this client was sending."""
        self._senders.discard(client)
        if not self._senders:
            self._arrived.clear()
        for upload in self._uploads.values():
            upload.report()
        self._uploads.clear()

    async def read(self, name: str, offset: int) -> dict[str, Any]:
        """Return a part of a file, once a client has sent the whole file."""
        path = _path(name)
        while not path.exists():
            await self._arrival()
            if name not in self._uploads:
                self._uploads[name] = _Upload()
                self._scheduler.log_event(_TOPIC, name)
            await self._progress(name, self._uploads[name])
        return await asyncio.to_thread(_read, path, offset)

    async def write(
        self, name: str, sender: str, offset: int = 0, data: bytes = b"", size: int = 0,
        failure: str = "",
    ) -> None:  # fmt: skip
        """Take a part of a file from a client, or the reason why it cannot send the file."""
        if not failure:
            await asyncio.to_thread(_append, _path(name), sender, offset, data, size)
        if (upload := self._uploads.get(name)) is not None:
            upload.failure = failure
            if failure or offset + len(data) == size:
                del self._uploads[name]
            upload.report()

    async def _arrival(self) -> None:
        """Wait for a client that sends files; one that computes something may be registering."""
        try:
            await asyncio.wait_for(self._arrived.wait(), _ARRIVAL_S)
        except TimeoutError:
            raise OSError("the process that built the graph has left the cluster") from None

    async def _progress(self, name: str, upload: _Upload) -> None:
        try:
            await asyncio.wait_for(upload.progress.wait(), _PATIENCE_S)
        except TimeoutError:
            self._uploads.pop(name, None)
            raise OSError(
                f"the process that built the graph did not send it within {_PATIENCE_S:g} seconds "
                "when the scheduler asked"
            ) from None
        if upload.failure:
            raise OSError(f"the process that built the graph cannot send it: {upload.failure}")


def _path(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ValueError(f"expected the name of a file in the spool, got {name!r}")
    return spool_folder() / name


def _read(path: Path, offset: int) -> dict[str, Any]:
    with path.open("rb") as file:
        file.seek(offset)
        return {"data": file.read(_CHUNK_BYTES), "size": os.fstat(file.fileno()).st_size}


def _append(path: Path, sender: str, offset: int, data: bytes, size: int) -> None:
    partial = path.with_name(f"{path.name}.{sender}.partial")
    with partial.open("r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(data)
    if offset + len(data) == size:
        partial.replace(path)


# -------------------------------------------------------------------------------------- the client


def _serve(client: Client) -> None:
    client.subscribe_topic(_TOPIC, functools.partial(_answer, weakref.ref(client)))
    cast(Any, client.loop).add_callback(lambda: _in_background(_register(client)))


async def _register(client: Client) -> None:
    try:
        await client.register_plugin(SpoolServer())
        await cast(Any, client.scheduler).trakdask_spool_serve(client=client.id)
    except Exception as err:  # a scheduler that takes no plugins: workers may see the disk
        _log.info("%s cannot send files to workers: %r", client, err)


def _answer(client: weakref.ref[Client], event: tuple[float, str]) -> None:
    """Send a file in the background, so that the client hears other messages meanwhile."""
    name, sender = event[1], client()
    if name in OFFERS and sender is not None:
        _in_background(_send(sender, name))


def _in_background(work: Awaitable[None]) -> None:
    task = asyncio.ensure_future(work)
    _running.add(task)
    task.add_done_callback(_running.discard)


async def _send(client: Client, name: str) -> None:
    write = functools.partial(
        cast(Any, client.scheduler).trakdask_spool_write, name=name, sender=uuid4().hex
    )
    try:
        path = await asyncio.to_thread(OFFERS[name])
        size = os.path.getsize(path)
        if size > MAX_BYTES:
            raise OSError(f"{path} has {size} bytes, and at most {MAX_BYTES} are sent")
        for offset in range(0, max(size, 1), _CHUNK_BYTES):
            part = await asyncio.to_thread(_read, Path(path), offset)
            await write(offset=offset, **part)
    except Exception as err:
        _log.warning("could not send %s to a worker: %r", name, err)
        await write(failure=str(err) or repr(err))


COURIERS.append(Delivery())
