"""Which λ is chosen, and how much LDS that loses: the rule before, the prior, and the rule now.

    python tests/benchmarks/dampings.py --cache demo-output/quality    # two hours

On classifiers of the quality benchmark whose λ outputs choose: features of ``td.fit`` by its
defaults from six models of all data, of 1,024 random columns from three, and of ``td.fit`` from
five models of random halves, which say what they were trained on. Regret is what a λ loses against
the best of the 21 of the grid; single halves do not count. From five halves on, left-out
checkpoints decide after these rules. ``--kept`` shows what a cache has after an interruption.
"""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pandas as pd
import torch
import xarray as xr
from _machine import made_once, parser_of
from _quality_tasks import SUBJECTS, Subject, members
from _quality_truth import checkpoints, ground
from _quality_wider import HELD_OUT, UNDERFITTED, WIDER
from numpy.typing import NDArray
from scipy.stats import rankdata

import trakdask as td
from trakdask.arrays.damping import GRID, chosen
from trakdask.attribution.estimators import choosing, with_gram
from trakdask.attribution.protocol import GramEstimator

TASKS = SUBJECTS | WIDER | HELD_OUT | UNDERFITTED
FIRST = 1_000_000  # number of the first half: the truth has the halves 0, 1, ...
#: Which checkpoints are scored together, by the kind of features and models.
TOGETHER = {
    "all": [[0], [1], [2], [3], [4], [5], [0, 1, 2], [3, 4, 5], [*range(6)]],
    "plain": [[0], [1], [2], [0, 1, 2]],
    "halves": [[0], [1], [0, 1, 2], [2, 3, 4], [*range(5)]],
}
GROUPS = {
    "convolutions": ("cnn", "resnet", "cnn-bn", "deep-cnn", "cnn-smoothed"),
    "transformer": ("transformer", "text-smoothed"),
    "underfitted": ("early", "short", *UNDERFITTED),
    "few samples": ("wine", "cancer"),
}

Row = dict[str, Any]
Floats = NDArray[np.floating[Any]]


# --- measurements ---------------------------------------------------------------------------------


def featurized(subject: Subject, kind: str, path: Path, cache: Path) -> None:
    """Keep the features of training samples and targets."""
    train, targets = subject.samples(0), subject.samples(1)
    n_train, n = train.sizes["sample"], 1 + max(max(some) for some in TOGETHER[kind])
    if kind == "halves":
        halves = [members(FIRST + index, n_train) for index in range(n)]
        stem = cache / "halves" / f"{subject.name}-{subject.digest()}"

        def write(index: int, path: Path) -> None:
            torch.save(subject.train(halves[index], seed=100 + index), path)

        files = [made_once(Path(f"{stem}-h{i}.pt"), partial(write, i)) for i in range(n)]
        train = train.assign_coords(trained_on=(("checkpoint", "sample"), np.stack(halves)))
    else:
        files = checkpoints(subject, cache, n)
    model = td.Model(subject.build, files, subject.task)
    projector = td.SJLT(1024) if kind == "plain" else td.fit(train, model, progress=False)
    features = td.featurize(train, model, projector).compute()
    explained = td.featurize(targets, model, like=features).compute()
    path.write_bytes(pickle.dumps((features, explained)))


def spectra(train: xr.Dataset, targets: xr.Dataset, by: GramEstimator) -> list[Row]:
    """Return K by its eigenvectors, and the features along them, of each checkpoint."""
    h, n, found = by.h(train.chunk()), train.sizes["sample"], []
    h = np.ones(train.output.shape) if h is None else h.compute()
    for c in range(train.sizes["checkpoint"]):
        x, t = (ds.feature.values[:, :, c].astype(np.float64) for ds in (train, targets))
        k = (x * h[:, [c]]).T @ x
        if getattr(by, "wrong_classes", False):
            k += n * train.wrong_classes.isel(checkpoint=c).values
        values, vectors = np.linalg.eigh(k)
        values = values.clip(min=0)
        scale = {"values": values, "unit": values.mean() * len(values) / n, "h": h[:, c]}
        found.append({"x": x @ vectors, "t": t @ vectors, **scale})
    return found


def measured(subject: Subject, kind: str, features: Path) -> Iterator[Row]:
    """Yield LDS and the correlation with outputs for every ρ, a row for each few checkpoints."""
    train, targets = pickle.loads(features.read_bytes())
    train = train.drop_vars("trained_on", errors="ignore")
    drawn, outputs = ground(subject)
    masks, truth = drawn.values.astype(np.float64), unit_ranks(outputs.values.mean(1))
    estimator, by = with_gram(train.chunk(), "auto"), choosing(train)
    scoring = chooses = spectra(train, targets, estimator.of_sums())
    if by.gram_weights != estimator.of_sums().gram_weights:
        chooses = spectra(train, targets, by)
    for together in TOGETHER[kind]:
        some = train.isel(checkpoint=together).chunk()
        g = estimator.of_scores(some).g(some).compute().mean(1)
        r, f = by.g(some).compute().mean(1), some.output.mean("checkpoint").values
        sums = [(masks @ (g[:, None] * scoring[c]["x"]), scoring[c]) for c in together]
        lds, curve = [], []
        for rho in GRID:
            predicted = sum((a / (d["values"] + rho * d["unit"])) @ d["t"].T for a, d in sums)
            lds.append(float((unit_ranks(predicted) * truth).sum(0).mean()))
            totals = np.mean([left_out(chooses[c], rho, r) for c in together], axis=0)
            curve.append(float(np.corrcoef(totals, f)[0, 1]))
        yield {
            "task": subject.name, "data": kind, "n": len(together), "first": together[0],
            "samples": len(f), "by_outputs": str(estimator.damping), "lds": lds, "curve": curve,
            "wc": "wrong_classes" in train, "prior": float(train.attrs.get("damping_prior", 1)),
        }  # fmt: skip


