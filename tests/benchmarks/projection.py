"""Time every projector on one core, beside traker's and beside what the machine can do.

    taskset -c 1 python tests/benchmarks/projection.py [--rows 100000 2300000 --budget 20]

All engines project the same matrix of gradients, in turns, and every number printed was measured by
this run. What is measured, and what the tables mean: README.md in this folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from _machine import cpu_name, version_of
from _projection_parts import (
    PEER,
    SMALL_ROWS,
    Run,
    accuracy,
    engines,
    forget_peak,
    gaussian_gradients,
    own_engines,
    peak_mb,
    roofs,
    same_bits,
    seconds_of,
    warm_up,
    working_memory,
)
from torch import Tensor

import trakdask as td
from trakdask import examples
from trakdask.projection import integer_products

WARM_UP = 2.0  # seconds: what is slower counts from its first run
MOST_ROUNDS = 5


# --- timing ---------------------------------------------------------------------------------------


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
    roof_share: float | None = None
    samples_per_s: float = field(init=False)
    ns_per_element: float = field(init=False)

    def __post_init__(self) -> None:
        median = statistics.median(self.seconds)
        self.samples_per_s = self.batch / median
        self.ns_per_element = 1e9 * median / (self.batch * self.n_rows)


def measure_cell(options: argparse.Namespace, gradients: Tensor, proj_dim: int) -> list[Cell]:
    batch, n_rows = gradients.shape
    runs = {name: engines()[name].prepare(n_rows, proj_dim) for name in options.engines}
    found = take_turns(runs, gradients, options.budget, options.repeats)
    return [
        Cell(
            name,
            n_rows,
            proj_dim,
            batch,
            seconds,
            times_traker=times(found[PEER], seconds) if PEER in found else None,
        )
        for name, seconds in found.items()
    ]


def measure_grid(options: argparse.Namespace) -> tuple[list[Cell], list[Any]]:
    cells: list[Cell] = []
    memory = []
    for n_rows in options.rows:
        for batch in options.batches:
            gradients = gaussian_gradients(batch, n_rows)
            for proj_dim in options.proj_dims:
                say(f"D = {n_rows}, B = {batch}, p = {proj_dim}")
                cells += measure_cell(options, gradients, proj_dim)
            memory.append((n_rows, batch, gradients.nbytes / 1e6, peak_mb()))
            del gradients
    return cells, memory


def add_roof_shares(cells: list[Cell], roof: float) -> None:
    for cell in cells:
        engine = engines()[cell.engine]
        if operations := engine.dense_operations(cell.n_rows, cell.proj_dim):
            cell.roof_share = operations * cell.samples_per_s / roof


# --- goals ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """A number that was promised; ``values`` finds what was measured, the worst of which counts."""

    what: str
    values: list[float]
    at_least: float | None = None
    at_most: float | None = None

    def line(self) -> str:
        bound = f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"
        if not self.values:
            return f"{'not measured':<14}{'':>12}  {bound:<9} {self.what}"
        worst = min(self.values) if self.at_least is not None else max(self.values)
        met = worst >= self.at_least if self.at_least is not None else worst <= self.at_most
        return f"{'yes' if met else 'NO':<14}{worst:>12.3g}  {bound:<9} {self.what}"


def goals(cells: list[Cell], errors: dict[str, Any]) -> list[Goal]:
    def ratios(name: str, keep: Callable[[Cell], bool]) -> list[float]:
        mine = [cell for cell in cells if cell.engine == name and keep(cell)]
        return [cell.times_traker for cell in mine if cell.times_traker is not None]

    def roof(cell: Cell) -> bool:
        return cell.engine == "int8x2" and cell.batch == 512 and cell.proj_dim == 4096

    def error(name: str) -> list[float]:
        return [errors[name]["Gaussian"]] if name in errors else []

    usual = "B = 32, p >= 2048"
    return [
        Goal(f"int8x2 times traker, {usual}", ratios("int8x2", is_usual), at_least=10),
        Goal("int8x2 times traker, B = 512, p = 4096", ratios("int8x2", roof), at_least=6),
        Goal("int8x2 times traker, everywhere", ratios("int8x2", lambda _: True), at_least=3),
        Goal(f"without numba times traker, {usual}", ratios("int8x2-numpy", is_usual), at_least=4),
        Goal(
            "int8x2 share of the int8 roof, B = 512, p = 4096",
            [cell.roof_share for cell in cells if roof(cell) and cell.roof_share is not None],
            at_least=0.6,
        ),
        Goal(
            "SJLT s = 4 times int8x2, B = 32, p = 4096",
            sjlt_times(cells, "int8x2"),
            at_least=10,
        ),
        Goal("relative error, int8x1", error("int8x1"), at_most=2e-2),
        Goal("relative error, int8x2", error("int8x2"), at_most=2e-4),
        Goal("relative error, int8x3", error("int8x3"), at_most=1e-6),
    ]


def is_usual(cell: Cell) -> bool:
    return cell.batch == 32 and cell.proj_dim >= 2048


def sjlt_times(cells: list[Cell], dense_engine: str) -> list[float]:
    here = {
        (cell.engine, cell.n_rows): cell.seconds
        for cell in cells
        if cell.batch == 32 and cell.proj_dim == 4096
    }
    sizes = sorted({n_rows for _, n_rows in here})
    pairs = [(here.get((dense_engine, n)), here.get(("sjlt4", n))) for n in sizes]
    return [times(of_dense, of_sjlt) for of_dense, of_sjlt in pairs if of_dense and of_sjlt]


# --- report ---------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def facts() -> dict[str, Any]:
    versions = {name: version_of(name) for name in ("torch", "numpy", "numba", "traker")}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "any"
    return {
        "date": date.today().isoformat(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "cores allowed": cores,
        "load before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "trakdask": td.__version__,
        **versions,
        "dense products": chosen_way(),
    }


def chosen_way() -> str:
    """What the package measured to be the fastest on this machine."""
    return "torch._int_mm" if integer_products.int8_matmul_is_usable() else "float32"


def show_tables(cells: list[Cell]) -> None:
    """Two tables per D and p: batches across, engines down."""
    for n_rows, proj_dim in sorted({(cell.n_rows, cell.proj_dim) for cell in cells}):
        here = [c for c in cells if (c.n_rows, c.proj_dim) == (n_rows, proj_dim)]
        title = f"D = {n_rows:,}, p = {proj_dim}"
        show_table(f"{title}: samples per s (times traker)", here, speed_text)
        show_table(f"{title}: ns per gradient element (share of int8 roof)", here, cost_text)


def speed_text(cell: Cell) -> str:
    ratio = "" if cell.times_traker is None else f" ({cell.times_traker:.3g})"
    return f"{cell.samples_per_s:.4g}{ratio}"


def cost_text(cell: Cell) -> str:
    share = "" if cell.roof_share is None else f" ({cell.roof_share:.0%})"
    return f"{cell.ns_per_element:.3g}{share}"


def show_table(title: str, cells: list[Cell], text: Callable[[Cell], str]) -> None:
    batches = sorted({cell.batch for cell in cells})
    print(f"\n{title}\n{'':<14}" + "".join(f"{f'B = {batch}':>20}" for batch in batches))
    for name in dict.fromkeys(cell.engine for cell in cells):
        found = {cell.batch: text(cell) for cell in cells if cell.engine == name}
        print(f"{name:<14}" + "".join(f"{found.get(batch, '-'):>20}" for batch in batches))


def show_markdown(cells: list[Cell]) -> None:
    """Print one table per D for the documentation: samples per second and times traker."""
    names = list(dict.fromkeys(cell.engine for cell in cells))
    for n_rows in sorted({cell.n_rows for cell in cells}):
        print(f"\nSamples per second (times traker), D = {n_rows:,}\n")
        print("| p | B | " + " | ".join(names) + " |")
        print("|---:|---:|" + "---:|" * len(names))
        here = {(c.proj_dim, c.batch, c.engine): c for c in cells if c.n_rows == n_rows}
        for proj_dim, batch in sorted({key[:2] for key in here}):
            row = [here.get((proj_dim, batch, name)) for name in names]
            texts = ["" if cell is None else speed_text(cell) for cell in row]
            print(f"| {proj_dim} | {batch} | " + " | ".join(texts) + " |")


def int8_roof(rates: dict[str, float]) -> float:
    return max(rate for name, rate in rates.items() if name.startswith("int8 product"))


def show_roofs(rates: dict[str, float]) -> None:
    print("\nroofs, per second")
    for name, rate in rates.items():
        print(f"{rate / 1e9:>10.1f}e9  {name}")


def show_errors(errors: dict[str, Any]) -> None:
    print("\nrelative error against float64, B = 8, D = 100,000, p = 512")
    columns = list(next(iter(errors.values()), {}))
    print(f"{'':<14}" + "".join(f"{column:>16}" for column in columns))
    for name, row in errors.items():
        print(f"{name:<14}" + "".join(f"{row[column]:>16.2e}" for column in columns))


def show_bits(found: dict[str, dict[str, bool]]) -> None:
    print(f"\nbits of the features, B = 8, D = {SMALL_ROWS:,}, p = 320")
    columns = list(next(iter(found.values()), {}))
    print(f"{'':<14}" + "".join(f"{column:>18}" for column in columns))
    for name, row in found.items():
        texts = ["equal" if row[column] else "DIFFERENT" for column in columns]
        print(f"{name:<14}" + "".join(f"{text:>18}" for text in texts))


def show_memory(found: dict[str, float], n_rows: int) -> None:
    print(f"\nworking memory beside the gradients, MB: D = {n_rows:,}, B = 32, p = 2048")
    for name, megabytes in found.items():
        print(f"{name:<14}{megabytes:>10.1f}")


def show_plan(names: list[str]) -> None:
    """Print what ``td.plan`` says of these projectors for the demo's model, and its time."""
    train, _ = examples.digits()
    first, *others = dict.fromkeys(e.projector(2048) for e in own_engines(names).values())
    features = td.featurize(train, td.Model(examples.digits_cnn()), projector=first)
    start = time.perf_counter()
    plan = td.plan(features, others)
    print(f"\ntd.plan, {1e3 * (time.perf_counter() - start):.1f} ms\n{plan!r}")


