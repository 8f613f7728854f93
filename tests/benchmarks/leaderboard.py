"""LDS of several packages on the tasks of the quality benchmark, by the same checkpoints.

    python tests/benchmarks/leaderboard.py --cache demo-output/quality --environments demo-output/peers

Each cell (method, task, number of checkpoints) is one process, or one for each checkpoint where the
package does not combine checkpoints: then scores are averaged and costs added. Finished cells are
kept, so the same command goes on after an interruption. ``--again`` runs those of ``--methods``
anew. README.md in this folder says how to make the environments of the other packages.

Settings that are not a package's default are dampings. The best is chosen in hindsight, by the LDS
itself, which nobody can do without retraining.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from _fits import ALL
from _leaderboard_peers import DEFAULT, METHODS
from _machine import ROOT, parser_of
from _quality_damping import half_checkpoints
from _quality_truth import checkpoints, ground

import trakdask as td

#: Two perceptrons, convolutions without and with BatchNorm, two transformers, two tables.
TASKS = ("wine", "diabetes", "mlp", "noisy", "cnn", "resnet", "transformer", "language")
RESAMPLES = 300
SCRIPT = Path(__file__).with_name("_leaderboard_peers.py")


class Runs:
    """Scores of methods, made where the cache has them not."""

    def __init__(self, cache: Path, environments: Path) -> None:
        self.cache, self.environments = cache, environments

    def cell(self, name: str, task: str, n: int, again: bool) -> dict[str, Any]:
        """Return LDS, intervals and cost of every setting of a method, or its error."""
        path = self.cache / "leaderboard" / f"{name}-{task}-{n}.json"
        if not path.exists() or again:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self._measured(name, task, n, again)))
            print(name, task, n, path.read_text()[:90], file=sys.stderr, flush=True)
        row: dict[str, Any] = json.loads(path.read_text())
        return row

    def _measured(self, name: str, task: str, n: int, again: bool) -> dict[str, Any]:
        method, subject = METHODS[name], ALL[task]
        files = (half_checkpoints if method.halves else checkpoints)(subject, self.cache, n)
        together = [[file] for file in files] if method.averaged else [files]
        runs = [self._run(name, task, some, again) for some in together]
        if failed := [run["error"] for run in runs if "error" in run]:
            return {"error": failed[0]}
        scores = {
            setting: xr.DataArray(
                np.mean([run["scores"][setting] for run in runs], 0), dims=("sample", "target")
            )
            for setting in runs[0]["scores"]
        }
        row = {
            "cpu": sum(run["cpu"] for run in runs),
            "peak": max(run["peak"] for run in runs),
            "kept": sum(run["kept"] for run in runs),
        }
        return row | {"lds": {setting: measured(one, task) for setting, one in scores.items()}}

    def _run(self, name: str, task: str, files: list[Path], again: bool) -> dict[str, Any]:
        """Run a method in its environment; what the process printed last is its cost."""
        stem = "-".join((name, task, *(file.stem.rpartition("-")[2] for file in files)))
        path = self.cache / "leaderboard" / "scores" / f"{stem}.npz"
        about = path.with_suffix(".json")
        if not about.exists() or again:
            path.parent.mkdir(parents=True, exist_ok=True)
            about.write_text(json.dumps(self._process(name, task, path, files)))
        cost: dict[str, Any] = json.loads(about.read_text())
        return cost if "error" in cost else cost | {"scores": dict(np.load(path))}

    def _process(self, name: str, task: str, path: Path, files: list[Path]) -> dict[str, Any]:
        folder = METHODS[name].environment
        python = str(self.environments / folder / "bin" / "python") if folder else sys.executable
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        done = subprocess.run(
            [python, "-W", "ignore", str(SCRIPT), name, task, str(path), *map(str, files)],
            env={**os.environ, **threads, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"]
            return {"error": lines[-1][:200]}
        cost: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return cost


@cache
def truth(task: str) -> tuple[xr.DataArray, xr.DataArray]:
    return ground(ALL[task])


def measured(scores: xr.DataArray, task: str) -> list[float]:
    """Return the LDS and its interval of 95 %; scores that are not numbers count as 0."""
    found = td.evaluate.lds(scores.fillna(0), *truth(task), resamples=RESAMPLES).compute()
    return [round(float(x), 4) for x in (found.lds_mean, *found.interval.values)]


# --- tables ---------------------------------------------------------------------------------------


def text_of(lds: list[float]) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*lds)


def rows_of(runs: Runs, options: Any) -> list[dict[str, Any]]:
    """Return a row for every cell, tasks in their order, so that small ones come first."""
    rows = []
    for task in options.tasks:
        for name in options.methods:
            for n in METHODS[name].checkpoints if METHODS[name].tasks(ALL[task]) else ():
                about = {"task": task, "method": name, "n": n}
                rows.append(about | runs.cell(name, task, n, options.again))
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


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Print LDS of defaults, and of best dampings, with a column for each task."""
    cells = [
        {"method": row["method"], "n": row["n"], "setting": kind, "task": row["task"],
         "lds": max(v[0] for v in row["lds"].values()) if kind == "best" else row["lds"][DEFAULT][0]}
        for row in rows if "lds" in row
        for kind in (DEFAULT, "best")[: len(row["lds"])]
    ]  # fmt: skip
    order = ["n", "method", "setting"]
    wide = pd.DataFrame(cells).pivot(index=order, columns="task", values="lds")
    shown = wide.reindex(columns=list(dict.fromkeys(row["task"] for row in rows)))
    print("\nLDS, by the number of checkpoints")
    print(shown.round(3).fillna("").to_string())


def main() -> None:
    parser = parser_of(
        __doc__ or "", cache=Path("demo-output/quality"), environments=Path("demo-output/peers"),
        tasks=list(TASKS), methods=list(METHODS),
    )  # fmt: skip
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    rows = rows_of(Runs(options.cache, options.environments), options)
    for task in options.tasks:
        print_task(task, [row for row in rows if row["task"] == task])
    print_summary(rows)
    print("\nDid not run")
    for row in (row for row in rows if "error" in row):
        print(f"{row['method']}, {row['task']}, {row['n']}: {row['error']}")


if __name__ == "__main__":
    main()
