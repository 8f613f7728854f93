"""LDS of several packages on the tasks of the quality benchmark, by the same checkpoints.

    python tests/benchmarks/leaderboard.py --cache demo-output/quality

Every method has a process for each task. Where a package does not combine checkpoints, its scores
of single ones are averaged and the costs added. CPU seconds are without imports; peak memory is of
the process, with torch. What is finished is kept, so the same command goes on after an
interruption; ``--again`` runs ``--methods`` anew, and ``--finished`` only prints what is there.
README.md in this folder says how to make the environments of the other packages.

Settings that are not a package's default are dampings. The best is chosen in hindsight, by the LDS
itself, which nobody can do without retraining.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from _fits import ALL
from _leaderboard_peers import CPU_LIMIT, DEFAULT, METHODS
from _machine import ROOT, parser_of
from _quality_damping import half_checkpoints
from _quality_truth import checkpoints, ground

import trakdask as td

#: Two perceptrons, convolutions without and with BatchNorm, two transformers, a table.
TASKS = ("wine", "mlp", "noisy", "cnn", "resnet", "transformer", "language")
COSTS_OF = "cnn"
RESAMPLES = 100
SCRIPT = Path(__file__).with_name("_leaderboard_peers.py")


def cells(name: str, task: str, options: Any) -> dict[str, Any]:
    """Return LDS and costs by the number of checkpoints, or an error; finished ones are kept."""
    path = options.cache / "leaderboard" / f"{name}-{task}.json"
    if options.finished and not path.exists():
        return {}
    python = options.environments / METHODS[name].environment / "bin" / "python"
    if METHODS[name].environment and not python.exists():
        return {"error": f"no {python}; see README.md"}
    if not path.exists() or options.again:
        path.parent.mkdir(parents=True, exist_ok=True)
        results = process(name, task, path.with_suffix(".npz"), options)
        if "error" not in results:
            scores = np.load(path.with_suffix(".npz"))
            for key in scores.files:
                n, setting = key.split("|")
                results[n].setdefault("lds", {})[setting] = lds(scores[key], task)
        path.write_text(json.dumps(results))
        print(name, task, str(results)[:150], file=sys.stderr, flush=True)
    kept: dict[str, Any] = json.loads(path.read_text())
    return kept


def process(name: str, task: str, path: Path, options: Any) -> dict[str, Any]:
    """Run a method in its environment; return what it printed last, its costs."""
    method, subject = METHODS[name], ALL[task]
    trained = half_checkpoints if method.halves else checkpoints
    files = trained(subject, options.cache, max(method.checkpoints))
    folder = options.environments / method.environment / "bin" / "python"
    python = str(folder) if method.environment else sys.executable
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(
        [python, "-W", "ignore", str(SCRIPT), name, task, str(path), *map(str, files)],
        env={**os.environ, **threads, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode == 0:
        costs: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return costs
    lines = done.stderr.strip().splitlines()
    ended = f"ended by signal {-done.returncode}, after {CPU_LIMIT} CPU s if by 24"
    return {"error": ended if done.returncode < 0 else lines[-1][:200]}


@cache
def truth(task: str) -> tuple[xr.DataArray, xr.DataArray]:
    return ground(ALL[task])


def lds(scores: np.ndarray, task: str) -> list[float]:
    """Return the LDS and its interval of 95 %; scores that are not numbers count as 0."""
    labelled = xr.DataArray(np.nan_to_num(scores), dims=("sample", "target"))
    result = td.evaluate.lds(labelled, *truth(task), resamples=RESAMPLES).compute()
    return [round(float(x), 4) for x in (result.lds_mean, *result.interval.values)]


# --- tables ---------------------------------------------------------------------------------------


def text_of(lds: list[float]) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*lds)


def rows_of(options: Any) -> list[dict[str, Any]]:
    """Return a row for every cell, tasks in their order, so that small ones come first."""
    rows = []
    for task, name in product(options.tasks, options.methods):
        if METHODS[name].tasks(ALL[task]):
            results, about = cells(name, task, options), {"task": task, "method": name}
            rows += [about | results] if "error" in results else [
                about | {"n": int(n)} | row for n, row in results.items()
            ]  # fmt: skip
    return rows


def print_task(task: str, rows: list[dict[str, Any]]) -> None:
    """Print each method's default, and its best damping in hindsight."""
    table = []
    for row in (row for row in rows if "lds" in row):
        best = max(row["lds"], key=lambda setting: row["lds"][setting][0])
        table.append({
            "method": row["method"], "n": row["n"], "LDS": text_of(row["lds"][DEFAULT]),
            "best": text_of(row["lds"][best]) if best != DEFAULT else "",
            "at": best if best != DEFAULT else "", "CPU s": f"{row['cpu']:.1f}",
            "peak MB": f"{row['peak'] / 1e6:.0f}", "kept MB": f"{row['kept'] / 1e6:.1f}",
        })  # fmt: skip
    drawn, outputs = truth(task)
    ceiling = float(td.evaluate.lds(
        xr.DataArray(np.random.default_rng(0).standard_normal((drawn.sizes["sample"],
        outputs.sizes["target"])), dims=("sample", "target")), drawn, outputs, resamples=1,
    ).ceiling_mean)  # fmt: skip
    print(f"\n{task}: {drawn.sizes['sample']} samples, ceiling {ceiling:.3f}")
    print(pd.DataFrame(table).to_string(index=False))


def print_summary(rows: list[dict[str, Any]], tasks: list[str]) -> None:
    """Print the table of the page: a pair of LDS, by the two numbers of checkpoints."""
    by_task: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in (row for row in rows if "lds" in row):
        by_task.setdefault((row["method"], row["task"]), []).append(row)
    print(f"\n| method | {' | '.join(tasks)} | CPU s, {COSTS_OF} |")
    print("|---" * (len(tasks) + 2) + "|")
    for method, best in product(dict.fromkeys(row["method"] for row in rows), (False, True)):
        runs = [by_task.get((method, task), []) for task in (*tasks, COSTS_OF)]
        if not best or any(len(row["lds"]) > 1 for some in runs for row in some):
            cells = [", ".join(f"{chosen(row, best):.3f}" for row in some) for some in runs[:-1]]
            costs = ", ".join(f"{row['cpu']:.1f}" for row in runs[-1] if not best)
            print(f"| {method}{', best λ' * best} | {' | '.join(cells)} | {costs} |")


def chosen(row: dict[str, Any], best: bool) -> float:
    lds: dict[str, list[float]] = row["lds"]
    return max(value[0] for value in lds.values()) if best else lds[DEFAULT][0]


def main() -> None:
    parser = parser_of(
        __doc__ or "", cache=Path("demo-output/quality"), environments=Path("demo-output/peers"),
        tasks=list(TASKS), methods=list(METHODS),
    )  # fmt: skip
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--finished", action="store_true")
    options = parser.parse_args()
    rows = rows_of(options)
    for task in options.tasks:
        print_task(task, [row for row in rows if row["task"] == task])
    print_summary(rows, options.tasks)
    print("\nDid not run")
    for row in (row for row in rows if "error" in row):
        print(f"{row['method']}, {row['task']}: {row['error']}")


if __name__ == "__main__":
    main()
