"""The oracle: what a worker reads of a file that it does not see is what the driver wrote."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import numpy as np
import pytest
from distributed import Client, get_worker
from distributed.utils import sync

import trakdask as td
from tests.waiting import wait_until
from trakdask.execution import delivery
from trakdask.execution.spool import OFFERS, SpoolFile, fetched, local_path, offer, spool_folder

pytestmark = pytest.mark.slow

CHUNK = 1000


@pytest.fixture
def name() -> Iterator[str]:
    """A name that no process knows yet."""
    name = f"{uuid4().hex}.npy"
    yield name
    OFFERS.pop(name, None)


def read(file: SpoolFile) -> bytes:
    return Path(local_path(file)).read_bytes()


def on_each_worker(client: Client, function: Callable[..., object], *given: object) -> list[object]:
    workers = list(client.scheduler_info()["workers"])
    futures = [client.submit(function, *given, workers=[w], pure=False) for w in workers]
    return client.gather(futures)


@pytest.mark.parametrize("size", [0, 1, CHUNK, 3 * CHUNK, 3 * CHUNK + 7])
def test_fetch__through_the_scheduler_once(
    process_client: Client, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(delivery, "_CHUNK_BYTES", CHUNK)
    content = np.random.default_rng(size).bytes(size)
    (tmp_path / "file").write_bytes(content)
    asked = []
    offer(name, lambda: (asked.append(name), str(tmp_path / "file"))[1])
    file = SpoolFile(name, "/not/here", size)
    for _ in range(2):
        assert on_each_worker(process_client, read, file) == [content] * 2
    assert asked == [name]
    assert not list(spool_folder().glob("*.partial"))


def test_fetch__many_threads_and_files(
    process_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_CHUNK_BYTES", CHUNK)
    contents = {f"{uuid4().hex}.pkl": bytes([i]) * (500 * i + 1) for i in range(8)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        offer(name, (tmp_path / name).__str__)
    files = [SpoolFile(name, "/not/here") for name in contents] * 4
    assert process_client.gather(process_client.map(read, files, pure=False)) == [
        contents[file.name] for file in files
    ]


def message(file: SpoolFile) -> str:
    try:
        return str(fetched(file))
    except FileNotFoundError as err:
        return str(err)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (None, ["did not send"]),
        (lambda: (_ for _ in ()).throw(OSError("it melted")), ["it melted"]),
        (lambda: "/not/here/either", ["/not/here/either"]),
        (lambda: __file__, ["at most 10 are sent"]),
    ],
    ids=["nobody has it", "it cannot be made", "it is gone", "it is too large"],
)
def test_fetch__impossible(
    process_client: Client,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    path: Callable[[], str] | None,
    words: list[str],
) -> None:
    monkeypatch.setattr(delivery, "_PATIENCE_S", 0.2 if path is None else 240)
    monkeypatch.setattr(delivery, "MAX_BYTES", 10)
    offer("registers-the-client.npy", str)
    if path is not None:
        offer(name, path)
    said = process_client.submit(message, SpoolFile(name, "/not/here")).result()
    for word in ["/not/here", repr(socket.gethostname()), "TRAKDASK_SPOOL", *words]:
        assert word in said


def test_read__driver_has_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a process that has gone, whether or not it had begun to send."""
    monkeypatch.setattr(delivery, "_ARRIVAL_S", 0.05)

    async def leave() -> None:
        asked: list[tuple[str, str]] = []
        scheduler = SimpleNamespace(handlers={}, log_event=lambda *event: asked.append(event))
        server = delivery.SpoolServer()
        await server.start(scheduler)
        with pytest.raises(OSError, match="has left"):
            await server.read(name, 0)
        await server.serve("driver")
        reading = asyncio.ensure_future(server.read(name, 0))
        while not asked:
            await asyncio.sleep(0)
        await server.write(name, sender="driver", offset=0, data=b"12", size=4)
        server.remove_client(scheduler, "driver")
        with pytest.raises(OSError, match="has left"):
            await reading
        assert not server._uploads

    asyncio.run(leave())


