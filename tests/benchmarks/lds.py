"""Linear datamodeling score of every kind of projection, at equal proj_dim, on the demo's model.

    python tests/benchmarks/lds.py

Trains the digits CNN on random halves of the training digits, asks how well each kind's scores
predict the ranks of those models' outputs, and resamples for intervals. Trained outputs and scores
stay in the cache: a run that was interrupted goes on, and a second one only resamples.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import numpy as np
import torch
from _machine import parser_of
from _quality_tasks import members
from numpy.typing import NDArray

import trakdask as td
from trakdask import examples
from trakdask.arrays import ranks
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


# --- truth: models trained on random halves -------------------------------------------------------


@dataclass(frozen=True)
class Retraining:
    """One model to train: on which half of the digits, from which weights, into which file."""

    subset: int
    seed: int
    epochs: int
    path: Path


def retrain(job: Retraining) -> None:
    """Train on one subset and store the outputs f of all targets; nothing if they are stored."""
    if job.path.exists():
        return
    (images, labels), targets = examples.digits_arrays(N_TARGET)
    mask = members(job.subset, len(images))
    # Seeds of their own: 0, 1, ... are those of the checkpoints that are attributed.
    seed = 1_000_000 * (job.seed + 1) + job.subset
    state = examples.train_classifier(
        examples.digits_cnn, images[mask], labels[mask], seed=seed, epochs=job.epochs
    )
    partial = job.path.with_suffix(".partial.npz")
    np.savez(partial, outputs=outputs(state, *targets))
    partial.replace(job.path)


def outputs(state: dict[str, torch.Tensor], images: Any, labels: Any) -> Floats:
    """f = log(p / (1 - p)) of the correct class, in float64: what trakdask attributes."""
    model = examples.digits_cnn().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        logits = model(torch.from_numpy(images)).double()
    column = torch.from_numpy(labels)[:, None]
    others = logits.scatter(1, column, -torch.inf)
    return (logits.gather(1, column)[:, 0] - others.logsumexp(1)).numpy()


def retrained_outputs(options: argparse.Namespace) -> Floats:
    """(subset, seed, target), trained where the cache has them not."""
    folder = options.cache / f"retrained-e{options.epochs}-t{N_TARGET}"
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        Retraining(s, k, options.epochs, folder / f"subset{s:04}-seed{k}.npz")
        for s in range(options.subsets)
        for k in range(options.seeds)
    ]
    for done, _ in enumerate(_each(retrain, jobs, options.processes), start=1):
        if done % 50 == 0 or done == len(jobs):
            print(f"  {done} of {len(jobs)} models", file=sys.stderr, flush=True)
    found = np.stack([np.load(job.path)["outputs"] for job in jobs])
    return found.reshape(options.subsets, options.seeds, -1)


def _each(function: Callable[[Any], None], jobs: list[Any], processes: int) -> Iterator[None]:
    if processes == 1:
        yield from map(function, jobs)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(function, jobs)


# --- prediction: sums of scores -------------------------------------------------------------------


class Attribution:
    """Scores of the full-data models by any projector, through the public interface."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.paths = examples.digits_checkpoints(
            options.cache / "checkpoints",
            n_checkpoints=options.checkpoints,
            n_target=N_TARGET,
            epochs=options.epochs,
        )
        self.model = td.Model(examples.digits_cnn, checkpoints=self.paths)
        self.samples = examples.digits(n_target=N_TARGET, chunks=512)

    def scores(self, projector: Projector) -> Floats:
        """(training sample, target), at the default damping."""
        path = self.options.cache / f"scores-{self._digest(projector)}.npy"
        if not path.exists():
            features = (td.featurize(s, self.model, projector=projector) for s in self.samples)
            train, targets = (part.compute() for part in features)
            options = {"estimator": "trak", "damping": "closed_form"}  # as published; no choices
            np.save(path, td.score(train, targets, **options).values)
        return np.load(path).astype(np.float64)

    def _digest(self, projector: Projector) -> str:
        made_of = [projector.spec(), [path.name for path in self.paths], td.__version__]
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]


