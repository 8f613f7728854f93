"""Do groups of training data contribute what scores say? Against training without each of them.

    python tests/benchmarks/credit.py    # eight minutes

The rows of small tasks come from twelve made sources, which differ in size and in the classes that
they have. In three of them, 40 % of the labels are wrong. Scores are of ten checkpoints of all data
(five of the transformer) and 2,048 random columns. The truth is five models without each source
(two of the transformer). Sources are drawn anew several times for cheap tasks; numbers are means
over draws, ± the standard error where there are several.

"Rank correlations" are over sources: of the sums of scores for single targets with the changes of
their outputs, and of shares in `td.group_score(share=True)` with the changes of the sum of all
outputs. "Size" is the number of samples of a source, and "same class" the number with the target's
class, which need no attribution. "Coverage" is how often the measured change is within 90 %
intervals of `td.group_score(level=)`, times the number that fits best (the scale), and how often it
is if the error of the measured change is added. "Wide" is the mean distance of the bounds from the
score, times the scale, in units of the standard deviation of the measured changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from _fits import featurized
from _machine import parser_of
from _quality_tasks import SUBJECTS, Data, Regression, Subject
from scipy.special import stdtrit

import trakdask as td

DRAWS = {"mlp": 1, "early": 3, "cancer": 3, "diabetes": 3, "transformer": 1}
SOURCES, WRONG, SHARE_WRONG = 12, 3, 0.4
N_CHECKPOINTS, SEEDS, LEVEL = {"transformer": 5}, {"transformer": 2}, 0.9
SKETCH = td.SJLT(proj_dim=2048)


def sources(labels: np.ndarray, draw: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each sample, and the labels of which some are wrong."""
    rng = np.random.default_rng([draw, len(labels)])
    numbers = labels.dtype.kind == "f"
    classes = pd.qcut(labels, 5, labels=False) if numbers else labels
    size = rng.dirichlet(np.full(SOURCES, 3.0))
    prefers = size[:, None] * rng.dirichlet(np.ones(classes.max() + 1), SOURCES)
    source = np.array([rng.choice(SOURCES, p=prefers[:, c] / prefers[:, c].sum()) for c in classes])
    is_wrong = (source < WRONG) & (rng.random(len(labels)) < SHARE_WRONG)
    labels = labels.copy()
    if numbers:
        labels[is_wrong] = rng.permutation(labels)[is_wrong]
    else:
        wrong = labels[is_wrong] + rng.integers(1, labels.max() + 1, is_wrong.sum())
        labels[is_wrong] = wrong % (labels.max() + 1)
    return np.array([f"source {s:02}" for s in source]), labels


def subject_of(name: str, draw: int) -> tuple[Subject, np.ndarray]:
    """Return a task with the labels of its sources, and the source of each sample."""
    subject = SUBJECTS[name]
    (inputs, labels), targets = subject.data()
    source, labels = sources(labels, draw)

    def data() -> Data:
        return (inputs, labels), targets

    return dataclasses.replace(subject, data=data), source


def trainer(subject: Subject) -> Callable[[np.ndarray, int], np.ndarray]:
    """Return a function that trains; a model is trained once for all that ask for it."""
    outputs: dict[tuple[bytes, int], np.ndarray] = {}
    n = len(subject.data()[0][0])

    def train(positions: np.ndarray, seed: int) -> np.ndarray:
        key = positions.tobytes(), seed
        if key not in outputs:
            mask = np.zeros(n, bool)
            mask[positions] = True
            outputs[key] = subject.outputs(subject.train(mask, seed))
        return outputs[key]

    return train


def with_noise(sums: xr.Dataset, result: xr.Dataset, freedom: int) -> tuple[float, float]:
    """Return how often effects are in intervals with the errors of both sides, and their width."""
    if "target" not in sums.dims:
        sums = sums.expand_dims(target=1)
    value = sums["share" if "share" in sums else "score"].transpose("source", "target")
    half = abs(result.scale) * (sums.upper - sums.lower).transpose("source", "target") / 2
    error = result.effect_error * stdtrit(freedom, (1 + LEVEL) / 2)
    inside = abs(result.effect - result.scale * value) <= np.hypot(half, error)
    return float(inside.mean()), float(half.mean() / result.effect.std())