# --- the run --------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[100_000])
    parser.add_argument("--proj-dims", nargs="+", type=int, default=[512, 2048, 4096])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 512])
    parser.add_argument("--engines", nargs="+", choices=list(engines()), default=list(engines()))
    parser.add_argument("--repeats", type=int, default=MOST_ROUNDS, help="at most")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds per engine and size")
    parser.add_argument("--markdown", action="store_true", help="also print tables for the docs")
    parser.add_argument("--out", type=Path, help="write everything measured as JSON")
    options = parser.parse_args(argv)
    if PEER in options.engines and importlib.util.find_spec("trak") is None:
        parser.error(f"{PEER} is not installed. Type pip install -e '.[peers]', or --engines.")
    return options


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(1)
    header = facts()
    for name, value in header.items():
        print(f"{name:>14}: {value}")
    for name in options.engines:
        print(f"{name:>14}  {engines()[name].what}")
    warm_up(options.engines)
    rates = roofs(options.batches)
    errors, bits = accuracy(options.engines), same_bits(options.engines)
    show_errors(errors)
    show_bits(bits)
    if hasattr(td, "plan"):
        show_plan(options.engines)
    largest = max(options.rows)
    working = working_memory(options.engines, largest, 32, 2048)
    show_memory(working, largest)
    forget_peak()
    cells, memory = measure_grid(options)
    # Measured at both ends of the run, the better one counts: what else ran cannot lower the roof.
    rates = {name: max(rate, rates[name]) for name, rate in roofs(options.batches).items()}
    show_roofs(rates)
    add_roof_shares(cells, int8_roof(rates))
    show_tables(cells)
    print("\npeak memory of the process so far, MB")
    for n_rows, batch, held, peak in memory:
        print(f"  after D = {n_rows:,}, B = {batch}: {peak:,.0f}; the gradients {held:,.0f} of it")
    print("\ngoals: the worst value measured")
    promised = goals(cells, errors)
    print("\n".join(goal.line() for goal in promised))
    if options.markdown:
        show_markdown(cells)
    if options.out:
        found = {"facts": header, "roofs": rates, "errors": errors, "bits": bits}
        found |= {"working_memory_mb": working, "peak_memory_mb": memory}
        found |= {"cells": [vars(c) for c in cells], "goals": [vars(g) for g in promised]}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