def predictions(options: argparse.Namespace) -> dict[tuple[str, int], list[Floats]]:
    """(kind, proj_dim) -> one array (subset, target) per seed of the projector."""
    attribution = Attribution(options)
    n_train = attribution.samples[0].sizes["sample"]
    masks = np.stack([members(s, n_train) for s in range(options.subsets)]).astype(np.float64)
    found = {}
    for proj_dim in options.proj_dims:
        for name, projector in _wanted(options).items():
            seeds = range(options.projector_seeds)
            start = time.perf_counter()
            found[name, proj_dim] = [
                masks @ attribution.scores(projector(proj_dim, seed)) for seed in seeds
            ]
            seconds = time.perf_counter() - start
            print(f"  {name}, p = {proj_dim}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return found


def _wanted(options: argparse.Namespace) -> dict[str, Callable[[int, int], Projector]]:
    known = kinds(options.mask_rows)
    return {name: known[name] for name in known if name in {REFERENCE, *options.kinds}}


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
            found[key].append(float(ranks.lds(truth, rankings, counts)[seeds][:, targets].mean()))
    return {key: np.array(means) for key, means in found.items()}


def interval(draws: Floats) -> list[float]:
    return [float(q) for q in np.quantile(draws, [0.025, 0.975])]


def noise(found: Floats) -> dict[str, float]:
    """Spearman between two models of one subset, and what a perfect prediction would reach."""
    n_subsets, n_seeds, _ = found.shape
    if n_seeds == 1:
        return {}
    rankings = [Ranking.of(found[:, k]) for k in range(n_seeds)]
    between = ranks.between_seeds(rankings, np.ones(n_subsets))
    ceiling = ranks.ceiling(between, n_seeds)
    return {"between_seeds": float(between.mean()), "ceiling": float(ceiling.mean())}


# --- report ---------------------------------------------------------------------------------------


def evaluate(
    found: Floats, predicted: dict[tuple[str, int], list[Floats]], repeats: int
) -> list[dict[str, Any]]:
    """One row per kind and proj_dim."""
    truth = Ranking.of(found.mean(axis=1))
    rankings = {key: [Ranking.of(one) for one in many] for key, many in predicted.items()}
    draws = bootstrap(truth, rankings, repeats)
    by_seed = {
        k: ranks.lds(truth, r, np.ones(len(found))).mean(axis=1) for k, r in rankings.items()
    }
    rows = []
    for key, values in by_seed.items():
        reference = REFERENCE, key[1]
        low, high = interval(draws[reference])
        rows.append(
            {
                "kind": key[0],
                "proj_dim": key[1],
                "lds": float(values.mean()),
                "interval": interval(draws[key]),
                "by_seed": values.tolist(),
                "difference": float(values.mean() - by_seed[reference].mean()),
                "difference_interval": interval(draws[key] - draws[reference]),
                # In Rademacher's interval at this proj_dim, seen alone.
                "within": bool(low <= values.mean() <= high),
            }
        )
    return rows


def show(facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    for name, value in facts.items():
        print(f"{name:>16}: {value}")
    print(
        f"\n{'kind':<12}{'p':>6}{'LDS':>8}  {'95 % interval':<18}{'seeds, least to most':<22}",
        end="",
    )
    print(f"{'less Rademacher':>16}  {'95 % interval':<20}{'differs':<9}within")
    for row in rows:
        print("".join([*_own_cells(row), *_cells_beside_reference(row)]).rstrip())


def _own_cells(row: dict[str, Any]) -> list[str]:
    low, high = row["interval"]
    seeds = f"{min(row['by_seed']):.4f} to {max(row['by_seed']):.4f}"
    return [
        f"{row['kind']:<12}{row['proj_dim']:>6}{row['lds']:>8.4f}  ",
        f"{f'{low:.4f} to {high:.4f}':<18}{seeds:<22}",
    ]


def _cells_beside_reference(row: dict[str, Any]) -> list[str]:
    if row["kind"] == REFERENCE:
        return []
    low, high = row["difference_interval"]
    return [
        f"{row['difference']:>+16.4f}  {f'{low:+.4f} to {high:+.4f}':<20}",
        f"{'no' if low <= 0 <= high else 'yes':<9}{'yes' if row['within'] else 'no'}",
    ]


def describe(options: argparse.Namespace, found: Floats) -> dict[str, Any]:
    n_train = len(examples.digits_arrays(N_TARGET)[0][0])
    n_rows = sum(parameter.numel() for parameter in examples.digits_cnn().parameters())
    return {
        "model": f"digits_cnn, {options.epochs} epochs",
        "truth": f"{options.subsets} halves of {n_train} digits × {options.seeds} models each",
        "targets": found.shape[2],
        "checkpoints": options.checkpoints,
        "damping": "closed_form",
        "GraSS keeps": f"{options.mask_rows} of {n_rows} gradient elements",
        "projector_seeds": options.projector_seeds,
        "resamples": options.resamples,
        **{name: round(value, 4) for name, value in noise(found).items()},
    }


def arguments(argv: list[str] | None) -> argparse.Namespace:
    names = list(kinds(1))
    parser = parser_of(
        __doc__, proj_dims=[512, 1024], projector_seeds=3, mask_rows=16384, subsets=200, seeds=3,
        checkpoints=5, epochs=12, processes=1, resamples=2000,
    )  # fmt: skip
    parser.add_argument("--cache", type=Path, default=Path("demo-output/lds"))
    parser.add_argument("--kinds", nargs="+", choices=names, default=names)
    parser.add_argument("--retrain-only", action="store_true", help="fill the cache and stop")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(1)
    found = retrained_outputs(options)
    if options.retrain_only:
        return
    with dask.config.set(scheduler="synchronous"):
        predicted = predictions(options)
    show(describe(options, found), evaluate(found, predicted, options.resamples))


if __name__ == "__main__":
    main()
