"""Linear datamodeling score of every kind of projection, at equal proj_dim, on the demo's model.

    python tests/benchmarks/lds.py

Trains the digits CNN on random halves of the training digits, asks how well each kind's scores
predict the ranks of those models' outputs, and resamples for intervals. Trained outputs and scores
stay in the cache: a run that was interrupted goes on, and a second one only resamples.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pandas as pd
import torch
from _machine import made_once, parser_of
from _quality_scores import digest
from _quality_tasks import Subject, members
from _quality_truth import checkpoints, retrain
from numpy.typing import NDArray

import trakdask as td
from trakdask import examples
from trakdask.arrays import evaluation
from trakdask.arrays.evaluation import Ranking
from trakdask.projection import SJLT, Kronecker, Mask, Projector, Rademacher

REFERENCE = "Rademacher"
N_TARGET = 200  # held out of training, as in the demo
Floats = NDArray[np.float64]


# --- what is compared -----------------------------------------------------------------------------


def kinds(mask_rows: int) -> dict[str, Callable[[int, int], Projector]]:
    """Name -> projector of (proj_dim, seed)."""
    return {
        REFERENCE: lambda p, seed: Rademacher(proj_dim=p, seed=seed),
        "SJLT s=4": lambda p, seed: SJLT(proj_dim=p, sparsity=4, seed=seed),
        "SJLT s=1": lambda p, seed: SJLT(proj_dim=p, sparsity=1, seed=seed),
        "GraSS": lambda p, seed: Mask(mask_rows, then=SJLT(proj_dim=p, seed=seed), seed=seed),
        "Kronecker": lambda p, seed: Kronecker(left=32, right=p // 32, seed=seed),
    }


# --- scores ---------------------------------------------------------------------------------------


def demo(options: argparse.Namespace) -> Subject:
    """Return the classifier of the demo, retrained on halves of its training digits."""
    data = functools.partial(examples.digits_arrays, N_TARGET)
    return Subject("demo", examples.digits_cnn, data, options.epochs, options.subsets)


def scores(subject: Subject, projector: Projector, options: argparse.Namespace) -> Floats:
    """Return scores (training sample, target), at the default damping."""
    paths = checkpoints(subject, options.cache, options.checkpoints)
    model = td.Model(subject.build, checkpoints=paths)

    def write(path: Path) -> None:
        features = [td.featurize(subject.samples(i), model, projector=projector) for i in (0, 1)]
        train, targets = (part.compute() for part in features)
        published = td.Trak(damping=0.03)  # no choices
        np.save(path, td.score(train, targets, published).values)

    name = f"scores-{digest(projector.spec(), [path.name for path in paths])}.npy"
    return np.load(made_once(options.cache / name, write)).astype(np.float64)


def predictions(
    subject: Subject, options: argparse.Namespace
) -> dict[tuple[str, int], list[Floats]]:
    """(kind, proj_dim) -> one array (subset, target) per seed of the projector."""
    n_train = len(subject.data()[0][0])
    masks = np.stack([members(s, n_train) for s in range(options.subsets)]).astype(np.float64)
    found = {}
    for proj_dim in options.proj_dims:
        for name, projector in kinds(options.mask_rows).items():
            start = time.perf_counter()
            found[name, proj_dim] = [
                masks @ scores(subject, projector(proj_dim, seed), options)
                for seed in range(options.projector_seeds)
            ]
            seconds = time.perf_counter() - start
            print(f"  {name}, p = {proj_dim}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return found


# --- rank correlation, resampled ------------------------------------------------------------------


def bootstrap(
    truth: Ranking, predicted: dict[Any, list[Ranking]], repeats: int
) -> dict[Any, Floats]:
    """Mean LDS of every entry in ``repeats`` resamples, the same for all of subsets and targets."""
    n_targets, n_subsets = truth.places.shape
    rng = np.random.default_rng(0)
    found: dict[Any, list[float]] = {key: [] for key in predicted}
    for _ in range(repeats):
        counts = rng.multinomial(n_subsets, np.full(n_subsets, 1 / n_subsets)).astype(np.float64)
        targets = rng.integers(n_targets, size=n_targets)
        for key, rankings in predicted.items():
            seeds = rng.integers(len(rankings), size=len(rankings))
            found[key].append(
                float(evaluation.lds(truth, rankings, counts)[seeds][:, targets].mean())
            )
    return {key: np.array(means) for key, means in found.items()}


def interval(draws: Floats) -> Floats:
    return np.quantile(draws, [0.025, 0.975])


def noise(found: Floats) -> dict[str, float]:
    """Spearman between two models of one subset, and what a perfect prediction would reach."""
    n_subsets, n_seeds, _ = found.shape
    if n_seeds == 1:
        return {}
    rankings = [Ranking.of(found[:, k]) for k in range(n_seeds)]
    between = evaluation.between_seeds(rankings, np.ones(n_subsets))
    ceiling = evaluation.ceiling(between, n_seeds)
    return {"between_seeds": float(between.mean()), "ceiling": float(ceiling.mean())}


# --- report ---------------------------------------------------------------------------------------


def evaluate(
    found: Floats, predicted: dict[tuple[str, int], list[Floats]], repeats: int
) -> pd.DataFrame:
    """One row per kind and proj_dim."""
    truth = Ranking.of(found.mean(axis=1))
    rankings = {key: [Ranking.of(one) for one in many] for key, many in predicted.items()}
    draws = bootstrap(truth, rankings, repeats)
    by_seed = {
        k: evaluation.lds(truth, r, np.ones(len(found))).mean(axis=1) for k, r in rankings.items()
    }
    rows = []
    for (kind, proj_dim), values in by_seed.items():
        reference = REFERENCE, proj_dim
        low, high = interval(draws[reference])
        least, most = interval(draws[kind, proj_dim] - draws[reference])
        row = {"kind": kind, "p": proj_dim, "LDS": values.mean()}
        row["95 % interval"] = shown(interval(draws[kind, proj_dim]))
        row["seeds, least to most"] = shown((values.min(), values.max()))
        if kind != REFERENCE:
            row["less Rademacher"] = values.mean() - by_seed[reference].mean()
            row["its interval"] = shown((least, most))
            row["differs"] = "no" if least <= 0 <= most else "yes"
            # In Rademacher's interval at this proj_dim, seen alone.
            row["within"] = "yes" if low <= values.mean() <= high else "no"
        rows.append(row)
    return pd.DataFrame(rows)


def shown(ends: Iterable[float]) -> str:
    return " to ".join(f"{end:.4f}" for end in ends)


def describe(options: argparse.Namespace, found: Floats) -> dict[str, Any]:
    n_train = len(examples.digits_arrays(N_TARGET)[0][0])
    n_rows = sum(parameter.numel() for parameter in examples.digits_cnn().parameters())
    return {
        "model": f"digits_cnn, {options.epochs} epochs",
        "truth": f"{options.subsets} halves of {n_train} digits × {options.seeds} models each",
        "targets": found.shape[2],
        "checkpoints": options.checkpoints,
        "damping": 0.03,
        "GraSS keeps": f"{options.mask_rows} of {n_rows} gradient elements",
        "projector_seeds": options.projector_seeds,
        "resamples": options.resamples,
        **{name: round(value, 4) for name, value in noise(found).items()},
    }


def main() -> None:
    parser = parser_of(
        __doc__, proj_dims=[512, 1024], projector_seeds=3, mask_rows=16384, subsets=200, seeds=3,
        checkpoints=5, epochs=12, resamples=2000, cache=Path("demo-output/lds"),
    )  # fmt: skip
    options = parser.parse_args()
    torch.set_num_threads(1)
    subject = demo(options)
    found = retrain(subject, options.cache / f"seeds-{options.seeds}", options.seeds)
    with dask.config.set(scheduler="synchronous"):
        predicted = predictions(subject, options)
    for name, value in describe(options, found).items():
        print(f"{name:>16}: {value}")
    table = evaluate(found.astype(np.float64), predicted, options.resamples)
    print(f"\n{table.round(4).to_string(index=False, na_rep='')}")


if __name__ == "__main__":
    main()
