"""Time of soft scores at a fixed damping and at the automatic one, in turns in one process.

    python tests/benchmarks/scoring.py [--samples 50000 --proj-dim 2048 --targets 500 ...]

Features are synthetic, with eigenvalues that fall as 1/k, and outputs that follow their totals, so
that the targets choose λ. They are read from stores without gram matrices: those are part of both
times.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import dask
import numpy as np
import xarray as xr

import trakdask as td
from trakdask import testing


def main() -> None:
    args = parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        dask.config.set(scheduler="threads", num_workers=args.threads),
    ):
        features, targets = write(args, Path(folder))
        seconds: dict[str, list[float]] = {"fixed": [], "auto": []}
        processor: dict[str, list[float]] = {"fixed": [], "auto": []}
        for _ in range(args.repeats):
            for name, chosen_by in (
                ("fixed", {"damping": 0.03}),
                ("auto", {"damping": "auto", "calibrate": targets}),
            ):
                start, used = time.perf_counter(), time.process_time()
                td.score(features, targets, estimator="soft", **chosen_by).compute()
                seconds[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - used)
        chosen = td.damping(features, estimator="soft", calibrate=targets).compute()
        report(args, seconds, processor, chosen)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--proj-dim", type=int, default=2048)
    parser.add_argument("--targets", type=int, default=500)
    parser.add_argument("--checkpoints", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def write(args: argparse.Namespace, folder: Path) -> tuple[xr.Dataset, xr.Dataset]:
    """Save both sides and open them, with outputs that are nearly the totals at λ = tr(K)/n."""
    opened = []
    scale = xr.DataArray(np.arange(1, args.proj_dim + 1, dtype=np.float32) ** -0.5, dims="proj_dim")
    for name, n in (("train", args.samples), ("targets", args.targets)):
        made = testing.simulate_features(
            n, args.proj_dim, args.checkpoints, chunks=args.chunks, seed=len(name)
        )
        made = made.assign(feature=made.feature * scale)
        opened.append(td.save(made, folder / f"{name}.zarr", gram=False, progress=False))
    features, targets = opened
    step = (features.feature * features.out_to_loss.mean("checkpoint")).sum("sample").compute()
    step = step / (args.samples * scale**2 + (scale**2).sum())
    followed = (targets.feature * step).sum("proj_dim").compute()
    followed += (
        0.3 * float(followed.std()) * np.random.default_rng(0).standard_normal(followed.shape)
    )
    return features, targets.assign(output=followed.chunk(sample=args.chunks, checkpoint=1))


def report(
    args: argparse.Namespace,
    seconds: dict[str, list[float]],
    processor: dict[str, list[float]],
    chosen: xr.Dataset,
) -> None:
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, ", end="")
    print(f"{args.threads} threads, {time.strftime('%Y-%m-%d')}")
    sizes = f"n={args.samples} p={args.proj_dim} m={args.targets} C={args.checkpoints}"
    print(f"{sizes}: soft scores, medians of {args.repeats}")
    for kind, measured in (("wall clock", seconds), ("processor time", processor)):
        fixed, auto = (statistics.median(measured[name]) for name in ("fixed", "auto"))
        print(f"  {kind:15} fixed {fixed:6.2f} s, auto {auto:6.2f} s, ratio {auto / fixed:.2f}")
    print(f"  chosen {float(chosen.relative):.3g} tr(K)/n by {chosen.rule.values}")


if __name__ == "__main__":
    main()
