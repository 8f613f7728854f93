"""Time every projector on one core, beside traker's.

    taskset -c 1 python tests/benchmarks/projection.py [--rows 100000 2300000 --budget 20]

All engines project the same matrix of gradients, in turns, and every number printed was measured by
this run. What is measured, and what the tables mean: README.md in this folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from _machine import parser_of
from torch import Tensor

from trakdask.projection import SJLT, Mask, Projector, Rademacher, RowMap, fixed_point, project

PEER = "traker"
MASK_ROWS = 65536
SMALL_ROWS = 70_000
WARM_UP = 2.0  # seconds: what is slower counts from its first run
FASTEST_ROUND = 0.05  # seconds: what is faster is run several times in a row
MOST_ROUNDS = 5

Run = Callable[[Tensor], Tensor]


# --- engines --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """One column of the comparison: a projector of some proj_dim, with numba or without."""

    what: str
    projector: Callable[[int], Projector]
    numba: bool = True

    def prepare(self, n_rows: int, proj_dim: int) -> Run:
        """Return what projects gradients of one vector."""
        projector = self.projector(proj_dim)
        row_map = RowMap.from_shapes({"g": (n_rows,)}, alignment=projector.row_alignment)

        def run(gradients: Tensor) -> Tensor:
            os.environ["TRAKDASK_NUMBA"] = str(int(self.numba))
            return project(projector, {"g": gradients}, row_map, 0)

        return run


def prepare_peer(n_rows: int, proj_dim: int) -> Run:
    """Return traker's projector, as ``TRAKer(device="cpu", use_half_precision=False)`` makes it."""
    from trak.projectors import BasicProjector, ProjectionType

    projector = BasicProjector(
        grad_dim=n_rows,
        proj_dim=proj_dim,
        seed=0,
        proj_type=ProjectionType.normal,
        device="cpu",
        dtype=torch.float32,
    )
    return lambda gradients: projector.project(gradients, model_id=0)


ENGINES = {
    "int8x2": Engine("Rademacher, int8x2", Rademacher),
    "int8x2-numpy": Engine("Rademacher, int8x2, without numba", Rademacher, numba=False),
    "int8x1": Engine("Rademacher, int8x1", partial(Rademacher, arithmetic="int8x1")),
    "int8x3": Engine("Rademacher, int8x3", partial(Rademacher, arithmetic="int8x3")),
    "sjlt4": Engine("SJLT, s = 4", SJLT),
    "sjlt4-numpy": Engine("SJLT, s = 4, without numba", SJLT, numba=False),
    "sjlt1": Engine("SJLT, s = 1", partial(SJLT, sparsity=1)),
    "sjlt1-numpy": Engine("SJLT, s = 1, without numba", partial(SJLT, sparsity=1), numba=False),
    "grass": Engine(
        f"Mask, {MASK_ROWS} rows kept, then SJLT, s = 4", lambda p: Mask(MASK_ROWS, then=SJLT(p))
    ),
}


def prepare(name: str, n_rows: int, proj_dim: int) -> Run:
    return (prepare_peer if name == PEER else ENGINES[name].prepare)(n_rows, proj_dim)


def gaussian_gradients(batch: int, n_rows: int) -> Tensor:
    return torch.randn(batch, n_rows, generator=torch.Generator().manual_seed(0))


# --- timing ---------------------------------------------------------------------------------------


def seconds_of(run: Callable[[], object]) -> float:
    """Time one call; the mean of several where one is too short to be timed."""
    start = time.perf_counter()
    run()
    first = time.perf_counter() - start
    if first >= FASTEST_ROUND:
        return first
    n = math.ceil(FASTEST_ROUND / max(first, 1e-6))
    start = time.perf_counter()
    for _ in range(n):
        run()
    return (time.perf_counter() - start) / n


