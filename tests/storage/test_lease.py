"""One writer at a time, whoever comes second and however the first ended."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import trakdask as td
from trakdask.files import Folder
from trakdask.storage import lease as lease_module
from trakdask.storage.lease import lease
from trakdask.testing import simulate_features

FEATURES = simulate_features(n_samples=40, proj_dim=8, chunks=16)
DEAD = {"host": "elsewhere", "pid": 1, "process_started": 0, "token": "x", "since": 0}


@pytest.fixture(autouse=True)
def _short_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "_WATCHED_FOR_S", 0.1)


def leases(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("records/lease-*"))


def put(folder: Path, name: str, content: dict[str, object] | bytes) -> None:
    (folder / "records").mkdir(exist_ok=True)
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "records" / name).write_bytes(data)


def test_lease__second_writer_gets_an_error_that_names_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOGNAME", "USER"):
        monkeypatch.setenv(name, "ada")
    year = time.strftime("%Y-")  # not the day, so that a test at midnight need not fail
    place = Folder(str(tmp_path))
    with lease(place, "td.save"):
        with (
            pytest.raises(
                td.StoreBusyError,
                match=rf"ada in process {os.getpid()} on .*td.save, since {year}",
            ),
            lease(place, "td.save"),
        ):
            raise AssertionError("two hold it")
        assert leases(tmp_path) == ["lease-1.json"]
    assert leases(tmp_path) == []


def test_lease__refusal_says_how_to_break_it(tmp_path: Path) -> None:
    put(tmp_path, "lease-3.json", {**DEAD, "renewed": time.time()})
    with (
        pytest.raises(td.StoreBusyError, match=r"wait \d+ s or delete .*/records/lease-3.json"),
        lease(Folder(str(tmp_path)), "td.save"),
    ):
        pass
    (tmp_path / "records/lease-3.json").unlink()
    with lease(Folder(str(tmp_path)), "td.save"):
        pass


def test_lease__of_another_machine_expires(tmp_path: Path) -> None:
    put(tmp_path, "lease-3.json", {**DEAD, "renewed": time.time() - 121})
    with lease(Folder(str(tmp_path)), "td.save"):
        assert leases(tmp_path) == ["lease-4.json"]


def test_lease__of_a_dead_process_of_this_machine(tmp_path: Path) -> None:
    content = lease_module._self("td.save") | {"process_started": 0, "renewed": time.time()}
    put(tmp_path, "lease-1.json", content)
    with lease(Folder(str(tmp_path)), "td.save"):
        assert leases(tmp_path) == ["lease-2.json"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("lease-1.json", b'{"host": '),
        ("lease-1.json", b"[1, 2]"),
        ("lease-1.json", b"\xff\xfe"),
        ("lease-1.json", b'{"host": "elsewhere"}'),
        ("lease-1.json", b'{"host": "elsewhere", "renewed": "yesterday"}'),
        ("lease-one.json", b'{"host": "elsewhere", "renewed": 0}'),
    ],
)
def test_lease__that_says_nothing(tmp_path: Path, name: str, content: bytes) -> None:
    """Whoever wrote it may be alive: the user is told what to delete."""
    put(tmp_path, name, content)
    with (
        pytest.raises(td.StoreBusyError, match=rf"records/{name}.*try deleting that file"),
        lease(Folder(str(tmp_path)), "td.save"),
    ):
        pass
    assert leases(tmp_path) == [name]


def test_lease__written_by_a_request_whose_answer_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object store is asked again, and then says that the file is there: it is our own."""
    create = Folder.create

    def twice(self: Folder, path: str, data: bytes) -> None:
        create(self, path, data)
        raise FileExistsError(path)

    monkeypatch.setattr(Folder, "create", twice)
    with lease(Folder(str(tmp_path)), "td.save"):
        assert leases(tmp_path) == ["lease-1.json"]
    assert leases(tmp_path) == []


@pytest.mark.parametrize("step", [-1e6, -2.0, 2.0, 1e6])
def test_lease__clock_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """A live process of this machine holds it, whatever the clock says by now."""
    place = Folder(str(tmp_path))
    with lease(place, "td.save"):
        clock = time.time
        monkeypatch.setattr(time, "time", lambda: clock() + step)
        created = psutil.Process.create_time
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: created(self) + step)
        with pytest.raises(td.StoreBusyError, match=str(os.getpid())), lease(place, "td.save"):
            raise AssertionError("two hold it")


