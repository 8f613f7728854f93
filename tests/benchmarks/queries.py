"""Time of repeated queries on a store: the first and the second ``top_k``, beside their bound.

    python tests/benchmarks/queries.py [--samples 100000 --proj-dim 2048 --checkpoints 3]

Every row is a fresh process, after its imports (and the start of its cluster): it opens the stores,
asks for the ten best training samples of some targets, and asks again for other targets. On
"threads" and "cluster" (worker processes with one thread each) the features are read from the
store; where they are "persisted", ``features.persist()`` comes first and is timed apart. The
workers of a "fresh" cluster import nothing before the first query. λ and the estimator are the
defaults. CPU time includes all processes; where others use the machine, trust it rather than the
clock.

The bound is one thread with NumPy alone: the files of the features read by ``np.fromfile``; and
products with vectors that are already solved, in memory, then ``np.argpartition``.

Features are synthetic, with eigenvalues that fall as 1/k, and outputs that follow the totals of
attributions, so that outputs can choose λ. ``--folder`` keeps the stores for another run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import dask
import numpy as np
import xarray as xr
from _machine import in_a_process, parser_of, timed
from distributed import Client, LocalCluster, futures_of, wait

import trakdask as td
from trakdask import testing

WHERE = ("threads", "threads, persisted", "cluster", "cluster, persisted", "cluster, fresh")
COLUMNS = ("imports", "persist", "first", "second")
K = 10


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.where:
        measured = bound(args, args.folder) if args.where == "bound" else measure(args)
        print(json.dumps(measured))
        return
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write(args, folder)
        report(args, folder)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    sizes = {"samples": 100_000, "targets": [1, 10, 100], "proj_dim": 2048, "checkpoints": 3}
    parser = parser_of(__doc__, **sizes, chunks=4096, workers=2)
    parser.add_argument("--folder", type=Path, help="where to make the stores, and keep them")
    parser.add_argument("--only", nargs="+", choices=WHERE, default=WHERE)
    parser.add_argument("--where", choices=(*WHERE, "bound"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# --- stores ---------------------------------------------------------------------------------------


def write(args: argparse.Namespace, folder: Path) -> None:
    """Save training samples, with their gram matrix, and targets."""
    n_targets = 2 * max(args.targets)
    sides = {"train": args.samples, "targets": n_targets}
    lazy = {name: simulated(args, n, seed) for seed, (name, n) in enumerate(sides.items())}
    if any(not (folder / f"{name}.zarr").exists() for name in sides):
        step = newton_step(lazy["train"])
        for name, features in lazy.items():
            td.save(
                features.assign(output=followed(features, step)),
                folder / f"{name}.zarr",
                estimator="auto" if name == "train" else None,
                progress=False,
            )


def simulated(args: argparse.Namespace, n: int, seed: int) -> xr.Dataset:
    features = testing.simulate_features(
        n, args.proj_dim, args.checkpoints, chunks=args.chunks, seed=seed
    )
    scale = xr.DataArray(np.arange(1, args.proj_dim + 1, dtype=np.float32) ** -0.5, dims="proj_dim")
    about = {"task": "ImageClassification()", "label": "label", "batch_norm": False}
    return features.assign(feature=features.feature * scale).assign_attrs(about)


def newton_step(features: xr.Dataset) -> xr.DataArray:
    """Return (K + λI)⁻¹ r at λ = tr(K)/n, but that K is replaced by its expected diagonal."""
    g = features.out_to_loss.mean("checkpoint") ** 0.5
    loss = (features.feature * g).sum("sample").compute()
    variances = np.arange(1, features.sizes["proj_dim"] + 1) ** -1.0
    weight = 0.27  # the mean of q^½ (1 - q) for q uniform in [0, 1]
    system = weight * (features.sizes["sample"] * variances + variances.sum())
    return loss / xr.DataArray(system.astype(np.float32), dims="proj_dim")


def followed(features: xr.Dataset, step: xr.DataArray) -> xr.DataArray:
    """Return outputs that are the totals of attributions and a third of noise, lazy."""
    total = (features.feature * step).sum("proj_dim")
    scale = float(abs(step).sum()) / step.size
    return (total + scale * (features.output - 0.5)).astype(np.float32)


# --- measuring ------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return wall and CPU seconds of persisting and of both queries."""
    (m,) = args.targets
    with ExitStack() as stack:
        taken = {"imports": timed(imports)}
        if args.where == "cluster, fresh":
            del sys.modules["__main__"].__file__  # workers import the script that starts them
        if args.where.startswith("cluster"):
            cluster = LocalCluster(
                n_workers=args.workers, threads_per_worker=1, dashboard_address=":0"
            )
            client = stack.enter_context(Client(stack.enter_context(cluster)))
            if args.where != "cluster, fresh":
                client.run(imports)
        else:
            stack.enter_context(dask.config.set(scheduler="threads", num_workers=args.workers))
        opened: list[xr.Dataset] = []
        if "persisted" in args.where:
            taken["persist"] = timed(lambda: opened.append(persisted(args.folder)))
        taken["first"] = timed(lambda: query(args.folder, opened, slice(0, m)))
        taken["second"] = timed(lambda: query(args.folder, opened, slice(m, 2 * m)))
        return taken