def test_read__before_the_driver_is_known(name: str) -> None:
    """Its graph may arrive before its registration, also where another process is known."""

    async def arrive() -> None:
        asked: list[tuple[str, str]] = []
        scheduler = SimpleNamespace(handlers={}, log_event=lambda *event: asked.append(event))
        server = delivery.SpoolServer()
        await server.start(scheduler)
        reading = asyncio.ensure_future(server.read(name, 0))
        for _ in range(10):  # it has every occasion to ask
            await asyncio.sleep(0)
        assert not asked
        await server.serve("another")
        while not asked:
            await asyncio.sleep(0)
        await server.serve("driver")
        assert len(asked) == 2  # the driver is asked, too
        await server.write(name, sender="driver", offset=0, data=b"12", size=2)
        assert await reading == {"data": b"12", "size": 2}

    asyncio.run(arrive())


def test_fetch__from_a_scheduler_that_takes_no_plugins(
    process_client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = process_client.cluster.scheduler.handlers
    offer("registers-the-client.npy", str)
    wait_until(lambda: "trakdask_spool_read" in handlers, "the registration")
    monkeypatch.delitem(handlers, "trakdask_spool_read")
    said = process_client.submit(message, SpoolFile(name, "/not/here"), pure=False).result()
    assert "takes no plugins" in said


def test_offer__waits_for_no_event_loop(process_client: Client) -> None:
    """Graphs are pickled under a lock of the client that its event loop may be waiting for."""
    address = process_client.scheduler.address
    with Client(address, set_as_default=False) as client:
        blocked, free = threading.Event(), threading.Event()
        client.loop.add_callback(lambda: (blocked.set(), free.wait(60)))
        assert blocked.wait(60)
        offering = threading.Thread(target=offer, args=("registers-the-client.npy", str))
        offering.start()
        offering.join(30)
        is_stuck = offering.is_alive()
        free.set()
        offering.join()
    assert not is_stuck


def ask(name: str) -> str:
    worker = get_worker()
    try:
        return str(
            sync(worker.loop, worker.scheduler.trakdask_spool_read, name=name, offset=0)["size"]
        )
    except ValueError as err:
        return str(err)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/b.npy", ""])
def test_read__nothing_outside_of_the_spool(process_client: Client, name: str) -> None:
    offer("registers-the-client.npy", str)
    (spool_folder().parent / "secret").write_text("secret")
    assert repr(name) in process_client.submit(ask, name).result()


def test_fetch__outside_of_a_cluster(name: str) -> None:
    assert "not a worker" in message(SpoolFile(name, "/not/here"))


def test_memory_map__that_was_overwritten(process_client: Client, tmp_path: Path) -> None:
    """Workers would read other numbers than those that the samples were identified by."""
    values = np.arange(60_000, dtype="f4").reshape(-1, 6)
    np.save(tmp_path / "x.npy", values)
    train = td.from_arrays({"x": np.load(tmp_path / "x.npy", mmap_mode="r")}, chunks=5000)
    np.save(tmp_path / "new.npy", values + 1)
    (tmp_path / "new.npy").replace(tmp_path / "x.npy")
    with pytest.raises(FileNotFoundError, match=r"x\.npy was changed"):
        train.x.compute()


def forget_the_path(path: str) -> None:
    """Let this worker see no file there, as on another host."""
    from trakdask.execution import handles

    seen = handles.file_version
    handles.file_version = lambda asked: None if asked == path else seen(asked)


def test_memory_map__that_the_worker_does_not_see(process_client: Client, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(60_000, dtype="f4").reshape(-1, 6))
    mapped = np.load(path, mmap_mode="r")[100:9000]
    process_client.run(forget_the_path, str(path))
    train = td.from_arrays({"x": mapped}, chunks=5000)
    np.testing.assert_array_equal(train.x, mapped)
