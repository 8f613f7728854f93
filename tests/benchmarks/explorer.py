"""Time of clicks in the explorer: how long a page takes from a click to its HTML.

    python tests/benchmarks/explorer.py [--samples 100000 --proj-dim 1024 --checkpoints 3]

One process opens the stores and asks for pages one after the other, as one user would who clicks;
what the browser and the network between need is not in it. The features are read from the store on
threads; files that were just written are mostly in the page cache. "first" is the first page of its
kind, which computes what the later ones share, such as factors of the gram matrix and λ; "again" is
the median of the same page for other targets or samples. The sections of a page appear one after
the other. CPU time includes all threads; where
others use the machine, trust it rather than the clock.

Features are synthetic, as in queries.py. ``--folder`` keeps the stores for another run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import dask
import numpy as np
import queries
from _machine import parser_of

import trakdask as td
from trakdask.explorer import Explorer
from trakdask.explorer.pages import sections
from trakdask.explorer.view import View

REPEATS = 5


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write(args, folder)
        stack.enter_context(dask.config.set(scheduler="threads", num_workers=args.threads))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", UserWarning)  # of what simulated features are good for
        report(args, folder)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    sizes = {"samples": 100_000, "targets": 1000, "proj_dim": 1024, "checkpoints": 3}
    parser = parser_of(__doc__, **sizes, chunks=4096, threads=2)
    parser.add_argument("--folder", type=Path, help="where to make the stores, and keep them")
    return parser.parse_args(argv)


def write(args: argparse.Namespace, folder: Path) -> None:
    """Save training samples, with their gram matrix, and targets; all have two coords more."""
    for seed, (name, n) in enumerate({"train": args.samples, "targets": args.targets}.items()):
        if not (folder / f"{name}.zarr").exists():
            random = np.random.default_rng(seed)
            coords = {"source": random.choice(["web", "book", "wiki"], n).astype(object),
                      "length": random.integers(0, 1000, n)}  # fmt: skip
            features = queries.simulated(args, n, seed).assign_coords(
                {key: ("sample", values) for key, values in coords.items()}
            )
            if name == "train" and args.checkpoints > 3:
                masks = td.evaluate.subsets(features, args.checkpoints)
                features = features.assign(trained_on=masks.rename(subset="checkpoint"))
            td.save(
                features,
                folder / f"{name}.zarr",
                estimator="auto" if name == "train" else None,
                progress=False,
            )


CLICKS: Mapping[str, Callable[[int], View]] = {
    "targets": lambda i: View(first=24 * i),
    "targets, searched": lambda i: View(search="web", first=24 * i),
    "target": lambda i: View(page="target", target=i),
    "target, filtered": lambda i: View(page="target", target=i, where='source == "web"'),
    "target, sums by group": lambda i: View(page="target", target=i, group_by="source"),
    "sample": lambda i: View(page="sample", sample=i),
    "training samples": lambda i: View(page="corpus", group_by="source", first=24 * i),
    "training samples, self-influence": lambda i: View(
        page="corpus", group_by="source", first=24 * i, order="self_influence"
    ),
}

IN_PARTS = ("targets", "target", "training samples", "training samples, self-influence")
"""Clicks whose sections are shown, too: they appear one after the other."""


def report(args: argparse.Namespace, folder: Path) -> None:
    print(f"n={args.samples} m={args.targets} p={args.proj_dim} C={args.checkpoints}, blocks of "
          f"{args.chunks} rows, {args.threads} threads; seconds by the clock / of CPU")  # fmt: skip
    explorer = td.explore(*(td.open(folder / f"{name}.zarr") for name in ("train", "targets")))
    print(f"{'':32}{'first':>16}{'again':>16}")
    for name, click in CLICKS.items():
        taken = [parts(explorer, click(i)) for i in range(1 + REPEATS)]
        whole = np.array([np.sum(list(each.values()), axis=0) for each in taken])
        print(f"{name:32}{shown(whole[0])}{shown(np.median(whole[1:], axis=0))}", flush=True)
        if name in IN_PARTS:
            for part in list(taken[0])[1:]:
                again = np.median([each[part] for each in taken[1:] if part in each], axis=0)
                print(f"  {part:30}{shown(taken[0][part])}{shown(again)}", flush=True)


def parts(explorer: Explorer, view: View) -> dict[str, np.ndarray]:
    """Return the wall-clock and CPU seconds of each section of a page, by its name."""
    taken = {}
    for name, html in sections(explorer, view).items():
        start = np.array([time.perf_counter(), time.process_time()])
        assert html() or name == "grade", view
        taken[name] = np.array([time.perf_counter(), time.process_time()]) - start
    return taken


def shown(seconds: np.ndarray) -> str:
    return f"{f'{seconds[0]:.2f} / {seconds[1]:.2f}':>16}"


if __name__ == "__main__":
    main(sys.argv[1:])
