"""Are intervals of scores right, and is it better to rank by their lower bounds?

Sixty checkpoints of five tasks, trained on all data with different seeds. Intervals from 5 or 10 of
them are compared with the scores of 50 others, three times with other checkpoints. Both sides have
an error: "both" are intervals for their difference, which are wider by √(1 + n/50). If the
intervals are right, these cover as often as they say.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from _fits import arguments_of, ground, setting
from _quality_tasks import digits
from scipy.special import stdtrit

import trakdask as td

TASKS = ("mlp", "cnn", "transformer", "cancer", "surface")
N_ALL, N_OTHERS, SIZES, LEVELS = 60, 50, (5, 10), (0.9, 0.5)
SKETCH, TOP, GROUPS = td.SJLT(512), 20, 20


def featurized(name: str, cache: Path, n: int) -> tuple[Any, xr.Dataset, xr.Dataset, Any]:
    """Return a task, its features with groups, and an estimator with λ of all checkpoints."""
    subject, model, samples = setting(name, cache, n)
    train, targets = (td.featurize(part, model, SKETCH).compute() for part in samples)
    group = np.random.default_rng(0).integers(0, GROUPS, train.sizes["sample"])
    train = train.assign_coords(group=("sample", group))
    damping = td.damping(train).compute()
    is_regression = "regression" in train.attrs["task"].lower()
    return subject, train, targets, (td.Trak if is_regression else td.Soft)(damping=damping)


def draws(n: int) -> list[tuple[list[int], list[int]]]:
    """Return three times n checkpoints and 50 others."""
    starts = range(0, N_ALL, 20)
    return [
        (list(range(start, start + n)),
         [c for c in range(N_ALL) if not start <= c < start + N_ALL - N_OTHERS])
        for start in starts
    ]  # fmt: skip


def intervals(train: xr.Dataset, targets: xr.Dataset, estimator: Any) -> dict[str, xr.Dataset]:
    return {
        "pairs": td.intervals(train, targets, estimator).compute(),
        "groups": td.intervals(train, targets, estimator, by="group").compute(),
        "self-influence": td.intervals(train, estimator=estimator).compute(),
    }


def scores(train: xr.Dataset, targets: xr.Dataset, estimator: Any) -> dict[str, xr.DataArray]:
    return {
        "pairs": td.score(train, targets, estimator).compute(),
        "groups": td.group_score(train, targets, estimator, by="group").compute(),
        "self-influence": td.self_influence(train, estimator).compute(),
    }


def coverage(found: xr.Dataset, other: xr.DataArray, n: int) -> dict[str, float]:
    """Return how often intervals of both levels contain the score of others."""
    error, off = found.score / found.snr, abs(found.score - other)
    row = {}
    for level in LEVELS:
        margin = stdtrit(n - 1, (1 + level) / 2) * error
        row[f"{level:.0%} plain"] = float((off <= margin).mean())
        row[f"{level:.0%} both"] = float((off <= margin * (1 + n / N_OTHERS) ** 0.5).mean())
    return row


def rankings(found: xr.Dataset, kept: xr.DataArray, other: xr.DataArray) -> dict[str, float]:
    """Return what the largest 20 of each target are worth by the scores of others."""
    best = td.top_k(other, TOP).compute()
    row = {
        "snr > 2": float((abs(found.snr) > 2).mean()), "kept": float(kept.mean()),
        "kept, other sign by others": float((found.score * other < 0).where(kept).mean()),
    }  # fmt: skip
    for name in ("score", "lower", "snr"):
        top = td.top_k(found, TOP, rank_by=name).compute()
        rows = xr.DataArray(top.position.values, dims=("target", "rank"))
        in_best = np.mean([np.isin(a, b).mean() for a, b in zip(rows, best.position, strict=True)])
        column = xr.DataArray(np.arange(rows.sizes["target"]), dims="target")
        worth = other.values[rows.values, column.values[:, None]].mean()
        row |= {f"overlap by {name}": in_best, f"worth by {name}": worth / float(best.score.mean())}
        row[f"snr > 2 in top by {name}"] = float((top.snr > 2).mean())
    return row


def lds_of(subject: Any, found: xr.Dataset, kept: xr.DataArray) -> dict[str, float]:
    values = {"score": found.score, "lower": found.lower, "kept": found.score.where(kept, 0)}
    result = td.evaluate.lds(values, *ground(subject), resamples=1).lds_mean.compute()
    return dict(zip(result.estimator.values, result.values.tolist(), strict=True))


def wrong_labels(cache: Path) -> pd.DataFrame:
    """Return how many of the labels with the largest self-influence are wrong, on task noisy."""
    subject, train, _, estimator = featurized("noisy", cache, 10)
    is_wrong = xr.DataArray(subject.data()[0][1] != digits()[0][1], dims="sample")
    rows = []
    for n, chosen in ((5, range(5)), (5, range(5, 10)), (10, range(10))):
        found = td.intervals(train.isel(checkpoint=list(chosen)), estimator=estimator).compute()
        for name in ("score", "lower", "snr"):
            order = np.argsort(-found[name].values)
            auc = td.evaluate.mislabelled_auc(found[name], is_wrong).auc
            row = {f"precision at {k}": is_wrong.values[order[:k]].mean() for k in (50, 100, 200)}
            rows.append({"n": n, "ranked by": name, **row, "AUC": float(auc)})
    print(f"\nWrong labels by self-influence, task noisy: {int(is_wrong.sum())} of {is_wrong.size}")
    return pd.DataFrame(rows).groupby(["n", "ranked by"], sort=False).mean()


def main() -> None:
    arguments = arguments_of(__doc__, TASKS)
    covered, ranked, graded = [], [], []
    for name in arguments.tasks:
        subject, train, targets, estimator = featurized(name, arguments.cache, N_ALL)
        for n in SIZES:
            for chosen, others in draws(n):
                some, rest = (
                    (train.isel(checkpoint=c), targets.isel(checkpoint=c), estimator)
                    for c in (chosen, others)
                )
                found, other = intervals(*some), scores(*rest)
                kept = td.intervals(*some, q=0.1).score.notnull().compute()
                key = {"task": name, "n": n}
                for what in found:
                    row = coverage(found[what], other[what], n)
                    covered.append({"of": what, **key, **row})
                ranked.append(key | rankings(found["pairs"], kept, other["pairs"]))
                if chosen[0] == 0:
                    graded.append(key | lds_of(subject, found["pairs"], kept))
        print(f"{name}: done", file=sys.stderr, flush=True)
    with pd.option_context("display.width", 200, "display.max_columns", 20):
        for title, rows, by in (
            ("How often intervals contain the scores of 50 others", covered, ["of", "n", "task"]),
            (f"Rankings, the first {TOP} of each target", ranked, ["task", "n"]),
            ("Linear datamodeling score", graded, ["task", "n"]),
        ):
            mean = pd.DataFrame(rows).groupby(by, sort=by[0] == "of").mean()
            mean = mean.T if title.startswith("Rankings") else mean
            print(f"\n{title}\n{mean.round(3).to_string()}", flush=True)
        print(wrong_labels(arguments.cache).round(3).to_string())


if __name__ == "__main__":
    main()
