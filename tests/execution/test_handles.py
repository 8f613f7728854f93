"""The oracle: an object that was sent to another process is equal to the one that was sent."""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import trakdask
from trakdask.execution import handles
from trakdask.execution.handles import Spooled
from trakdask.execution.spool import SPOOL_VARIABLE, spool_folder

ROOT = str(Path(trakdask.__file__).parents[1])
LOAD = """
import hashlib, pickle, sys
import numpy as np
handle = pickle.load(open(sys.argv[1], "rb"))
value = handle.get()
assert handle.get() is value and pickle.loads(pickle.dumps(handle)) is handle
print(type(value).__name__, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest())
"""


def in_other_process(obj: Any, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "handle.pkl"
    path.write_bytes(pickle.dumps(obj))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", LOAD, str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": ROOT},
    )


def forget(obj: Spooled) -> Spooled:
    """Unpickle as another process would: with no live handle."""
    data, token = pickle.dumps(obj), obj.token
    live = handles._live.pop(token)
    handles._opened_small.pop(token, None)
    restored = pickle.loads(data)
    assert restored is not live
    return restored


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAKDASK_SPOOL", str(tmp_path / "spool"))
    return tmp_path / "spool"


def test_get__is_the_very_object_in_the_process_that_made_it() -> None:
    obj = {"weights": [np.zeros(10**5)]}
    spooled = Spooled(obj)
    assert spooled.get() is obj
    assert pickle.loads(pickle.dumps(spooled)).get() is obj


@pytest.mark.parametrize("dtype", ["f4", ">i8", "?", "c8", "M8[ns]", "U3"])
def test_get__array_is_a_read_only_memory_map_elsewhere(dtype: str, folder: Path) -> None:
    array = np.arange(24_000).reshape(6000, 4).astype("i8").astype(dtype)
    loaded = forget(Spooled(array)).get()
    assert isinstance(loaded, np.memmap)
    assert not loaded.flags.writeable
    assert loaded.dtype == array.dtype
    np.testing.assert_array_equal(loaded, array)


@pytest.mark.parametrize("array", [np.arange(40_000.0)[::2], np.asfortranarray(np.eye(150))])
def test_get__array_in_another_memory_order(array: np.ndarray, folder: Path) -> None:
    np.testing.assert_array_equal(forget(Spooled(array)).get(), array)


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 10**5])
def test_get__in_a_real_other_process(n: int, tmp_path: Path) -> None:
    array = np.random.default_rng(0).random(n)
    done = in_other_process(Spooled(array), tmp_path)
    assert done.returncode == 0, done.stderr
    kind, digest = done.stdout.split()
    assert kind == ("memmap" if n > 3 else "ndarray")
    assert digest == hashlib.sha256(array.tobytes()).hexdigest()


def test_get__small_objects_need_no_folder(folder: Path) -> None:
    spooled = Spooled(lambda: 41)
    restored = forget(spooled)
    for file in folder.iterdir():
        file.unlink()
    assert restored.get()() == 41


def test_get__missing_file_names_the_host_and_what_to_set(folder: Path) -> None:
    restored = forget(Spooled(np.zeros(10**4)))
    (file,) = folder.iterdir()
    file.unlink()
    with pytest.raises(FileNotFoundError, match=SPOOL_VARIABLE) as err:
        restored.get()
    assert str(file) in str(err.value)
    assert repr(socket.gethostname()) in str(err.value)


def test_get__opens_once_for_many_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restored = forget(Spooled(np.zeros(10**4)))
    calls = []
    open_once = handles._open
    monkeypatch.setattr(
        handles, "_open", lambda *args: (calls.append(threading.get_ident()), open_once(*args))[1]
    )
    with ThreadPoolExecutor(8) as pool:
        values = list(pool.map(lambda _: restored.get(), range(64)))
    assert len(calls) == 1
    assert all(value is values[0] for value in values)


def test_get__keeps_few_large_objects(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "LARGE_BYTES", 20_000)
    handles._opened_large.clear()
    restored = [forget(Spooled([i, b"x" * 30_000])) for i in range(6)]
    assert [each.get()[0] for each in restored] == list(range(6))
    assert len(handles._opened_large) == 4
    assert restored[0].get()[0] == 0


