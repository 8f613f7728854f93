"""Peak memory of gram, score and top_k on features that exceed a memory budget.

    python tests/benchmarks/memory.py [--samples 200000 --proj-dim 1024 --targets 200 ...]

The features are written to a store first, by another process: what is measured is one process that
opens the store, reduces the gram matrices, solves, scores and ranks, on two threads.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import dask
import numpy as np
from _machine import parser_of, peak_memory

import trakdask as td
from trakdask import testing


def main() -> None:
    args = parse_args()
    if args.stage == "write":
        write(args)
    elif args.stage == "measure":
        measure(args)
    else:
        run_stages()


def parse_args() -> argparse.Namespace:
    sizes = {"samples": 200_000, "targets": 200, "proj_dim": 1024, "checkpoints": 2}
    parser = parser_of(__doc__, **sizes, chunks=4096, k=10)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--stage", choices=["write", "measure"], help=argparse.SUPPRESS)
    return parser.parse_args()


def run_stages() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for stage in ("write", "measure"):
            order = [*sys.argv[1:], "--stage", stage, "--folder", folder]
            subprocess.run([sys.executable, __file__, *order], check=True)


def write(args: argparse.Namespace) -> None:
    for name, n in (("train", args.samples), ("targets", args.targets)):
        features = testing.simulate_features(
            n, args.proj_dim, args.checkpoints, chunks=args.chunks, seed=len(name)
        )
        with dask.config.set(scheduler="threads", num_workers=2):
            td.save(features, args.folder / f"{name}.zarr", estimator=None, progress=False)


def measure(args: argparse.Namespace) -> None:
    before = peak_memory()
    features, targets = (td.open(args.folder / f"{name}.zarr") for name in ("train", "targets"))
    size = features.feature.nbytes
    with dask.config.set(scheduler="threads", num_workers=2):
        start = time.perf_counter()
        gram = td.gram(features).persist()
        gram_seconds, gram_rss = time.perf_counter() - start, peak_memory()
        start = time.perf_counter()
        scores = td.score(features.assign(gram=gram), targets)
        top = td.top_k(scores, args.k).compute()
        top_seconds, top_rss = time.perf_counter() - start, peak_memory()
    print(
        f"n={args.samples} p={args.proj_dim} m={args.targets} C={args.checkpoints}: features "
        f"{size / 1e9:.2f} GB, scores {4e-9 * args.samples * args.targets:.2f} GB"
    )
    print(f"peak RSS at start          {before / 1e6:8.0f} MB")
    print(f"peak RSS after gram        {gram_rss / 1e6:8.0f} MB   {gram_seconds:6.1f} s")
    print(f"peak RSS after top_k       {top_rss / 1e6:8.0f} MB   {top_seconds:6.1f} s")
    check(features, targets, gram, top)


def check(features, targets, gram, top) -> None:  # type: ignore[no-untyped-def]
    """Compare the ranking of the first target with float64 numpy, block by block."""
    total = np.zeros(features.sizes["sample"])
    for c in range(features.sizes["checkpoint"]):
        k = gram.isel(checkpoint=c).values.astype("f8")
        damping = 0.03 * np.sum(k * k) / np.trace(k)
        phi = targets.feature.isel(checkpoint=c, sample=0).values.astype("f8")
        solved = np.linalg.solve(k + damping * np.eye(len(k)), phi)
        blocks = features.feature.isel(checkpoint=c).data.blocks
        total += np.concatenate([blocks[i].compute() @ solved for i in range(blocks.size)])
    total *= features.out_to_loss.values.mean(1)
    best = np.argsort(-total)[: top.sizes["rank"]]
    same = np.array_equal(best, top.position.values[0])
    print(f"ranking of the first target equals float64 numpy: {same}")


if __name__ == "__main__":
    main()
