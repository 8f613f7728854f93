"""What a store of many blocks costs: open, resume, verify, and the overhead of each block.

    python tests/benchmarks/store.py [--blocks 20000 --rows 16 --proj-dim 64]

Blocks are small and their features free, so that all of the time is the store's. Each number is
given by the clock and by the CPU time of the process: where others use the machine, trust the
latter. The overhead of a block is the time of a whole save, on one thread, per block.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask

import trakdask as td
from trakdask.testing import simulate_features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--proj-dim", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="where to make the store")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, 1 thread")
    print(f"{args.blocks} blocks of {args.rows} samples, proj_dim {args.proj_dim}, 1 checkpoint")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(args, Path(folder) / "f.zarr")


def measure(args: argparse.Namespace, store: Path) -> None:
    features = simulate_features(
        n_samples=args.blocks * args.rows,
        proj_dim=args.proj_dim,
        n_checkpoints=1,
        chunks=args.rows,
    )
    dask.config.set(scheduler="sync")

    def save(features: Any) -> None:
        td.save(features, store, gram=False, progress=False)

    wall, cpu = timed("save", lambda: save(features))
    for name, seconds in (("clock", wall), ("CPU", cpu)):
        share = 100 * seconds / args.blocks
        print(f"  per block: {1e3 * seconds / args.blocks:.2f} ms by {name}, "
              f"{share:.2f} % of a block of 1 s")  # fmt: skip
    timed("open", lambda: td.open(store))
    timed("resume (nothing to do; opens, too)", lambda: save(features))
    timed("verify, sizes", lambda: td.verify(store))
    timed("verify, checksums", lambda: td.verify(store, checksums=True))


def timed(what: str, call: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{what:36} {wall:8.2f} s, CPU {cpu:8.2f} s", flush=True)
    return wall, cpu


if __name__ == "__main__":
    main()
