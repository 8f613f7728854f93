"""LDS of metrics: do scores rank the accuracy, loss or worst group of retrained models?

    python tests/benchmarks/metrics.py --cache demo-output/quality    # ten minutes

Features of 2,048 random columns, default estimators. The truth is the metric of the models of
random halves, whose class is their group. A metric is predicted by its derivative at a share of
the outputs (1, ¾ and ½ of them; ¾ is the rule of ``td.combine``, but for a squared error) and by
outputs from which sums of scores were subtracted, as they are and scaled as ``td.group_score``
scales them. Slopes are of the truth on the prediction: 1 where predicted sizes are right, above 1
where they are too small. The rule was chosen by looking at tasks without a star, and tasks with a
star were looked at once, afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
from _fits import ALL, SKETCH, arguments_of, featurized
from _quality_damping import half_checkpoints
from _quality_tasks import Regression
from _quality_truth import checkpoints, ground
from scipy.stats import spearmanr

import trakdask as td
from trakdask.attribution.metrics import Measure, measure_of

TASKS = ("mlp", "cnn", "resnet", "transformer", "cancer", "overlapping", "imbalanced", "sgd",
         "surface", "diabetes",
         "noisy", "early", "deep", "deep-cnn", "cnn-bn", "text-smoothed", "wide")  # fmt: skip
UNSEEN = TASKS[10:]
OF_CLASSES = ("loss", "accuracy", "worst_group", "gap")
SHARES = (1.0, 0.75, 0.5)


def metrics_of(task: str) -> tuple[str, ...]:
    if isinstance(ALL[task], Regression):
        return ("loss",)
    return (*OF_CLASSES, "auroc") if task == "cancer" else OF_CLASSES


def features_of(task: str, cache: Path, n: int, *, halves: bool) -> tuple[xr.Dataset, xr.Dataset]:
    """Return features of training samples, and of targets with groups."""
    subject = ALL[task]
    files = (half_checkpoints if halves else checkpoints)(subject, cache, n)
    model = td.Model(subject.build, files, subject.task)
    train, targets = featurized(model, subject.samples(0), subject.samples(1), SKETCH)
    if "label" in targets.coords:
        targets = targets.assign_coords(group=targets.label)
    return train, targets


def rank_correlation(predicted: np.ndarray, truth: np.ndarray) -> float:
    return float(spearmanr(predicted, truth).statistic)


def rows_of(task: str, cache: Path, n: int, *, halves: bool) -> list[dict[str, Any]]:
    """Return a row for each metric."""
    train, targets = features_of(task, cache, n, halves=halves)
    masks, outputs = ground(ALL[task])
    scores = td.score(train, targets).compute()
    single = td.evaluate.lds(scores, masks, outputs, resamples=1).lds_mean
    of_all = da.from_array(scores.values.sum(0, dtype=np.float64))
    dropped = da.from_array((~masks).values.astype(np.float64) @ scores.values)
    f = targets.output.chunk().data.T
    rows = []
    for metric in metrics_of(task):
        measure = measure_of(metric, targets)
        truth = td.metric(outputs, targets, metric).mean("seed").values[:, 0]

        def by_derivative(share: float, measure: Measure = measure) -> np.ndarray:
            weights = replace(measure, at=share).weights(f)
            return np.asarray(-(dropped @ weights))

        def plugged_in(sums: da.Array, total: da.Array, measure: Measure = measure) -> np.ndarray:
            return -np.asarray(measure.raised_by(sums, total, f))

        # Outputs that do not correlate with totals let scores be as they are.
        plain = plugged_in(dropped, da.zeros_like(of_all))
        scaled = plugged_in(dropped, of_all)
        rows.append(
            {"task": task + " *" * (task in UNSEEN), "metric": metric, "single": float(single)}
            | {f"at {share:g}": rank_correlation(by_derivative(share), truth) for share in SHARES}
            | {"plain": rank_correlation(plain, truth), "scaled": rank_correlation(scaled, truth)}
            | {"slope plain": np.polyfit(plain, truth, 1)[0]}
            | {"slope scaled": np.polyfit(scaled, truth, 1)[0]}
        )
    return rows


def print_gains(frame: pd.DataFrame) -> None:
    """Print means by metric, and gains over the derivative at the outputs, of classifiers."""
    is_classes = ~frame.task.str.split().str[0].map(lambda name: isinstance(ALL[name], Regression))
    unseen = frame.task.str.endswith("*")
    print("\nMean of the tasks that classify")
    columns = ["single", *(f"at {share:g}" for share in SHARES), "plain", "scaled"]
    print(frame[is_classes].groupby("metric", sort=False)[columns].mean().round(3).to_string())
    gains = frame[["at 0.75", "at 0.5", "plain", "scaled"]].sub(frame["at 1"], axis=0)
    for name, chosen in (("looked at", is_classes & ~unseen), ("unseen *", is_classes & unseen)):
        part = gains[chosen]
        table = pd.DataFrame({"mean": part.mean(), "median": part.median(), "least": part.min()})
        print(f"\nGains over the derivative at the outputs, {len(part)} rows, {name}")
        print(table.T.round(3).to_string())
        slopes = frame[chosen & (frame["plain"] > 0)][["slope plain", "slope scaled"]]
        quantiles = slopes.quantile([0.1, 0.5, 0.9]).round(2)
        print("Quantiles of slopes, where ranks are predicted at all")
        print(quantiles.to_string())


def main() -> None:
    arguments = arguments_of(__doc__, TASKS)
    for n, halves in ((3, False), (10, True)):
        rows = [
            row
            for task in arguments.tasks
            for row in rows_of(task, arguments.cache, n, halves=halves)
        ]
        frame = pd.DataFrame(rows)
        print(f"\n{n} checkpoints of {'random halves' if halves else 'all data'}")
        print(frame.round(3).to_string(index=False))
        print_gains(frame)


if __name__ == "__main__":
    main()