def test_reduce__writes_once_per_content(folder: Path) -> None:
    array = np.ones(10**4)
    first, second = Spooled(array), Spooled(array.copy())
    assert first.token == second.token
    assert not folder.exists()
    pickle.dumps(first)
    (path,) = folder.iterdir()
    written = path.stat().st_mtime_ns
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(pickle.dumps, [first, second] * 8))
    assert [each.stat().st_mtime_ns for each in folder.iterdir()] == [written]


def test_reduce__writes_again_if_the_file_is_gone(folder: Path) -> None:
    spooled = Spooled(np.ones(10**4))
    pickle.dumps(spooled)
    next(folder.iterdir()).unlink()
    np.testing.assert_array_equal(forget(spooled).get(), 1)


def test_reduce__handle_is_small_whatever_the_object(folder: Path) -> None:
    assert len(pickle.dumps(Spooled(np.zeros(10**7)))) < 1000
    assert len(pickle.dumps(Spooled([b"x" * 10**6]))) < 1000


def test_reduce__failed_write_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space left"):
        pickle.dumps(Spooled(np.zeros(10**4)))
    assert list(folder.iterdir()) == []


def test_reduce__memory_map_is_sent_as_its_own_file(tmp_path: Path, folder: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(60_000.0).reshape(-1, 3))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for array in (mapped, mapped[7:9000], mapped[100:][50:]):
        loaded = forget(Spooled(array)).get()
        np.testing.assert_array_equal(loaded, np.array(array))
    assert not folder.exists()


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_reduce__writable_memory_map_is_sent_by_content(
    mode: Any, tmp_path: Path, folder: Path
) -> None:
    np.save(tmp_path / "x.npy", np.zeros(10**4))
    mapped = np.load(tmp_path / "x.npy", mmap_mode=mode)
    mapped[5] = 1
    assert forget(Spooled(mapped)).get()[5] == 1
    assert len(list(folder.iterdir())) == 1


def test_init__unpicklable_asks_for_a_callable() -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled .*zero-argument callable"):
        Spooled({"lock": threading.Lock()})


def test_init__given_token_is_kept() -> None:
    assert Spooled(object(), token="mine").__dask_tokenize__() == ("Spooled", "mine")


def test_live_handles__do_not_outlive_their_use() -> None:
    token = Spooled(np.zeros(3), token="short-lived").token
    gc.collect()
    assert token not in handles._live


@pytest.mark.slow
def test_spool_folder__temporary_one_is_removed_at_exit() -> None:
    code = (
        "from trakdask.execution.spool import spool_folder\n"
        "f = spool_folder(); assert f.is_dir(); print(f)"
    )
    env = {key: value for key, value in os.environ.items() if key != "TRAKDASK_SPOOL"}
    env["PYTHONPATH"] = ROOT
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).exists()


def test_spool_folder__is_the_named_one(folder: Path) -> None:
    assert spool_folder() == folder
    assert folder.is_dir()


def test_spooled__travels_inside_other_pickles(folder: Path) -> None:
    spooled = Spooled(np.arange(10**4))
    loaded = pickle.loads(cloudpickle.dumps({"a": [spooled, spooled]}))
    assert loaded["a"][0] is loaded["a"][1] is spooled


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_spool_folder__that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv(SPOOL_VARIABLE, str(folder))
    with pytest.raises(PermissionError, match=rf"{folder}.*mode {mode:o}.*chmod go-w"):
        pickle.dumps(Spooled(np.zeros(100_000)))
    assert list(folder.iterdir()) == []


def test_spool_folder__is_made_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "spool"
    monkeypatch.setenv(SPOOL_VARIABLE, str(folder))
    before = os.umask(0)
    try:
        pickle.dumps(Spooled({"a": "x" * 100_000}))
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]


def test_spool_folder__that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(SPOOL_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(NotADirectoryError, match="got the file"):
        pickle.dumps(Spooled(np.zeros(100_000)))


def test_spooled__what_another_user_wrote_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a worker of another user, or where a file was put in the place of ours."""
    monkeypatch.setenv(SPOOL_VARIABLE, str(tmp_path))
    tmp_path.chmod(0o700)
    pickled = pickle.dumps(Spooled({"a": "x" * 100_000}))
    (path,) = tmp_path.iterdir()
    path.chmod(0o666)
    script = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1])).get()"
    command = [sys.executable, "-c", script, pickled.hex()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "PermissionError: expected a spool that only user" in done.stderr
    path.chmod(0o600)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    if uid != 0:  # what root wrote is trusted
        with pytest.raises(PermissionError, match=f"of user {uid}"):
            handles._open_pickle(str(path))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
