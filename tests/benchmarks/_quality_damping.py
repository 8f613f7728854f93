"""LDS at every λ, and the correlations that choose among them: of many checkpoints and features."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from _fits import SKETCH, a_quarter, featurized
from _machine import made_once
from _quality_tasks import Subject, members
from _quality_truth import checkpoints, ground
from numpy.typing import NDArray
from scipy.stats import rankdata

import trakdask as td
from trakdask.arrays.damping import GRID
from trakdask.attribution.estimators import choosing as choosing_of
from trakdask.attribution.estimators import with_gram
from trakdask.attribution.protocol import GramEstimator

FIRST = 1_000_000  # number of the first half: the truth has the halves 0, 1, ...
N_CHECKPOINTS = 10
LEAST_WEIGHT = 1e-9  # weights are divided by
#: Which of ten checkpoints are scored together: all, and several draws of fewer.
TOGETHER = [[0], [1], [2], [0, 1, 2], [3, 4, 5], [*range(5)], [*range(5, 10)], [*range(10)]]

Row = dict[str, Any]
Floats = NDArray[np.floating]


def half_checkpoints(subject: Subject, cache: Path, n: int) -> list[Path]:
    """Train what is missing of the models of halves and return their files."""
    stem = cache / "halves" / f"{subject.name}-{subject.digest()}"
    n_train = len(subject.data()[0][0])

    def write(index: int, path: Path) -> None:
        torch.save(subject.train(members(FIRST + index, n_train), seed=100 + index), path)

    return [made_once(Path(f"{stem}-h{index}.pt"), partial(write, index)) for index in range(n)]


def curves(subject: Subject, cache: Path) -> list[Row]:
    """Return a row for each kind of features and checkpoints; rows in the cache are kept."""
    path = cache / "dampings" / f"{subject.name}-{subject.digest()}.json"
    made_once(path, lambda path: path.write_text(json.dumps(list(_rows(subject, cache)))))
    rows: list[Row] = json.loads(path.read_text())
    return rows


def _rows(subject: Subject, cache: Path) -> Iterator[Row]:
    parts = subject.samples(0), subject.samples(1)
    for data, train in (("all", checkpoints), ("halves", half_checkpoints)):
        model = td.Model(subject.build, train(subject, cache, N_CHECKPOINTS), subject.task)
        curved = td.fits.curvature(a_quarter(parts[0]), model).then(td.SJLT(proj_dim=1024))
        for kind, projector in (("plain", SKETCH), ("curvature", curved)):
            for row in _of_features(subject, *featurized(model, *parts, projector)):
                yield {"task": subject.name, "data": data, "features": kind} | row


def _of_features(subject: Subject, train: xr.Dataset, targets: xr.Dataset) -> Iterator[Row]:
    drawn, outputs = ground(subject)
    drawn, truth = drawn.values.astype(np.float32), unit_ranks(outputs.mean("seed").values)
    train = train.drop_vars("wrong_classes", errors="ignore")
    estimator, chooser = with_gram(train.chunk(), "auto"), choosing_of(train)
    scoring = choosing = list(kernels(train, targets, estimator.of_sums()))
    if chooser.gram_weights != estimator.of_sums().gram_weights:
        choosing = list(kernels(train, targets, chooser))
    for together in TOGETHER:
        some = train.isel(checkpoint=together).chunk()
        g = estimator.of_scores(some).g(some).compute().mean(axis=1).astype(np.float32)
        products = sum(scoring[c][0] for c in together)
        predicted = [drawn @ (g[:, None] * product) for product in products]
        lds = [(unit_ranks(sums) * truth).sum(axis=0).mean() for sums in predicted]
        r = chooser.g(some).compute().mean(axis=1)
        f = some.output.mean("checkpoint")
        totals = sum(_left_out(*choosing[c][1:], r) for c in together)
        sums = np.array([[(choosing[c][1] ** k).sum() for k in (1, 2)] for c in together])
        yield {
            "n": len(together), "first": together[0], "samples": len(f),
            "lds": np.round(lds, 5).tolist(),
            "curve": [round(float(np.corrcoef(total, f)[0, 1]), 5) for total in totals],
            "closed form": float((0.03 * len(f) * sums[:, 1] / sums[:, 0] ** 2).mean()),
        }  # fmt: skip


def unit_ranks(values: Floats) -> Floats:
    ranks = rankdata(values, axis=0)
    ranks -= ranks.mean(axis=0)
    norm = np.linalg.norm(ranks, axis=0)
    return np.asarray(ranks / np.where(norm > 0, norm, 1))


def kernels(
    train: xr.Dataset, targets: xr.Dataset, weights: GramEstimator
) -> Iterator[tuple[Any, ...]]:
    """Yield φ(z)ᵀ(K + λI)⁻¹φ(t) (ρ, z, t), and what leaves rows out, of each checkpoint."""
    h = weights.h(train.chunk())
    h = np.ones(train.output.shape) if h is None else h.compute()
    for c in range(train.sizes["checkpoint"]):
        x, t = (ds.feature.values[:, :, c].astype(np.float64) for ds in (train, targets))
        root = np.sqrt(np.maximum(h[:, c], LEAST_WEIGHT))
        values, vectors = np.linalg.eigh((x @ x.T) * np.outer(root, root))
        values, lam = values.clip(min=0), GRID * values.mean()
        along = (vectors.T @ (root[:, None] * (x @ t.T))).astype(np.float32)
        back = (vectors / root[:, None]).astype(np.float32)
        shrunk = [(1 / (values + one)).astype(np.float32)[:, None] for one in lam]
        yield np.stack([back @ (each * along) for each in shrunk]), values, vectors, root, lam


def _left_out(values: Floats, vectors: Floats, root: Floats, lam: Floats, g: Floats) -> Floats:
    """Return the totals of training samples, each left out of K and r, (ρ, z)."""
    kept = values / (values + lam[:, None])
    share = np.square(vectors) @ kept.T  # h times leverage, (z, ρ)
    total = (vectors @ (kept.T * (vectors.T @ (g / root))[:, None])) / root[:, None]
    leverage = share / np.square(root)[:, None]
    return np.asarray(((total - g[:, None] * leverage) / (1 - share)).T)
