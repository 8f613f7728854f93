"""Do groups of training data contribute what scores say? Against training without each of them.

    python tests/benchmarks/credit.py    # six minutes

The rows of small tasks come from twelve made sources, which differ in size and in the classes that
they have. In three of them, 40 % of the labels are wrong. Scores are of ten checkpoints of all data
(five of the transformer) and 2,048 random columns. The truth is five models without each source.
Sources are drawn anew several times for cheap tasks; numbers are means over draws, ± the standard
error where there are several.

"Rank correlations" are over sources: of the sums of scores for single targets with the changes of
their outputs; and of shares in `td.credit` with the shares of the change of the sum of all outputs.
"Size" is the number of samples of a source, and "same class" the number with the target's class,
which need no attribution. "Coverage" is how often the measured change is within 90 % intervals of
`td.intervals` and `td.credit`: as they are, multiplied by the number that fits best, and that with
the error of the measured change added.
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

DRAWS = {"mlp": 2, "early": 5, "cancer": 5, "diabetes": 5, "transformer": 1}
SOURCES, WRONG, SHARE_WRONG = 12, 3, 0.4
N_CHECKPOINTS, SEEDS, LEVEL = {"transformer": 5}, 5, 0.9
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
    return np.array([f"source {s}" for s in source]), labels


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


def coverage_with_noise(sums: xr.Dataset, result: xr.Dataset, freedom: int) -> float:
    """Return how often effects are in intervals that hold the error of both sides."""
    half = (sums.upper - sums.lower) / 2
    if "target" not in half.dims:
        half, sums = half.expand_dims(target=1, axis=1), sums.expand_dims(target=1, axis=1)
    error = result.effect_error * stdtrit(freedom, (1 + LEVEL) / 2)
    value = sums["share" if "share" in sums else "score"]
    inside = abs(result.effect.values - value.values) <= np.hypot(half.values, error.values)
    return float(inside.mean())


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
        found = td.evaluate.leave_group_out(
            function, sums, train.source, seeds=SEEDS, resamples=300, confidence=0.68
        )
        return found.compute()

    size = xr.ones_like(train.out_to_loss[:, 0]).groupby("source").sum().drop_vars("checkpoint")
    bounded = td.intervals(train, targets, by="source", level=LEVEL).compute()
    sums = {
        "scores": bounded.score,
        "trak": td.group_score(train, targets, "trak", by="source").compute(),
        "size": xr.zeros_like(bounded.score) + size,
    }
    if not isinstance(subject, Regression):
        is_same = train.label.values[:, None] == targets.label.values
        of_class = xr.DataArray(is_same * 1.0, {"source": train.source}, ("sample", "target"))
        sums["same class"] = of_class.groupby("source").sum()
    singles = compared(train_fn, sums)
    pairs = compared(train_fn, bounded)
    scaled = bounded[["score", "lower", "upper"]] * pairs.scale.values
    statement = td.credit(train, targets, by="source", level=LEVEL).compute()
    shares = compared(total, statement)
    of_shares = statement[["share", "lower", "upper"]] * shares.scale.values
    of_size = compared(total, size.rename("score").expand_dims(target=1))
    bad = statement.share.values[:WRONG]
    return {
        "task": name,
        **{f"singles, {k}": float(singles.lds_mean.sel(estimator=k)) for k in sums},
        "singles, ceiling": float(singles.ceiling_mean),
        "shares, credit": float(shares.lds[0]),
        "shares, size": float(of_size.lds[0]),
        "shares, ceiling": float(shares.ceiling[0]),
        "scale of sums": float(pairs.scale),
        "scale of shares": float(shares.scale),
        "sums as they are": float(pairs.coverage_mean),
        "sums scaled": float(compared(train_fn, scaled).coverage_mean),
        "sums, both errors": coverage_with_noise(scaled, pairs, n - 1),
        "shares as they are": float(shares.coverage[0]),
        "shares scaled": float(compared(total, of_shares).coverage[0]),
        "shares, both errors": coverage_with_noise(of_shares, shares, n - 1),
        "certain": float(statement.is_certain.mean()),
        "right sign where certain": float(
            (np.sign(statement.share) == np.sign(shares.effect[:, 0]))
            .where(statement.is_certain)
            .mean()
        ),
        "of the 3 bad, among the lowest 3": float(
            (np.argsort(np.argsort(statement.share.values))[:WRONG] < WRONG).sum()
        ),
        "bad with negative shares": float((bad < 0).sum()),
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
        "Rank correlations over sources": ("singles", "shares, credit", "shares, size",
                                           "shares, ceiling"),
        "Sizes: what scores are multiplied by to fit best": ("scale",),
        f"Coverage of {LEVEL:.0%} intervals": ("sums", "shares as", "shares scaled",
                                               "shares, both"),
        "Statements": ("certain", "right", "of the", "bad"),
    }.items():  # fmt: skip
        print(f"\n{title}")
        print(table[table.index.str.startswith(prefixes)].to_string())


if __name__ == "__main__":
    main()