def test_lease__of_a_later_process_with_the_same_number(tmp_path: Path) -> None:
    content = lease_module._self("td.save") | {"process_started": "tick 1", "renewed": time.time()}
    put(tmp_path, "lease-1.json", content)
    with lease(Folder(str(tmp_path)), "td.save"):
        assert leases(tmp_path) == ["lease-2.json"]


def test_lease__of_another_machine_of_the_same_name(tmp_path: Path) -> None:
    content = lease_module._self("td.save") | {"boot": "another", "renewed": time.time()}
    put(tmp_path, "lease-1.json", content)
    with pytest.raises(td.StoreBusyError, match="wait"), lease(Folder(str(tmp_path)), "td.save"):
        pass


def test_lease__of_another_machine_whose_clock_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It seems to have expired, and is renewed: seen by watching it, not by any clock."""
    put(tmp_path, "lease-1.json", {**DEAD, "renewed": 0})
    looked = itertools.count(1)

    def sleep(_: float) -> None:
        if next(looked) == 3:
            put(tmp_path, "lease-1.json", {**DEAD, "renewed": 15})

    monkeypatch.setattr(lease_module, "_WATCHED_FOR_S", 60)
    monkeypatch.setattr(time, "sleep", sleep)
    with (
        pytest.raises(td.StoreBusyError, match="elsewhere"),
        lease(Folder(str(tmp_path)), "td.save"),
    ):
        pass
    assert leases(tmp_path) == ["lease-1.json"]


def test_lease__taken_away(tmp_path: Path) -> None:
    with (  # noqa: PT012 - the end of the block is what raises
        pytest.raises(td.StoreBusyError, match=r"was taken away.*process 1 on elsewhere"),
        lease(Folder(str(tmp_path)), "td.save"),
    ):
        (tmp_path / "records/lease-1.json").unlink()
        put(tmp_path, "lease-2.json", {**DEAD, "renewed": time.time()})
    assert leases(tmp_path) == ["lease-2.json"]


def test_lease__is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "_RENEWED_EVERY_S", 0.01)
    path = tmp_path / "records/lease-1.json"
    with lease(Folder(str(tmp_path)), "td.save"):
        first = json.loads(path.read_bytes())["renewed"]
        deadline = time.monotonic() + 240
        while json.loads(path.read_bytes())["renewed"] == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("url", ["{}", "memory://{}/lease"])
@pytest.mark.parametrize("before", [False, True])
def test_lease__of_many_at_once_one_at_a_time(tmp_path: Path, url: str, before: bool) -> None:
    """Eight threads, with nobody before them or an expired lease: never two inside."""
    place = Folder(url.format(tmp_path))
    if before:
        content = json.dumps({**DEAD, "renewed": 0}).encode()
        place.write("records/lease-3.json", content)
    inside, most, held = [0], [0], [0]

    def hold() -> None:
        for _ in range(5):
            try:
                with lease(place, "td.save"):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    held[0] += 1
                    time.sleep(0.002)
                    inside[0] -= 1
            except td.StoreBusyError:
                time.sleep(0.001)

    threads = [threading.Thread(target=hold) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1
    assert held[0] >= 1


def test_save__two_drivers_never_interleave(tmp_path: Path) -> None:
    put(tmp_path, "lease-1.json", {**DEAD, "renewed": time.time()})
    for call in (td.save, lambda _, store, **__: td.verify(store, repair=True)):
        with pytest.raises(td.StoreBusyError):
            call(FEATURES, tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["records"]
    (tmp_path / "records/lease-1.json").unlink()
    assert td.save(FEATURES, tmp_path, progress=False).sizes["sample"] == 40


def test_lease__killed_holder_is_replaced_at_once(tmp_path: Path) -> None:
    script = """if True:
        import os, sys
        from trakdask.storage.lease import lease
        from trakdask.files import Folder
        with lease(Folder(sys.argv[1]), "td.save"):
            os._exit(9)
    """
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)]).returncode == 9
    assert leases(tmp_path) == ["lease-1.json"]
    with lease(Folder(str(tmp_path)), "td.save"):
        assert leases(tmp_path) == ["lease-2.json"]
