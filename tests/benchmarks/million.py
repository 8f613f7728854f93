"""A store of 10⁶ samples × 512 columns × 3 checkpoints as float16, from its first block to its end.

    python tests/benchmarks/million.py [--rows 1000000 --proj-dim 512 --checkpoints 3 --block 0]

Features are drawn at random, which costs little, so that most of the time is the store's. It is
saved, killed at a third, saved again, opened, asked, appended to, reduced by a drop and verified.
Each line is measured in a process of its own: seconds by the clock and of CPU, the most memory that
the process held, and the objects of the store after it. The last lines are of stores of 10⁷ and 10⁸
rows that have the metadata and the names of all files, but no content.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import dask
import numpy as np
import xarray as xr
from _machine import parser_of, peak_memory

import trakdask as td
from trakdask.files import Folder
from trakdask.samples import joined_rows
from trakdask.storage.group import RECORDS, Group
from trakdask.storage.records import packed_rows
from trakdask.testing import simulate_features

THREADS = 2
SOURCES = ("web", "book", "code", "talk")


def main() -> None:
    parser = parser_of(__doc__, rows=10**6, proj_dim=512, checkpoints=3, block=0)
    parser.add_argument("--folder", type=Path, help="where to make the stores")
    parser.add_argument("--one", choices=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.block = args.block or joined_rows(args.rows, 4 * args.proj_dim)
    if args.one:
        with dask.config.set(scheduler="threads", num_workers=THREADS):
            measure(args.one, lambda: STEPS[args.one](args))
        return
    blocks = -(-args.rows // args.block) * args.checkpoints
    print(f"{args.rows:,} rows × {args.proj_dim} columns × {args.checkpoints} checkpoints as "
          f"float16, {2e-9 * args.rows * args.proj_dim * args.checkpoints:.2f} GB in {blocks} "
          f"blocks of {args.block} rows, {THREADS} threads")  # fmt: skip
    print(f"{'':36}{'clock':>10}{'CPU':>10}{'memory':>10}{'objects':>10}")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        args.folder = Path(folder)
        store = args.folder / "f.zarr"
        for step in STEPS:
            child = start(args, step)
            if step == "save, killed at a third":
                while len(files(store / RECORDS)) < blocks / 3 and child.poll() is None:
                    time.sleep(0.05)
                child.send_signal(signal.SIGKILL)
            text = (child.communicate()[0] or "").rstrip() or f"{step:36}{'':30}"
            print(f"{text}{len(files(store)):10,}", flush=True)
        n_chunks = len(files(store / "feature")) - 1
        n_small = len(Group.read(Folder.at(store)).small)
        print(f"\n{n_chunks:,} chunks of features; {n_small} small arrays would have "
              f"{n_small * n_chunks:,} in chunks of a block")  # fmt: skip
        print(f"{len(files(store)) / n_chunks:.3f} objects for each block and checkpoint; "
              f"{(len(files(store)) - fixed(store)) / n_chunks:.3f} without those that any store "
              "has: metadata, coords and sums")  # fmt: skip
        print(f"\n{'metadata and names only':36}{'clock':>10}{'CPU':>10}{'memory':>10}")
        for n in (10**7, 10**8):
            args.rows, args.block = n, joined_rows(n, 4 * args.proj_dim)
            hollow(store, args.folder / f"{n}.zarr", args)
            for step in ("open", "list"):
                print(start(args, f"{step} {n:.0e}").communicate()[0].rstrip(), flush=True)
            print(f"  {len(files(args.folder / f'{n}.zarr')):,} objects", flush=True)


def start(args: argparse.Namespace, step: str) -> subprocess.Popen[str]:
    sizes = {n: getattr(args, n) for n in ("rows", "proj_dim", "checkpoints", "block", "folder")}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    command = [sys.executable, __file__, "--one", step, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def measure(name: str, call: Callable[[], object]) -> None:
    clock, cpu = time.perf_counter(), time.process_time()
    call()
    clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
    print(f"{name:36}{clock:8.2f} s{cpu:8.2f} s{peak_memory() / 2**20:7.0f} MB", flush=True)


def files(folder: Path) -> list[str]:
    return [name for _, _, names in os.walk(folder) for name in names]


def fixed(store: Path) -> int:
    """Count the files that do not become more with more samples."""
    group = Group.read(Folder.at(store))
    return len([n for n in files(store) if n == "zarr.json"]) + sum(
        len(files(store / name)) - 1 for name in group.arrays if name not in group.features
    )


def features(args: argparse.Namespace, n: int, seed: int = 0) -> xr.Dataset:
    ds = simulate_features(n, args.proj_dim, args.checkpoints, chunks=args.block, seed=seed)
    source = np.array(SOURCES, object)[np.arange(n) * len(SOURCES) // n]
    return ds.assign_coords(source=("sample", source)).assign_attrs(source=f"simulated {seed}")


def save(args: argparse.Namespace) -> None:
    td.save(features(args, args.rows), args.folder / "f.zarr", dtype="float16", progress=False)


def append(args: argparse.Namespace) -> None:
    more = features(args, max(args.rows // 100, 1), seed=1)
    store = args.folder / "f.zarr"
    td.save(more, store, dtype="float16", append_dim="sample", progress=False)


def targets(args: argparse.Namespace) -> xr.Dataset:
    train = td.open(args.folder / "f.zarr")
    return features(args, 10, seed=2).compute().assign_attrs(train.attrs | {"source": "targets"})


def top_k(args: argparse.Namespace, where: str | None = None) -> None:
    scores = td.score(td.open(args.folder / "f.zarr"), targets(args))
    td.top_k(scores, 10, where=None if where is None else scores.source == where).compute()


def group_sums(args: argparse.Namespace) -> None:
    train = td.open(args.folder / "f.zarr")
    td.group_score(train, targets(args), by="source").compute()


def drop(args: argparse.Namespace) -> None:
    td.drop(args.folder / "f.zarr", where=lambda ds: ds.source == "talk")


def hollow(store: Path, copy: Path, args: argparse.Namespace) -> None:
    """Make a store of many rows that has all files of features and of small arrays, but empty."""
    group = Group.read(Folder.at(store))
    group.folder, group.before = Folder.at(copy), {}
    group.attrs |= {"n_samples": args.rows, "sources": [["simulated 0", args.rows]]}
    sizes = {"sample": args.rows, "proj_dim": args.proj_dim, "checkpoint": args.checkpoints}
    dtypes = {name: group.array(name).dtype for name in group.features}
    coords = {"checkpoint": td.open(store).checkpoint.variable}
    group.arrays = {}
    for name, dtype in dtypes.items():
        group.add(name, sizes, dtype, block=args.block)
        if name != "feature":
            group.add(name, sizes, dtype, block=packed_rows(group))
        (copy / name).mkdir(parents=True)
        for index in group.chunk_indices(name):
            (copy / name / group.chunk_key(name, index)).touch()
    group.write_small(coords)
    group.commit()


Step = Callable[[argparse.Namespace], object]
STEPS: dict[str, Step] = {
    "save, killed at a third": save,
    "save again": save,
    "save, with nothing to do": save,
    "open": lambda args: td.open(args.folder / "f.zarr"),
    "top 10 of 10 targets, one source": lambda args: top_k(args, "book"),
    "top 10 of 10 targets": top_k,
    "sums of 4 groups": group_sums,
    "append 1 %": append,
    "drop one of 4 sources": drop,
    "verify, without checksums": lambda args: td.verify(args.folder / "f.zarr"),
    "verify, checksums": lambda args: td.verify(args.folder / "f.zarr", checksums=True),
}
LARGER: dict[str, Step] = {
    f"open {10**7:.0e}": lambda args: td.open(args.folder / f"{10**7}.zarr"),
    f"list {10**7:.0e}": lambda args: td.verify(args.folder / f"{10**7}.zarr"),
    f"open {10**8:.0e}": lambda args: td.open(args.folder / f"{10**8}.zarr"),
    f"list {10**8:.0e}": lambda args: td.verify(args.folder / f"{10**8}.zarr"),
}

if __name__ == "__main__":
    STEPS |= LARGER if "--one" in sys.argv else {}
    main()
