"""Kill one operation on a store at each change it makes to the file system, one after the other.

Run as a script: it imports everything once and never opens a store itself, so that it can fork one
process per kill (zarr's threads would not survive a fork). Each child counts its changes by audit
events of the interpreter, which see what zarr, fsspec and trakdask do alike, and kills itself in
place of the k-th. Another child looks at what is left, goes on, and says what it found.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import dask
import numpy as np
import xarray as xr
import zarr

import trakdask as td
from tests.storage.integers import features, save
from trakdask import storage  # noqa: F401
from trakdask.variables import DERIVED

N = 6
FIRST, MORE = slice(0, N), slice(N, 2 * N)
Operation = Callable[[Path], object]


def saving(
    rows: slice, name: str = "c0", append_dim: str | None = None, **coords: np.ndarray
) -> Operation:
    """Return a call of save; samples are appended in the middle of a block."""
    n = rows.stop - rows.start
    animal = ("sample", np.array(["cat", "dgo"] * (n // 2), object))
    ds = features(rows, (name,), block=4).drop_vars("label").assign_coords(animal=animal)
    ds = ds.assign_coords({name: ("sample", values) for name, values in coords.items()})
    return lambda store: save(ds, store, append_dim=append_dim)


def dropping(*numbers: int, erase: bool = False) -> Operation:
    return lambda store: td.drop(store, where=lambda ds: ds.number.isin(numbers), erase=erase)


def assign(store: Path) -> None:
    td.assign_coords(store, {"animal": ["cat", "dog"] * (N // 2), "weight": np.zeros(N)})


def assign_all(store: Path) -> None:
    td.assign_coords(store, {"weight": xr.zeros_like(td.open(store, dropped=True).number, float)})


def assign_again(store: Path) -> None:
    td.assign_coords(store, {"weight": np.ones(N)})


def save_soft(store: Path) -> None:
    save(features(FIRST, ("c0",), block=4), store, estimator="soft")


def calibrate_by_others(store: Path) -> None:
    others = [features(MORE, ("c0",))] * 13
    held_out = xr.concat(others, "sample", data_vars="all", join="override")
    td.calibrate(store, held_out.assign_attrs(source="held out"))


saved, drop = saving(FIRST), dropping(2)
weighed = saving(MORE, append_dim="sample", weight=np.ones(N))
OPERATIONS: dict[str, tuple[list[Operation], Operation]] = {
    "save": ([], saved),
    "append_samples": ([saved], saving(MORE, append_dim="sample")),
    "append_samples_after_all": ([saved, drop, assign_all], weighed),
    "append_checkpoint": ([saved, drop], saving(FIRST, "c1", "checkpoint")),
    "drop": ([saved], drop),
    "erase": ([saved, drop], dropping(2, 3, erase=True)),
    "erase_one_set": ([saved, saving(MORE, append_dim="sample")], dropping(2, 9, erase=True)),
    "append_checkpoint_to_all": (
        [saved, saving(MORE, append_dim="sample")],
        saving(slice(0, 2 * N), "c1", "checkpoint"),
    ),
    "drop_more": ([saved, drop], dropping(2, 3)),
    "assign_coords": ([saved], assign),
    "assign_coords_again": ([saved, assign], assign_again),
    "calibrate": ([saved, drop], td.calibrate),
    "calibrate_by_others": ([save_soft], calibrate_by_others),
}
"""The calls before, and the call that is killed."""


CHANGES = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir"}
"""What gives a file or folder its name, or takes it away. Files are written under other names:
whoever is killed before a file gets its name has left it whole beside what was there before."""


def kind(event: str, name: str) -> str:
    """Return what a change is like: arrays of the same kind are written in the same way."""
    array, *rest = name.split("/")
    group = next((group for group, names in ARRAYS.items() if array in names), array)
    return f"{event} {group} {'metadata' if rest[-1:] == ['zarr.json'] else bool(rest)}"


def count_changes(store: Path, at: Callable[[int, str], None]) -> None:
    """Call ``at`` with the number and kind of each change to the store, before it happens."""
    numbers, root = itertools.count(1), str(store)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        # shutil.rmtree removes by names relative to a folder that it holds open.
        if event in CHANGES and (
            str(arguments[0]).startswith(root)
            or (event in ("os.remove", "os.rmdir") and arguments[-1] >= 0)
        ):
            path = str(arguments[event in ("os.rename", "os.link")])  # of a rename, the new one
            name = path.removeprefix(f"{root}/") if path.startswith(root) else "removed"
            at(next(numbers), kind(event, name))

    sys.addaudithook(hook)


def kill_at(number: int, store: Path, operation: Operation) -> None:
    def at(found: int, _: str) -> None:
        if found == number:
            os.kill(os.getpid(), signal.SIGKILL)

    count_changes(store, at)
    operation(store)


def in_child(function: Callable[[], None]) -> int:
    """Return the status of a forked process that calls a function."""
    return os.waitpid(in_background(function), 0)[1]


def in_background(function: Callable[[], None]) -> int:
    """Return the number of a forked process that calls a function."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with dask.config.set(scheduler="sync"):
                function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return pid