def take_turns(
    runs: dict[str, Run], gradients: Tensor, budget: float, rounds: int
) -> dict[str, list[float]]:
    """Seconds of every engine: round after round, each while its share of the time lasts."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        first = seconds_of(lambda run=run: run(gradients))
        if first >= WARM_UP:
            found[name].append(first)
    names = list(runs)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            spent = found[name]
            mean = statistics.mean(spent) if spent else 0.0
            if len(spent) < rounds and (not spent or sum(spent) + mean <= budget):
                spent.append(seconds_of(lambda run=runs[name]: run(gradients)))
    return found


def times(reference: list[float], seconds: list[float]) -> float:
    """Median of the ratios within a round; the last run of the reference serves later rounds."""
    last = len(reference) - 1
    return statistics.median(reference[min(i, last)] / s for i, s in enumerate(seconds))


@dataclass
class Cell:
    """One engine at one size."""

    engine: str
    n_rows: int
    proj_dim: int
    batch: int
    seconds: list[float]
    times_traker: float | None
    samples_per_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.samples_per_s = self.batch / statistics.median(self.seconds)


def measure_grid(options: argparse.Namespace) -> list[Cell]:
    cells = []
    for n_rows in options.rows:
        for batch in options.batches:
            gradients = gaussian_gradients(batch, n_rows)
            for proj_dim in options.proj_dims:
                print(f"  D = {n_rows}, B = {batch}, p = {proj_dim}", file=sys.stderr, flush=True)
                runs = {name: prepare(name, n_rows, proj_dim) for name in options.engines}
                found = take_turns(runs, gradients, options.budget, options.repeats)
                for name, seconds in found.items():
                    ratio = times(found[PEER], seconds) if PEER in found else None
                    cells.append(Cell(name, n_rows, proj_dim, batch, seconds, ratio))
    return cells


# --- report ---------------------------------------------------------------------------------------


def show_tables(cells: list[Cell]) -> None:
    """Print a table per D and p: batches across, engines down."""
    for n_rows, proj_dim in sorted({(cell.n_rows, cell.proj_dim) for cell in cells}):
        here = [c for c in cells if (c.n_rows, c.proj_dim) == (n_rows, proj_dim)]
        print(f"\nD = {n_rows:,}, p = {proj_dim}: samples per s (times traker)")
        batches = sorted({cell.batch for cell in here})
        print(f"{'':<14}" + "".join(f"{f'B = {batch}':>20}" for batch in batches))
        for name in dict.fromkeys(cell.engine for cell in here):
            texts = {cell.batch: speed_text(cell) for cell in here if cell.engine == name}
            print(f"{name:<14}" + "".join(f"{texts.get(batch, '-'):>20}" for batch in batches))


def speed_text(cell: Cell) -> str:
    ratio = "" if cell.times_traker is None else f" ({cell.times_traker:.3g})"
    return f"{cell.samples_per_s:.4g}{ratio}"


# --- the run --------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    names = [PEER, *ENGINES]
    sizes = {"rows": [100_000], "proj_dims": [512, 2048, 4096], "batches": [1, 32, 512]}
    parser = parser_of(__doc__, **sizes, repeats=MOST_ROUNDS, budget=5.0)
    parser.add_argument("--engines", nargs="+", choices=names, default=names)
    options = parser.parse_args(argv)
    if PEER in options.engines and importlib.util.find_spec("trak") is None:
        parser.error(f"{PEER} is not installed. Type pip install traker==0.3.2, or --engines.")
    return options


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(1)
    # What the package measured to be the fastest on this machine.
    dense = "int8" if fixed_point.int8_matmul_is_usable() else "float32"
    print(f"{'dense products':>14}: {dense}")
    for name in options.engines:
        print(f"{name:>14}  {'its BasicProjector' if name == PEER else ENGINES[name].what}")
        prepare(name, SMALL_ROWS, 512)(gaussian_gradients(2, SMALL_ROWS))
    show_tables(measure_grid(options))


if __name__ == "__main__":
    main()
