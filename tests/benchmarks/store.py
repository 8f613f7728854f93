"""What a store of many blocks costs: open, resume, verify, and the overhead of each block.

    python tests/benchmarks/store.py [--blocks 20000 --rows 16 --proj-dim 64]
    python tests/benchmarks/store.py --blocks 100 --rows 1024 --proj-dim 4096

Features are ones, which cost nothing, so that all of the time is the store's. Each number is given
by the clock and by the CPU time of the process: where others use the machine, trust the latter. The
overhead of a block is what a whole save, on one thread, takes longer than a loop that writes the
same chunks with zarr: records, checksums, and dask.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr
import zarr
from _machine import parser_of

import trakdask as td
from trakdask.testing import simulate_features


def main() -> None:
    parser = parser_of(__doc__, blocks=20_000, rows=16, proj_dim=64)
    parser.add_argument("--folder", type=Path, help="where to make the store")
    args = parser.parse_args()
    size = f"{4e-6 * args.rows * args.proj_dim:.3g} MB"
    print(f"{args.blocks} blocks of {args.rows} samples × {args.proj_dim} ({size}), 1 checkpoint")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(args, Path(folder) / "f.zarr")


def measure(args: argparse.Namespace, store: Path) -> None:
    features = free_features(args)
    dask.config.set(scheduler="sync")

    def save(features: Any) -> None:
        td.save(features, store, estimator=None, progress=False)

    plain = timed("the same chunks by zarr alone", lambda: write_plainly(args, store.parent))
    saved = timed("save", lambda: save(features))
    for name, seconds, less in zip(("clock", "CPU"), saved, plain, strict=True):
        block, more = seconds / args.blocks, (seconds - less) / args.blocks
        print(f"  per block: {1e3 * block:.2f} ms by {name}, {1e3 * more:.2f} ms more than zarr "
              f"alone: {100 * more:.2f} % of a block of 1 s")  # fmt: skip
    timed("open", lambda: td.open(store))
    timed("resume (nothing to do; opens, too)", lambda: save(features))
    timed("verify, sizes", lambda: td.verify(store))
    timed("verify, checksums", lambda: td.verify(store, checksums=True))


def free_features(args: argparse.Namespace) -> xr.Dataset:
    simulated = simulate_features(
        n_samples=args.blocks * args.rows,
        proj_dim=args.proj_dim,
        n_checkpoints=1,
        chunks=args.rows,
    )

    def ones(array: xr.DataArray) -> xr.DataArray:
        return array.copy(data=da.ones(array.shape, chunks=array.chunks, dtype=array.dtype))

    return simulated.map(ones, keep_attrs=True)


def write_plainly(args: argparse.Namespace, folder: Path) -> None:
    """Write as many bytes, without records, checksums and dask."""
    group = zarr.create_group(folder / "plain.zarr", zarr_format=3)
    rows = {"feature": (args.rows, args.proj_dim, 1), "output": (args.rows, 1), "q": (args.rows, 1)}
    arrays = [
        group.create_array(
            name, shape=(args.blocks * args.rows, *chunk[1:]), chunks=chunk, dtype="f4",
            compressors=None, fill_value=np.nan,
        )
        for name, chunk in rows.items()
    ]  # fmt: skip
    blocks = [np.ones(chunk, "f4") for chunk in rows.values()]
    for start in range(0, args.blocks * args.rows, args.rows):
        for array, block in zip(arrays, blocks, strict=True):
            array[start : start + args.rows] = block


def timed(what: str, call: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{what:36} {wall:8.2f} s, CPU {cpu:8.2f} s", flush=True)
    return wall, cpu


if __name__ == "__main__":
    main()