def left_out(d: Row, rho: float, g: Floats) -> Floats:
    """Return the totals of training samples, each left out of K and r."""
    inverse = 1 / (d["values"] + rho * d["unit"])
    leverage = np.square(d["x"]) @ inverse
    total = d["x"] @ (inverse * (d["x"].T @ g))
    return np.asarray((total - g * leverage) / (1 - d["h"] * leverage))


def unit_ranks(values: Floats) -> Floats:
    ranks = rankdata(values, axis=0)
    ranks -= ranks.mean(axis=0)
    norm = np.linalg.norm(ranks, axis=0)
    return np.asarray(ranks / np.where(norm > 0, norm, 1))


# --- rules for ρ ----------------------------------------------------------------------------------


def prior(row: Row) -> float:
    return float(row["prior"])


def package(row: Row) -> float:
    """Return what the package chooses, without left-out checkpoints."""
    rho = chosen(
        np.array(row["curve"]), row["samples"], row["n"], samples="rows", otherwise="",
        prior=row["prior"], is_whole=row["wc"] and row["data"] != "halves",
        n_samples=row["samples"], quiet=True,
    )["relative"][0]  # fmt: skip
    return prior(row) if np.isnan(rho) else float(rho)


def until_326f7136(row: Row) -> float:
    """Return the ρ of the largest correlation above the prior, if it is clearly larger.

    Else the one near the prior, where the wrong classes are known.
    """
    values, distance = np.array(row["curve"]), np.log10(GRID / row["prior"])
    if values.max() * row["samples"] ** 0.5 < 3:
        return prior(row)
    at = int(np.abs(distance).argmin())
    best = at + int(values[at:].argmax())
    needed = 0.2 if values[at] < 0.57 or row["samples"] < 500 else 0.6
    if np.arctanh(values[best]) - np.arctanh(values[at]) > needed:
        return float(GRID[best])
    decades = 1.0 if row["wc"] and row["data"] != "halves" else 0.0
    near = np.flatnonzero(np.abs(distance) < decades + 0.1)
    return float(GRID[near[values[near].argmax()]])


RULES: dict[str, Callable[[Row], float]] = {
    "before": until_326f7136, "prior": prior, "now": package
}  # fmt: skip


# --- tables ---------------------------------------------------------------------------------------


def lds(row: Row, rho: float) -> float:
    return float(np.interp(np.log(rho), np.log(GRID), row["lds"]))


def frame_of(rows: list[Row]) -> pd.DataFrame:
    """Return the regret of the rules, a row for each setting, and the gain over the prior."""
    judged = []
    for row in rows:
        group = [name for name, tasks in GROUPS.items() if row["task"] in tasks] or ["perceptrons"]
        about = {name: row[name] for name in ("task", "data", "n")} | {"group": group[0]}
        lost = {name: max(row["lds"]) - lds(row, rule(row)) for name, rule in RULES.items()}
        best = {"best ρ": GRID[np.argmax(row["lds"])], "ρ": package(row)}
        judged.append(about | best | lost)
    frame = pd.DataFrame(judged)
    return frame.assign(**{f"{n} - prior": frame.prior - frame[n] for n in ("before", "now")})


def show(frame: pd.DataFrame, by: list[str]) -> None:
    """Print mean and worst regret of every rule, and the least gain over the prior."""
    found = frame.groupby(by, sort=False)[[*RULES]].agg(["mean", "max"])
    for name in ("before", "now"):
        found[name, "least gain over the prior"] = frame.groupby(by)[f"{name} - prior"].min()
    print(found[[*RULES]].sort_index(axis=1, level=0, sort_remaining=False).round(3).to_string())


def main() -> None:
    kinds = ["all", "plain", "halves"]
    parser = parser_of(__doc__ or "", cache=Path("demo-output/quality"), tasks=[*TASKS])
    parser.add_argument("--kept", action="store_true", help="only what the cache has")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dask.config.set(scheduler="synchronous")
    rows = []
    for kind in kinds:
        for name in arguments.tasks:
            file = arguments.cache / "features" / f"{name}-{kind}.pkl"
            path = arguments.cache / "rows" / f"{name}-{kind}.json"
            if arguments.kept and not path.exists():
                continue
            if not path.exists():
                made_once(file, partial(_made, name, kind, arguments.cache))
            made_once(path, partial(_kept, name, kind, file))
            rows += json.loads(path.read_text())
            print(name, kind, file=sys.stderr, flush=True)
    frame = frame_of([row for row in rows if row["by_outputs"] == "completeness"])
    frame = frame[(frame.data != "halves") | (frame.n > 1)]
    print("all: td.fit; plain: random columns; halves: td.fit, models of random halves\n")
    print(frame.groupby("data", sort=False).task.nunique().rename("tasks").to_string())
    for by in (["data", "n"], ["group", "data", "n"]):
        print("\nRegret of λ")
        show(frame.sort_values(by[0], kind="stable"), by)
    print("\nBy task: means over draws of checkpoints")
    columns = ["best ρ", "ρ", "before", "prior", "now"]
    print(frame.groupby(["data", "task", "n"])[columns].mean().round(3).to_string())


def _made(name: str, kind: str, cache: Path, path: Path) -> None:
    featurized(TASKS[name], kind, path, cache)


def _kept(name: str, kind: str, features: Path, path: Path) -> None:
    path.write_text(json.dumps(list(measured(TASKS[name], kind, features))))


if __name__ == "__main__":
    main()