def shown(store: Path) -> str:
    """Hash all that a user sees of a store."""
    try:
        ds = td.open(store).compute()
    except (FileNotFoundError, td.errors.IncompleteFeaturesError):
        return "nothing"
    chosen_by = ds.damping.attrs.get("chosen_by") if "damping" in ds else ""
    return f"{hashed(ds)} {chosen_by}"


def hashed(ds: xr.Dataset) -> str:
    digest = hashlib.sha256()
    for name in sorted(map(str, ds.variables)):
        values = ds[name].values
        digest.update(f"{name} {ds[name].dims} {values.shape}".encode())
        digest.update(
            values.tobytes() if values.dtype.kind != "T" else str(values.tolist()).encode()
        )
    return digest.hexdigest()


BLOCKS = ("feature", "feature_norm", "output", "out_to_loss")
ARRAYS = {"small": BLOCKS[1:], "derived": DERIVED, "coord": ("animal", "number", "weight")}


def content(store: Path) -> dict[str, str]:
    """Return the names of all files, whichever of two names a chunk has; of blocks, with hashes."""
    found = {}
    for path in sorted(store.rglob("*")):
        name = str(path.relative_to(store))
        if path.is_file():
            is_block = name.split("/")[0] in BLOCKS and path.name != "zarr.json"
            digest = hashlib.sha256(path.read_bytes()).hexdigest() if is_block else ""
            found[name.replace("/c.", "/c/").replace(".", "/")] = digest
    return found


def prepare(store: Path, name: str, out: Path) -> None:
    """Make the store as it was before, and say how it looks before and after the operation."""
    before, operation = OPERATIONS[name]
    for each in before:
        each(store)
    copy = store.with_name("after")
    if before:
        shutil.copytree(store, copy)
    looks = {"before": shown(store)}
    changes: dict[int, str] = {}
    count_changes(copy, changes.__setitem__)
    operation(copy)
    looks |= {"after": shown(copy)}
    known = {
        **looks,
        "changes": list(changes.values()),
        "content": content(copy),
        "plain": hashed(xr.open_zarr(copy).reset_coords().compute()),
    }
    out.write_text(json.dumps(known))


def look(store: Path, name: str, known: dict[str, Any]) -> None:
    """Check a store whose writer was killed: it shows one of two states, and goes on."""
    operation = OPERATIONS[name][1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        now = shown(store)
    messages = [str(each.message) for each in caught]
    assert all("no unfinished append" in message for message in messages), messages
    assert now in (known["before"], known["after"]), "neither the state before nor that after"
    if now != "nothing":  # what counts is not in the metadata that tools rewrite
        with warnings.catch_warnings(action="ignore"):
            zarr.consolidate_metadata(store)
            assert shown(store) == now
    if now == known["after"]:
        assert not caught
    warnings.filterwarnings("error", ".*no unfinished append")
    operation(store)
    assert shown(store) == known["after"]
    assert content(store) == known["content"], sorted(
        set(content(store).items()) ^ set(known["content"].items())
    )
    found = td.verify(store, checksums=True)
    assert found.empty, found.to_string()
    theirs = xr.open_zarr(store).reset_coords().compute()
    assert hashed(theirs) == known["plain"]


def main(folder: Path, name: str, kinds: str) -> None:
    """Kill at every change, or at the first and the last of each kind that is no empty folder."""
    store, out = folder / "f.zarr", folder / "known.json"
    assert in_child(lambda: prepare(store, name, out)) == 0
    known = json.loads(out.read_text())
    changes = known["changes"]
    numbers = [
        number
        for number, what in enumerate(changes, 1)
        if kinds == "all"
        or (
            (what not in changes[: number - 1] or what not in changes[number:])
            and not what.startswith("os.mkdir")
        )
    ]
    each = [
        in_background(lambda n=n: kill_many(folder, name, known, numbers[n::2])) for n in range(2)
    ]
    assert [os.waitpid(pid, 0)[1] for pid in each] == [0, 0]
    print(json.dumps({"kills": len(numbers)}))


def kill_many(folder: Path, name: str, known: dict[str, Any], numbers: Iterable[int]) -> None:
    store = folder / "f.zarr"
    for number in numbers:
        copy = folder / f"killed-{number}"
        if store.exists():
            shutil.copytree(store, copy)
        ended = in_child(lambda n=number, at=copy: kill_at(n, at, OPERATIONS[name][1]))
        # The order in which zarr's threads write may differ from run to run, the number may not.
        assert os.WIFSIGNALED(ended), f"it made fewer than {number} changes"
        looked = in_child(lambda at=copy: look(at, name, known))
        assert looked == 0, f"killed at change {number} of {len(known['changes'])}"
        shutil.rmtree(copy)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
