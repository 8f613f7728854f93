"""One writer at a time; a dead one is no obstacle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trakdask as td
from trakdask.files import Folder
from trakdask.storage import lock as module
from trakdask.storage.lock import lock
from trakdask.testing import simulate_features

FEATURES = simulate_features(n_samples=8, proj_dim=4, chunks=4)
HOLD = """
import sys
from trakdask.files import Folder
from trakdask.storage.lock import lock
with lock(Folder(sys.argv[1]), "a test"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path))


def holder(folder: Folder, **changes: object) -> None:
    with lock(folder, "another"):
        content = folder.read_json("lock")
    folder.write("lock", json.dumps({**content, **changes}).encode())


def test_lock__of_a_live_process_and_of_a_dead_one(folder: Folder) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(td.errors.StoreBusyError, match=rf"process {process.pid} .*a test"):
        td.save(FEATURES, folder.url, progress=False)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with lock(folder, "this"):
        assert folder.read_json("lock")["process"] == os.getpid()
    assert folder.names() == []


@pytest.mark.parametrize(
    ("changes", "is_free"),
    [
        ({}, False),
        ({"host": "elsewhere"}, False),
        ({"host": "elsewhere", "renewed": 4e9}, False),
        ({"host": "elsewhere", "renewed": time.time() - 600}, True),
        ({"process": 2**22 + 1}, True),
        ({"process_started": 5.0}, True),  # another process has this number now
    ],
)
def test_lock__is_free(folder: Folder, changes: dict[str, object], is_free: bool) -> None:
    holder(folder, **changes)
    if is_free:
        with lock(folder, "this"):
            pass
        assert folder.names() == []
    else:
        with pytest.raises(td.errors.StoreBusyError, match="another"), lock(folder, "this"):
            pass
        assert folder.names() == ["lock"]


def test_lock__that_says_nothing(folder: Folder) -> None:
    folder.write("lock", b"x")
    with pytest.raises(td.errors.StoreBusyError, match="cannot be read"), lock(folder, "this"):
        pass


def test_lock__is_renewed(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RENEWED_EVERY_S", 0.01)
    with lock(folder, "this") as require_held:
        first = folder.read_json("lock")["renewed"]
        while folder.read_json("lock")["renewed"] == first:
            pass
        require_held()


def test_lock__is_noticed_when_it_is_taken_away(folder: Folder) -> None:
    with lock(folder, "this") as require_held:
        folder.write("lock", json.dumps({"token": "theirs", "purpose": "theirs"}).encode())
        with pytest.raises(td.errors.StoreBusyError, match="theirs"):
            require_held()
    assert folder.read_json("lock")["token"] == "theirs"


def test_lock__while_another_writer_sweeps(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has the lock, and sweeps the file that is to become the lock of this one."""
    link, n_sweeps = os.link, 2

    def swept(partial: str, target: str) -> None:
        nonlocal n_sweeps
        if n_sweeps:
            n_sweeps -= 1
            folder.sweep()
        link(partial, target)

    monkeypatch.setattr(os, "link", swept)
    with lock(folder, "this"):
        assert folder.read_json("lock")["process"] == os.getpid()
    holder(folder)
    n_sweeps = 1
    with pytest.raises(td.errors.StoreBusyError, match="another"), lock(folder, "this"):
        pass
    assert os.listdir(folder.url) == ["lock"]
