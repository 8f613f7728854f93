"""What grades by left-out checkpoints are worth, and what λ and options gain by them.

    python tests/benchmarks/cross_validation.py --cache demo-output/quality    # two hours
    python tests/benchmarks/cross_validation.py --stage draws                  # half an hour

On every task of ``halves.py``: checkpoints of random halves, five (two draws) and ten of them, by
random columns and by ``td.fit``, with the estimator that is the default. The truth has other halves
than the checkpoints. Targets are the samples to explain, which no model was trained on.

- The grade of ``td.evaluate.cross_validate`` beside the LDS on outputs of single models, which is
  what it estimates.
- Regret of λ: what it loses against the best λ of the grid.
- A fit or random columns, as the grades say.

The checkpoints of all tasks with the same number of samples saw the same halves, so these grades
share their luck. The stage ``draws`` repeats some tasks with other halves: is the mean of the
grades right, and is their spread as large as their errors say? All tasks have the same halves and
seeds there, too, so it also prints how much the LDS of underfitted models varies with these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from _fits import SKETCH, arguments_of, featurized
from _machine import made_once
from _quality_damping import FIRST, N_CHECKPOINTS, Floats, Row, half_checkpoints, unit_ranks
from _quality_tasks import Subject, members
from _quality_truth import ground
from halves import TASKS, group_of

import trakdask as td
from trakdask.arrays.damping import GRID
from trakdask.arrays.folds import agreement
from trakdask.attribution.estimators import EstimatorLike, with_gram
from trakdask.attribution.grams import sums
from trakdask.attribution.protocol import GramEstimator
from trakdask.variables import lazy_features

KINDS = ("plain", "fit")
N_DRAWS = 6
N_SETS, N_MODELS = 8, 50
UNDERFITTED = ("short", "early", "narrow")
DRAWN = ("short", "early", "narrow", "mlp", "overlapping", "cnn")
TOGETHER = [[*range(5)], [*range(5, 10)], [*range(10)]]


def kept(folder: Path, kind: str, subject: Subject, measure: Callable[[], Any]) -> Any:
    """Return what was measured of a kind of features and a task; the cache keeps it."""
    path = folder / f"{kind}-{subject.name}-{subject.digest()}.json"
    made_once(path, lambda path: path.write_text(json.dumps(measure())))
    return json.loads(path.read_text())


def rows_of(subject: Subject, kind: str, cache: Path) -> list[Row]:
    """Return a row for each set of checkpoints."""
    rows: list[Row] = kept(
        cache / "left-out", kind, subject, lambda: list(_rows(subject, kind, cache))
    )
    return rows


def _rows(subject: Subject, kind: str, cache: Path) -> Iterator[Row]:
    parts = subject.samples(0), subject.samples(1)
    n = parts[0].sizes["sample"]
    masks = np.array([members(FIRST + j, n) for j in range(N_CHECKPOINTS)])
    train = parts[0].assign_coords(trained_on=(("checkpoint", "sample"), masks))
    model = td.Model(subject.build, half_checkpoints(subject, cache, N_CHECKPOINTS), subject.task)
    projector = SKETCH if kind == "plain" else td.fit(parts[0], model, progress=False)
    for row in _of_features(subject, *featurized(model, train, parts[1], projector)):
        yield {"task": subject.name, "features": kind} | row


def _of_features(subject: Subject, train: xr.Dataset, targets: xr.Dataset) -> Iterator[Row]:
    estimator = with_gram(train.chunk(), "auto")
    products = list(_products(train, targets, estimator))
    for together in TOGETHER:
        some, explained = (ds.isel(checkpoint=together) for ds in (train, targets))
        before = estimator.with_damping(estimator.rule_without_folds(some.chunk()))
        graded = td.evaluate.cross_validate(some, explained)
        yield {
            "n": len(together), "first": together[0],
            "before": _relative(some, before), "now": _relative(some, "auto"),
            "grade": float(graded.lds_mean), "error": float(graded.error),
            **_lds(subject, some.chunk(), estimator, sum(products[c] for c in together)),
        }  # fmt: skip


def _products(train: xr.Dataset, targets: xr.Dataset, estimator: GramEstimator) -> Iterator[Floats]:
    """Yield φ(z)ᵀ(K + λI)⁻¹φ(t), (ρ, z, t), of each checkpoint."""
    grams = sums(lazy_features(train), estimator.of_sums(), ["gram"])[0].compute()
    for c in range(train.sizes["checkpoint"]):
        values, vectors = np.linalg.eigh(grams[:, :, c])
        values = values.clip(min=0)
        x, t = (
            (ds.feature.values[:, :, c] @ vectors).astype(np.float32) for ds in (train, targets)
        )
        unit = values.sum() / len(x)
        yield np.stack([x @ (t / (values + rho * unit)).astype(np.float32).T for rho in GRID])


def _relative(features: xr.Dataset, estimator: EstimatorLike) -> float:
    """Return the chosen λ in units of tr(K)/n."""
    rho = float(td.damping(features, estimator).relative)
    return float(features.attrs.get("damping_prior", 1)) if np.isnan(rho) else rho


def _lds(
    subject: Subject, train: xr.Dataset, estimator: GramEstimator, products: Floats
) -> dict[str, list[float]]:
    """Return the LDS at every ρ: of mean outputs of subsets, and of single models."""
    drawn, outputs = ground(subject)
    masks = drawn.values.astype(np.float32)
    g = estimator.of_scores(train).g(train).compute().mean(axis=1).astype(np.float32)
    predicted = [unit_ranks(masks @ (g[:, None] * each)) for each in products]
    mean = unit_ranks(outputs.mean("seed").values)
    singles = [unit_ranks(outputs.isel(seed=s).values) for s in range(outputs.sizes["seed"])]

    def scored(truths: list[Floats]) -> list[float]:
        found = [np.mean([(p * t).sum(axis=0).mean() for t in truths]) for p in predicted]
        return [round(float(x), 5) for x in found]

    return {"lds": scored([mean]), "single": scored(singles)}


def at(row: Row, name: str, rho: float) -> float:
    return float(np.interp(np.log(rho), np.log(GRID), row[name]))


def frame_of(rows: list[Row]) -> pd.DataFrame:
    found = []
    for row in rows:
        best = max(row["lds"])
        about = {name: row[name] for name in ("task", "features", "n", "first", "grade", "error")}
        about |= {"group": group_of(row["task"]), "single": at(row, "single", row["now"])}
        about |= {"LDS": at(row, "lds", row["now"]), "best ρ": GRID[np.argmax(row["lds"])]}
        lost = {name: best - at(row, "lds", row[name]) for name in ("before", "now")}
        found.append(about | {"ρ before": row["before"], "ρ now": row["now"]} | lost)
    return pd.DataFrame(found)


def print_grades(frame: pd.DataFrame) -> None:
    off = (frame.grade - frame.single).abs() / frame.error
    frame = frame.assign(off=off, within=off < 2)
    print("\nGrades of checkpoints left out beside the LDS on single models")
    columns = ["grade", "error", "single", "off", "LDS"]
    ten = frame[frame.n == 10].pivot(index="task", columns="features", values=columns)
    print(ten.swaplevel(axis=1)[list(KINDS)].round(3).to_string())
    print(frame.groupby(["features", "n"])[["within", "error"]].mean().round(3).to_string())
    for n, part in frame.groupby("n"):
        rank = part.grade.corr(part.single, method="spearman")
        print(f"{n} checkpoints: rank correlation of grades and LDS over tasks {rank:.2f}")


def print_regret(frame: pd.DataFrame, by: list[str]) -> None:
    found = frame.groupby(by, sort=False)[["before", "now"]].agg(["mean", "max"])
    found["worst now"] = [
        "{task}, {n}".format(**part.loc[part["now"].idxmax()])
        for _, part in frame.groupby(by, sort=False)
    ]
    print(found.round(3).to_string())


def print_choice_of_features(frame: pd.DataFrame) -> None:
    """Print what is lost by a fit always, never, or where its grade is higher."""
    wide = frame.pivot(index=["task", "n", "first"], columns="features", values=["LDS", "grade"])
    best = wide.LDS.max(axis=1)
    chosen = wide.LDS.fit.where(wide.grade.fit > wide.grade.plain, wide.LDS.plain)
    lost = pd.DataFrame({
        "never": best - wide.LDS.plain, "always": best - wide.LDS.fit, "graded": best - chosen
    })  # fmt: skip
    print("\nLDS lost by the choice of features")
    print(lost.groupby("n").agg(["mean", "max"]).round(3).to_string())


def of_draws(subject: Subject, kind: str, cache: Path) -> Row:
    """Grade scores by several independent draws of ten halves."""
    row: Row = kept(cache / "draws", kind, subject, lambda: _of_draws(subject, kind, cache))
    return row


def _of_draws(subject: Subject, kind: str, cache: Path) -> Row:
    n, size = len(subject.data()[0][0]), N_CHECKPOINTS
    files = half_checkpoints(subject, cache, size * N_DRAWS)
    halves = np.array([members(FIRST + j, n) for j in range(size * N_DRAWS)])
    drawn, truth = ground(subject)
    grades, sums, outputs, singles = [], [], [], []
    for start in range(0, size * N_DRAWS, size):
        some = slice(start, start + size)
        samples = subject.samples(0).assign_coords(
            trained_on=(("checkpoint", "sample"), halves[some])
        )
        model = td.Model(subject.build, files[some], subject.task)
        projector = (
            td.SJLT(512) if kind == "plain" else td.fit(subject.samples(0), model, progress=False)
        )
        train, targets = featurized(model, samples, subject.samples(1), projector)
        graded = td.evaluate.cross_validate(train, targets)
        grades.append((float(graded.lds_mean), float(graded.error)))
        scores = td.score(train, targets).values
        sums.append((halves @ scores).T.reshape(len(scores.T), N_DRAWS, size))
        outputs.append(targets.output.transpose("sample", "checkpoint").values)
        ranks = unit_ranks(drawn.values @ scores)
        seeds = truth.transpose("seed", ...).values
        singles.append(np.mean([(ranks * unit_ranks(x)).sum(axis=0).mean() for x in seeds]))
    # The same ten checkpoints, by scores in which none of them had a part: the luck is the same.
    by_others = [
        np.mean([
            agreement(sums[other][:, draw], outputs[draw].astype(float), unbiased=True)[0].mean()
            for other in range(N_DRAWS) if other != draw
        ])
        for draw in range(N_DRAWS)
    ]  # fmt: skip
    grade, error = np.transpose(grades)
    bias, single = grade - by_others, np.mean(singles)
    return {
        "features": kind, "task": subject.name, "grade": grade.mean(),
        "by others": np.mean(by_others), "bias": bias.mean(),
        "of bias": bias.std(ddof=1) / N_DRAWS**0.5, "single": single,
        "spread": grade.std(ddof=1), "error": error.mean(),
        "within": (abs(grade - single) < 2 * error).mean(),
    }  # fmt: skip


def print_draws(rows: list[Row]) -> None:
    frame = pd.DataFrame(rows).set_index(["features", "task"])
    print(
        f"\nGrades of {N_DRAWS} independent draws of ten halves: their mean; the mean for the same"
    )
    print("checkpoints by the scores of other draws, and the difference with its error; the LDS on")
    print(
        "single models; their standard deviation; their mean error; how many are within two errors"
    )
    print(frame.round(3).to_string())
    means = frame.groupby("features")[["bias", "spread", "error", "within"]].mean()
    print(means.round(3).to_string())


def luck_of(subject: Subject, cache: Path) -> list[float]:
    """Return the LDS of the same scores on several sets of models of other halves and seeds."""
    values: list[float] = kept(cache / "luck", "plain", subject, lambda: _luck(subject, cache))
    return values


def _luck(subject: Subject, cache: Path) -> list[float]:
    n = len(subject.data()[0][0])
    model = td.Model(subject.build, half_checkpoints(subject, cache, N_CHECKPOINTS), subject.task)
    parts = subject.samples(0), subject.samples(1)
    scores = td.score(*featurized(model, *parts, td.SJLT(512))).values
    found = []
    for draw in range(1, N_SETS + 1):
        seeds = range(N_MODELS * draw, N_MODELS * (draw + 1))
        halves = np.array([members(FIRST + 1000 * draw + i, n) for i in range(N_MODELS)])
        states = [subject.train(half, 500 + seed) for half, seed in zip(halves, seeds, strict=True)]
        outputs = np.array([subject.outputs(state) for state in states])
        found.append(float((unit_ranks(halves @ scores) * unit_ranks(outputs)).sum(axis=0).mean()))
    return found


def print_luck(of_tasks: dict[str, list[float]]) -> None:
    frame = pd.DataFrame(of_tasks).T
    print(f"\nLDS of the same scores on {N_SETS} sets of {N_MODELS} models, whose halves and seeds")
    print("are others in each set: how far does it vary?")
    about = {"mean": frame.mean(axis=1), "spread": frame.std(axis=1)}
    print(frame.assign(**about).round(3).to_string())


def main() -> None:
    arguments = arguments_of(__doc__, TASKS, ("tasks", "draws"))
    names, cache = arguments.tasks, arguments.cache
    if arguments.stage == "draws":
        drawn = [name for name in DRAWN if name in names]
        print_draws([of_draws(TASKS[name], kind, cache) for kind in KINDS for name in drawn])
        print_luck({name: luck_of(TASKS[name], cache) for name in UNDERFITTED if name in names})
        return
    frame = frame_of(
        [row for n in names for kind in KINDS for row in rows_of(TASKS[n], kind, cache)]
    )
    print_grades(frame)
    print(f"\nRegret of λ, {frame.task.nunique()} tasks, {len(frame)} settings")
    print_regret(frame, ["features", "n"])
    print("\nBy kind of task")
    print_regret(frame.sort_values("group", kind="stable"), ["group", "features"])
    print("\nBy task")
    print_regret(frame, ["task", "features"])
    print_choice_of_features(frame)


if __name__ == "__main__":
    main()