def row(name: str, draw: int) -> dict[str, Any]:
    subject, source = subject_of(name, draw)
    n = N_CHECKPOINTS.get(name, 10)
    model = td.Model(subject.build, [subject.train(None, s) for s in range(n)], subject.task)
    train, targets = featurized(model, subject.samples(0), subject.samples(1), SKETCH)
    train = train.assign_coords(source=("sample", source))
    train_fn = trainer(subject)

    def total(positions: np.ndarray, seed: int) -> np.ndarray:
        return train_fn(positions, seed).sum(keepdims=True)

    def compared(function: Any, sums: Any) -> xr.Dataset:
        seeds = SEEDS.get(name, 5)
        result = td.evaluate.leave_group_out(function, sums, train.source, seeds=seeds, resamples=9)
        return result.compute()

    bounded = td.group_score(train, targets, by="source", level=LEVEL).compute()
    size = xr.ones_like(train.out_to_loss[:, 0]).groupby("source").sum().drop_vars("checkpoint")
    sums = {
        "scores": bounded.score,
        "trak": td.group_score(train, targets, "trak", by="source").compute(),
        "size": xr.zeros_like(bounded.score) + size,
    }
    if not isinstance(subject, Regression):
        is_same = train.label.values[:, None] == targets.label.values
        of_class = xr.DataArray(is_same * 1.0, {"source": train.source}, ("sample", "target"))
        sums["same class"] = of_class.groupby("source").sum()
    statement = td.group_score(train, targets, by="source", level=LEVEL, share=True).compute()
    singles, pairs = compared(train_fn, sums), compared(train_fn, bounded)
    shares = compared(total, statement)
    of_size = compared(total, size.rename("score").expand_dims(target=1))
    sums_with_noise, sums_wide = with_noise(bounded, pairs, n - 1)
    shares_with_noise, shares_wide = with_noise(statement, shares, n - 1)
    is_right = np.sign(statement.share) == np.sign(shares.effect[:, 0])
    is_certain = (statement.lower > 0) | (statement.upper < 0)
    lowest = np.argsort(statement.share.values)[:WRONG]
    return {
        "task": name,
        **{f"single targets, {kind}": float(singles.lds_mean.sel(estimator=kind)) for kind in sums},
        "single targets, ceiling": float(singles.ceiling_mean),
        "all targets, credit": float(shares.lds[0]),
        "all targets, size": float(of_size.lds[0]),
        "all targets, ceiling": float(shares.ceiling[0]),
        "scale of sums": float(pairs.scale),
        "sums": float(pairs.coverage_mean),
        "sums, both errors": sums_with_noise,
        "sums, wide": sums_wide,
        "shares": float(shares.coverage[0]),
        "shares, both errors": shares_with_noise,
        "shares, wide": shares_wide,
        "certain": float(is_certain.mean()),
        "right sign where certain": float(is_right.where(is_certain).mean()),
        "sources with wrong labels among the 3 lowest": float((lowest < WRONG).sum()),
    }


def cell(values: pd.Series) -> str:
    error = values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():.2f}" + (f" ± {error:.2f}" if len(values) > 1 else "")


def main() -> None:
    options = parser_of(__doc__ or "", tasks=list(DRAWS)).parse_args()
    torch.set_num_threads(1)
    rows = pd.DataFrame([row(name, draw) for name in options.tasks for draw in range(DRAWS[name])])
    table = rows.groupby("task", sort=False).agg(cell).T
    print(f"Draws of sources: {', '.join(f'{DRAWS[name]} of {name}' for name in options.tasks)}")
    for title, prefixes in {
        "Rank correlations over sources": ("single", "all"),
        "What sums of scores are multiplied by to fit best": ("scale",),
        f"Coverage of {LEVEL:.0%} intervals": ("sums", "shares"),
        "Statements": ("certain", "right", "sources"),
    }.items():
        print(f"\n{title}")
        print(table[table.index.str.startswith(prefixes)].to_string())


if __name__ == "__main__":
    main()
