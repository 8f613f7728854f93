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
import dask.array as da
import numpy as np
import xarray as xr

import trakdask as td
from trakdask import storage  # noqa: F401
from trakdask.testing import simulate_features

N, BLOCK = 6, 4  # so that samples are appended in the middle of a block


def features(start: int, stop: int, checkpoints: tuple[int, ...] = (0,)) -> xr.Dataset:
    """Return lazy features of some rows: small integers, whose sums are exact."""
    whole = simulate_features(n_samples=2 * N, proj_dim=2, n_checkpoints=2, chunks=BLOCK)
    ds = whole.isel(sample=slice(start, stop), checkpoint=list(checkpoints)).drop_vars("label")
    values = np.random.default_rng(0).integers(-4, 5, (2 * N, 2, 2)).astype("f4")
    values = values[start:stop][..., list(checkpoints)]
    names = [f"c{number}" for number in checkpoints]
    name = "feature-" + dask.base.tokenize(start, stop, checkpoints)
    others = {
        each: (("sample", "checkpoint"), da.from_array(values[:, 0], chunks=(BLOCK, 1)))
        for each in ("output", "out_to_loss")
    }
    feature = da.from_array(values, chunks=(BLOCK, -1, 1), name=name)
    return ds.assign(feature=(ds.feature.dims, feature), **others).assign_coords(
        number=("sample", np.arange(start, stop)), animal=("sample", ["cat", "dgo"] * (N // 2))
    ).assign_attrs(
        source=f"{start}:{stop}", checkpoints={name: name for name in names},
        checkpoint_ids={name: int(name[1:]) for name in names},
    )  # fmt: skip


def save(store: Path) -> None:
    td.save(features(0, N), store, progress=False)


def append_samples(store: Path) -> None:
    td.save(features(N, 2 * N), store, append_dim="sample", progress=False)


def append_samples_with_weights(store: Path) -> None:
    more = features(N, 2 * N).assign_coords(weight=("sample", np.ones(N)))
    td.save(more, store, append_dim="sample", progress=False)


def append_checkpoint(store: Path) -> None:
    td.save(features(0, N, (1,)), store, append_dim="checkpoint", progress=False)


def drop(store: Path) -> None:
    td.drop(store, where=lambda ds: ds.number == 2)


def drop_more(store: Path) -> None:
    td.drop(store, where=lambda ds: ds.number.isin([2, 3]))


def assign(store: Path) -> None:
    td.assign_coords(store, {"animal": ["cat", "dog"] * (N // 2), "weight": np.zeros(N)})


def assign_all(store: Path) -> None:
    td.assign_coords(store, {"weight": xr.zeros_like(td.open(store, dropped=True).number, float)})


def assign_again(store: Path) -> None:
    td.assign_coords(store, {"weight": np.ones(N)})


def soft_features(start: int, stop: int) -> xr.Dataset:
    """Return features as of a classifier, whose λ outputs can choose."""
    ds = features(start, stop)
    return ds.assign(out_to_loss=abs(ds.out_to_loss) / 4)


def save_soft(store: Path) -> None:
    td.save(soft_features(0, N), store, estimator="soft", progress=False)


def calibrate(store: Path) -> None:
    td.calibrate(store)


def calibrate_by_others(store: Path) -> None:
    others = xr.concat([soft_features(N, 2 * N)] * 13, "sample", data_vars="all", join="override")
    td.calibrate(store, others.assign_attrs(source="held out"))


OPERATIONS: dict[str, tuple[list[Callable[[Path], None]], Callable[[Path], None]]] = {
    "save": ([], save),
    "append_samples": ([save], append_samples),
    "append_samples_after_all": ([save, drop, assign_all], append_samples_with_weights),
    "append_checkpoint": ([save, drop], append_checkpoint),
    "drop": ([save], drop),
    "drop_more": ([save, drop], drop_more),
    "assign_coords": ([save], assign),
    "assign_coords_again": ([save, assign], assign_again),
    "calibrate": ([save, drop], calibrate),
    "calibrate_by_others": ([save_soft], calibrate_by_others),
}
"""What was done before, and what is killed."""


SHOWING = {"os.rename", "os.link", "os.remove"}
"""What gives a file its name, or takes it away: everything else is written under other names."""


def count_changes(store: Path, at: Callable[[int], None], every: bool) -> None:
    """Call ``at`` with the number of each change to the store, before it happens.

    Unless every change is asked for, those that show no file and hide none are left out: beginning
    a file under a name of its own, making a folder, removing one that is empty. Whoever is killed
    before a file gets its name has left it whole beside what was there before.
    """
    numbers, root = itertools.count(1), str(store)
    changes = SHOWING | ({"os.mkdir", "os.rmdir"} if every else set())

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and every:
            path, mode, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not writes and not (isinstance(mode, str) and set(mode) & set("wax+")):
                return
        elif event not in changes:
            return
        path = arguments[0]
        # shutil.rmtree removes by names relative to a folder that it holds open.
        if str(path).startswith(root) or (
            event in ("os.remove", "os.rmdir") and arguments[-1] >= 0
        ):
            at(next(numbers))

    sys.addaudithook(hook)


def kill_at(number: int, store: Path, operation: Callable[[Path], None], every: bool) -> None:
    def at(found: int) -> None:
        if found == number:
            os.kill(os.getpid(), signal.SIGKILL)

    count_changes(store, at, every)
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
    chosen_by = ds.damping.attrs["chosen_by"] if "damping" in ds else ""
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


BLOCKS = ("feature", "feature_norm", "output", "out_to_loss")


def prepare(store: Path, name: str, out: Path, every: bool) -> None:
    """Make the store as it was before, and say how it looks before and after the operation."""
    before, operation = OPERATIONS[name]
    for each in before:
        each(store)
    copy = store.with_name("after")
    if before:
        shutil.copytree(store, copy)
    looks = {"before": shown(store)}
    changes = [0]
    count_changes(copy, lambda number: changes.__setitem__(0, number), every)
    operation(copy)
    looks |= {"after": shown(copy)}
    known = {
        **looks,
        "changes": changes[0],
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
    assert {each.category for each in caught} <= {td.errors.UnfinishedAppendWarning}, [
        str(each.message) for each in caught
    ]
    assert now in (known["before"], known["after"]), "neither the state before nor that after"
    if now == known["after"]:
        assert not caught
    warnings.simplefilter("error", td.errors.UnfinishedAppendWarning)
    operation(store)
    assert shown(store) == known["after"]
    assert content(store) == known["content"], sorted(
        set(content(store).items()) ^ set(known["content"].items())
    )
    found = td.verify(store, checksums=True)
    assert found.empty, found.to_string()
    theirs = xr.open_zarr(store).reset_coords().compute()
    assert hashed(theirs) == known["plain"]


def main(folder: Path, name: str, every: bool) -> None:
    store, out = folder / "f.zarr", folder / "known.json"
    assert in_child(lambda: prepare(store, name, out, every)) == 0
    known = json.loads(out.read_text())
    numbers = range(1, known["changes"] + 1)
    each = [
        in_background(lambda n=n: kill_many(folder, name, known, numbers[n::2], every))
        for n in range(2)
    ]
    assert [os.waitpid(pid, 0)[1] for pid in each] == [0, 0]
    print(json.dumps({"changes": known["changes"], "kills": len(numbers)}))


def kill_many(
    folder: Path, name: str, known: dict[str, Any], numbers: Iterable[int], every: bool
) -> None:
    store = folder / "f.zarr"
    for number in numbers:
        copy = folder / f"killed-{number}"
        if store.exists():
            shutil.copytree(store, copy)
        ended = in_child(lambda n=number, at=copy: kill_at(n, at, OPERATIONS[name][1], every))
        # The order in which zarr's threads write may differ from run to run, the number may not.
        assert os.WIFSIGNALED(ended), f"it made fewer than {number} changes"
        looked = in_child(lambda at=copy: look(at, name, known))
        assert looked == 0, f"killed at change {number} of {known['changes']}"
        shutil.rmtree(copy)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "every" in sys.argv[3:])
