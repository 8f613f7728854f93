"""What left-out checkpoints say of every λ, beside the LDS: of checkpoints of halves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from _fits import SKETCH, a_quarter, featurized
from _machine import made_once
from _quality_damping import (
    FIRST,
    N_CHECKPOINTS,
    Floats,
    Row,
    _kernels,
    _left_out,
    half_checkpoints,
    unit_ranks,
)
from _quality_scores import ground
from _quality_tasks import Subject, members

import trakdask as td
from trakdask.attribution.estimators import choosing as choosing_of
from trakdask.attribution.estimators import with_gram

#: Which of the ten checkpoints are scored together.
TOGETHER = [[*range(5)], [*range(5, 10)], [*range(10)]]
N_ROWS = 250  # training rows that are predicted, too


def rows_of_folds(subject: Subject, cache: Path) -> list[Row]:
    """Return a row for each kind of features and checkpoints; those of the cache are kept."""
    path = cache / "folds" / f"{subject.name}-{subject.digest()}.json"
    made_once(path, lambda path: path.write_text(json.dumps(list(_rows(subject, cache)))))
    rows: list[Row] = json.loads(path.read_text())
    return rows


def _rows(subject: Subject, cache: Path) -> Iterator[Row]:
    parts = subject.samples(0), subject.samples(1)
    model = td.Model(subject.build, half_checkpoints(subject, cache, N_CHECKPOINTS), subject.task)
    curved = td.curvature(a_quarter(parts[0]), model).then(td.SJLT(proj_dim=1024))
    for kind, projector in (("plain", SKETCH), ("curvature", curved)):
        for row in _of_features(subject, *featurized(model, *parts, projector)):
            yield {"task": subject.name, "features": kind} | row


def _of_features(subject: Subject, train: xr.Dataset, targets: xr.Dataset) -> Iterator[Row]:
    drawn, outputs = ground(subject)
    drawn, truth = drawn.values.astype(np.float32), unit_ranks(outputs.mean("seed").values)
    train = train.drop_vars("wrong_classes", errors="ignore")
    n = train.sizes["sample"]
    trained_on = np.array([members(FIRST + j, n) for j in range(N_CHECKPOINTS)])
    some_rows = np.sort(np.random.default_rng(0).choice(n, min(n, N_ROWS), replace=False))
    estimator, chooser = with_gram(train.chunk(), "auto"), choosing_of(train)
    weights = estimator.of_sums()
    held = list(_kernels(train, targets, weights))
    own = [k[0] for k in _kernels(train, train.isel(sample=some_rows), weights)]
    choosing = held
    if chooser.gram_weights != weights.gram_weights:
        choosing = list(_kernels(train, targets, chooser))
    sides = {
        "targets": ([k[0] for k in held], targets.output.values),
        "rows": (own, train.output.values[some_rows]),
    }
    for together in TOGETHER:
        some = train.isel(checkpoint=together).chunk()
        g = estimator.of_scores(some).g(some).compute()
        products = sum(held[c][0] for c in together)
        predicted = [drawn @ (g.mean(axis=1).astype(np.float32)[:, None] * k) for k in products]
        lds = [(unit_ranks(p) * truth).sum(axis=0).mean() for p in predicted]
        r, f = chooser.g(some).compute().mean(axis=1), some.output.mean("checkpoint")
        totals = sum(_left_out(*choosing[c][1:], r) for c in together)
        row: Row = {
            "n": len(together), "first": together[0], "samples": n,
            "lds": np.round(lds, 5).tolist(),
            "curve": [round(float(np.corrcoef(each, f)[0, 1]), 5) for each in totals],
        }  # fmt: skip
        for side, (kernels, output) in sides.items():
            folds = predictions([kernels[c] for c in together], g, trained_on[together])
            row[side] = correlations(folds, output[:, together].T)
        yield row


def predictions(kernels: list[Floats], g: Floats, trained_on: Floats) -> Floats:
    """Return what all checkpoints but one predict for that one, (ρ, fold, target)."""
    n = len(kernels)
    without = (g.sum(axis=1, keepdims=True) - g) / (n - 1)  # mean weights without a checkpoint
    weights = (trained_on * without.T).astype(np.float32)  # (fold, sample)
    total: Any = 0
    for c, kernel in enumerate(kernels):
        part = weights @ kernel
        part[:, c] = 0
        total = total + part
    return np.asarray(total / (n - 1))


def correlations(folds: Floats, outputs: Floats) -> dict[str, Any]:
    """Return mean correlations over targets for each ρ: of all folds, and without each of them."""
    n = len(outputs)

    def spearman(kept: list[int]) -> list[float]:
        truth = unit_ranks(outputs[kept])
        return [round(float((unit_ranks(p[kept]) * truth).sum(axis=0).mean()), 5) for p in folds]

    def pearson(kept: list[int]) -> list[float]:
        truth = _unit(outputs[kept])
        return [round(float((_unit(p[kept]) * truth).sum(axis=0).mean()), 5) for p in folds]

    every = [*range(n)]
    sets = [every, *([i for i in every if i != j] for j in every)]
    return {
        "spearman": [spearman(kept) for kept in sets],
        "pearson": [pearson(kept) for kept in sets],
    }


def _unit(values: Floats) -> Floats:
    values = values - values.mean(axis=0)
    norm = np.linalg.norm(values, axis=0)
    return np.asarray(values / np.where(norm > 0, norm, 1))