def imports() -> None:
    """Import what queries need: the package imports its modules when they are first used."""
    for name in ("open", "score", "top_k"):
        getattr(td, name)


def persisted(folder: Path) -> xr.Dataset:
    features = td.open(folder / "train.zarr").persist()
    if futures_of(features):  # on a cluster persist returns at once
        wait(features)
    return features


def query(folder: Path, opened: list[xr.Dataset], rows: slice) -> None:
    if not opened:
        opened.append(td.open(folder / "train.zarr"))
    targets = td.open(folder / "targets.zarr").isel(sample=rows)
    td.top_k(td.score(opened[0], targets), K).compute()


def bound(args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of one thread for reading the files, and for products and rankings."""
    files = sorted((folder / "train.zarr" / "feature").glob("c.*"))

    def read() -> None:
        for file in files:
            np.fromfile(file, np.uint8)

    read()  # from the page cache, as the queries
    taken = {"np.fromfile": timed(read)}
    rng = np.random.default_rng(0)
    block = rng.standard_normal((args.chunks, args.proj_dim), dtype=np.float32)
    n_blocks = -(-args.samples // args.chunks)
    blocks = [block.copy() for _ in range(n_blocks * args.checkpoints)]  # not from any cache
    for m in args.targets:
        solved = rng.standard_normal((m, args.proj_dim), dtype=np.float32)

        def product(solved: np.ndarray = solved) -> None:
            for start in range(0, len(blocks), args.checkpoints):
                score = sum(x @ solved.T for x in blocks[start : start + args.checkpoints])
                np.argpartition(score.T, -min(K, args.chunks), axis=1)

        product()
        taken[f"products and argpartition, {m}"] = timed(product)
    return taken


# --- report ---------------------------------------------------------------------------------------


def report(args: argparse.Namespace, folder: Path) -> None:
    print(f"n={args.samples} p={args.proj_dim} C={args.checkpoints}, blocks of {args.chunks} rows, "
          f"{args.workers} threads or processes; seconds by the clock / of CPU")  # fmt: skip
    for what, taken in run(args, folder, "bound").items():
        print(f"  bound, {what:32} {taken[0]:6.2f} / {taken[1]:5.2f}")
    print(f"{'':20}{'targets':>8}" + "".join(f"{name:>16}" for name in COLUMNS))
    for where in args.only:
        for m in args.targets:
            taken = run(args, folder, where, m)
            shown = [taken.get(name) for name in COLUMNS]
            columns = [f"{s[0]:6.2f} / {s[1]:5.2f}" if s else "" for s in shown]
            print(f"{where:20}{m:8}" + "".join(f"{column:>16}" for column in columns), flush=True)


def run(
    args: argparse.Namespace, folder: Path, where: str, targets: int | None = None
) -> dict[str, list[float]]:
    names = ("samples", "proj-dim", "checkpoints", "chunks", "workers", "folder")
    options = {**vars(args), "folder": folder}
    sizes = [f"--{name}={options[name.replace('-', '_')]}" for name in names]
    asked = map(str, args.targets if targets is None else [targets])
    result: dict[str, list[float]] = in_a_process(
        __file__, "--where", where, *sizes, "--targets", *asked
    )
    return result


if __name__ == "__main__":
    main()
