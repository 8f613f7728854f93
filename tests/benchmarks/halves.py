"""Which λ is chosen, and how much LDS that loses; models of all data and of random halves.

    python tests/benchmarks/halves.py --cache demo-output/quality    # an hour

On every task of the quality benchmark and on underfitted ones, with 1, 3, 5 and 10 checkpoints,
without and with curvature, at the default size and estimator of the package. The truth consists of
models of other halves, which favours models of halves. Regret is what a λ loses against the best of
the same grid; single halves, which nobody would score by, do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from _fits import ALL, arguments_of, print_gains
from _quality_damping import Row, curves
from _quality_wider import UNDERFITTED

from trakdask.arrays import damping
from trakdask.projection.fitted import Curvature

TASKS = ALL | UNDERFITTED
OF_NETWORKS = {
    "convolutions": ("cnn", "resnet", "cnn-bn", "deep-cnn", "cnn-smoothed"),
    "transformer": ("transformer", "text-smoothed"),
    "underfitted": ("early", "short", *UNDERFITTED),
    "few samples": ("wine", "cancer"),
    "regression, language": ("diabetes", "surface", "language"),
}
KINDS = [("all", "plain"), ("all", "curvature"), ("halves", "plain"), ("halves", "curvature")]


def group_of(task: str) -> str:
    return next((name for name, tasks in OF_NETWORKS.items() if task in tasks), "perceptrons")


# --- rules for ρ ----------------------------------------------------------------------------------


def prior(row: Row) -> float:
    return Curvature.damping_prior if row["features"] == "curvature" else 1.0


def package(row: Row) -> float:
    """Return what the package chooses."""
    if group_of(row["task"]) == "regression, language":
        return prior(row)
    chosen = damping.chosen(
        np.array(row["curve"]), row["samples"], samples="rows", otherwise="", prior=prior(row),
        decades=0, n_samples=row["samples"], quiet=True,
    )  # fmt: skip
    rho = float(chosen["relative"][0])
    return prior(row) if np.isnan(rho) else rho


def until_4094547(row: Row) -> float:
    """Return the largest ρ up to 100 with a correlation of half an error below the best.

    Above 1 it had to exceed that at 1 by 0.25 in Fisher's z. It was at least 1 with one checkpoint,
    and √10 with curvature. Below a correlation of 0.4, the closed form chose.
    """
    if group_of(row["task"]) == "regression, language":
        return prior(row)
    values, grid = np.array(row["curve"][:17]), damping.GRID[:17]
    peak, least = values.max(), prior(row) if row["features"] == "curvature" or row["n"] == 1 else 0
    if peak < 0.4:
        return prior(row) * float(row["closed form"])
    rho = grid[values >= peak - (1 - peak**2) / row["samples"] ** 0.5 / 2][-1]
    if rho > 1 and np.arctanh(peak) - np.arctanh(values[8]) <= 0.25:
        rho = 1
    return float(max(rho, least))


def lds(row: Row, rho: float) -> float:
    return float(np.interp(np.log(rho), np.log(damping.GRID), row["lds"]))


# --- tables ---------------------------------------------------------------------------------------


def frame_of(rows: list[Row]) -> pd.DataFrame:
    """Return LDS and regret of the rules, a row for each setting."""
    rules: dict[str, Callable[[Row], float]] = {
        "before": until_4094547, "prior": prior, "now": package
    }  # fmt: skip
    judged: list[dict[str, Any]] = []
    for row in rows:
        best = max(row["lds"])
        about = {name: row[name] for name in ("task", "data", "features", "n", "first")}
        about |= {"group": group_of(row["task"]), "best ρ": damping.GRID[np.argmax(row["lds"])]}
        lost = {name: best - lds(row, rule(row)) for name, rule in rules.items()}
        judged.append(about | {"ρ": package(row), "LDS": lds(row, package(row))} | lost)
    return pd.DataFrame(judged)


def print_regret(frame: pd.DataFrame, by: list[str]) -> None:
    """Print mean and worst regret of every rule."""
    found = frame.groupby(by, sort=False)[["before", "prior", "now"]].agg(["mean", "max"])
    found["worst now"] = [
        "{task}, {n}".format(**part.loc[part["now"].idxmax()])
        for _, part in frame.groupby(by, sort=False)
    ]
    print(found.round(3).to_string())


def print_lds(frame: pd.DataFrame, n: int) -> None:
    here = frame[(frame.n == n) & (frame["first"] == 0)]
    wide = here.pivot(index="task", columns=["data", "features"], values="LDS")
    shown = wide.loc[here.task.unique(), KINDS]
    shown.columns = [", ".join(pair).removesuffix(", plain") for pair in KINDS]
    shown["gain"] = shown["halves"] - shown["all"]
    print(f"\nLDS at the defaults, proj_dim 2048, {n} checkpoint{'s' * (n > 1)}")
    print(shown.round(3).to_string())
    print_gains(shown.gain)


def main() -> None:
    arguments = arguments_of(__doc__, TASKS)
    rows = [row for name in arguments.tasks for row in curves(TASKS[name], arguments.cache)]
    frame = frame_of(rows)
    for n in (1, 3, 10):
        print_lds(frame, n)
    counted = frame[(frame.data == "all") | (frame.n > 1)]
    n_tasks, n = counted.task.nunique(), len(counted)
    print(f"\nRegret of λ, mean and worst, {n_tasks} tasks, {n} settings")
    print_regret(counted, ["data", "features"])
    print("\nBy number of checkpoints")
    print_regret(counted, ["data", "n"])
    print("\nBy kind of task")
    print_regret(counted.sort_values("group", kind="stable"), ["group", "data", "features"])
    print("\nBy task")
    print_regret(counted, ["task", "data", "features"])


if __name__ == "__main__":
    main()
