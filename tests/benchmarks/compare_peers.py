"""Compare trakdask with traker and dattri: same checkpoints, data, λ and proj_dim, one core.

Every measurement runs in a process of its own, engines take turns, and each number printed is the
median of this run. How to run it, and what the columns mean: README.md in this folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from _machine import in_a_process, parser_of
from _peer_engines import Job, measure, prepare
from numpy.typing import NDArray

# trakdask with its default projector, with a dense one as the others have, and with traker's API.
ENGINES = ("trakdask", "rademacher", "drop-in", "traker", "dattri")
MOST_BATCHES = 16
INSTALL = "Type pip install -e '.[peers]'."


def on_one_core(order: dict[str, Any]) -> Any:
    """Give an order to a fresh interpreter on one core, and return its answer."""
    # Numba is imported by the warm-up, which is not timed.
    return in_a_process(__file__, "--order", json.dumps(order), TRAKDASK_NUMBA="1")


def obey(order: dict[str, Any]) -> Any:
    """Do what :func:`on_one_core` ordered."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if "job" in order:
        return measure(Job(**order["job"]), Path(order["scores"]))
    return prepare(Path(order["folder"]), **order["prepare"])


class Comparison:
    """Runs jobs, each in a process of its own."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder

    def prepare(self, build: str, n_checkpoints: int) -> Job:
        wanted = {"build": build, "n_checkpoints": n_checkpoints}
        prepared = on_one_core({"prepare": wanted, "folder": str(self.folder)})
        return Job(
            engine="",
            build=build,
            checkpoints=tuple(prepared["checkpoints"]),
            damping=prepared["damping"],
            proj_dim=self.options.proj_dim,
            batch_size=128,
            n_train=self.options.n_train,
            n_target=128,
        )

    def run(self, job: Job) -> dict[str, Any]:
        """Return what is measured of a job, and its scores."""
        path = self.folder / "scores.npy"
        measured = on_one_core({"job": asdict(job), "scores": str(path)})
        what = f"{job.engine:10} {job.build} proj_dim={job.proj_dim} batch_size={job.batch_size}"
        print(f"  {what}: {measured['seconds']['total']:.1f} s", file=sys.stderr)
        return measured | {"scores": np.load(path).astype(np.float64), "n_train": job.n_train}

    def speed(self, job: Job) -> list[dict[str, Any]]:
        """Let the engines take turns, each time in another order."""
        rounds: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
        engines = list(self.options.engines)
        for repeat in range(self.options.repeats):
            turn = repeat % len(engines)
            for batch_size in self.options.batch_sizes:
                n_train = min(job.n_train, MOST_BATCHES * batch_size)
                sized = replace(job, batch_size=batch_size, n_train=n_train)
                for engine in engines[turn:] + engines[:turn]:
                    rounds[batch_size, engine].append(self.run(replace(sized, engine=engine)))
        return [
            summary(
                batch_size, engine, rounds[batch_size, engine], rounds.get((batch_size, "traker"))
            )
            for batch_size in self.options.batch_sizes
            for engine in engines
        ]

    def agreement(self, what: str, job: Job) -> list[dict[str, Any]]:
        """Compare everyone's scores, and with a projection also another seed's, with traker's."""
        job = replace(job, n_train=min(job.n_train, 1024))  # no digit twice
        reference = self.run(replace(job, engine="traker"))["scores"]
        others = [replace(job, engine=e) for e in self.options.engines if e != "traker"]
        if job.proj_dim is None:  # without a projection trakdask has but one way
            others = [each for each in others if each.engine != "rademacher"]
        if job.proj_dim is not None:
            others.append(replace(job, engine="traker", seed=1))
        rows = []
        for other in others:
            scores = self.run(other)["scores"]
            correlations = spearman(scores, reference)
            rows.append(
                {
                    "what": what,
                    "engine": other.engine + (", other seed" if other.seed else ""),
                    "mean_spearman": float(correlations.mean()),
                    "min_spearman": float(correlations.min()),
                    "difference": difference(scores, reference),
                }
            )
        return rows


def summary(
    batch_size: int,
    engine: str,
    records: list[dict[str, Any]],
    traker: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    """Medians over the repeats of one engine at one batch size."""

    def median(value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(value(record) for record in records)

    def rate(part: str) -> float:
        return median(lambda r: r["n_train"] / r["seconds"][part])

    def times_traker(clock: str) -> float | None:
        pairs = zip(traker or [], records, strict=False)
        ratios = [a[clock]["featurize"] / b[clock]["featurize"] for a, b in pairs]
        return statistics.median(ratios) if ratios else None

    seconds = [record["seconds"]["featurize"] for record in records]
    return {
        "batch_size": batch_size,
        "samples": records[0]["n_train"],
        "engine": engine,
        "featurize_per_s": rate("featurize"),
        "times_traker": times_traker("seconds"),
        "same_by_cpu_time": times_traker("cpu_seconds"),
        "gradients_per_s": rate("gradients"),
        "projection_per_s": rate("projection"),
        "finalize_score_s": median(lambda r: r["seconds"]["finalize_score"]),
        "peak_rss_mb": median(lambda r: r["peak_rss_mb"]),
        "spread": max(seconds) / min(seconds),
    }


def spearman(scores: NDArray[np.float64], reference: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rank correlation over the training samples, for each target."""
    from scipy.stats import rankdata

    ranks = [rankdata(x, axis=0) - (len(x) + 1) / 2 for x in (scores, reference)]
    norms = [np.sqrt((r**2).sum(axis=0)) for r in ranks]
    return np.asarray((ranks[0] * ranks[1]).sum(axis=0) / (norms[0] * norms[1]))


def difference(scores: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """Relative Frobenius distance, once one common factor of the scores is taken out."""
    factor = (scores * reference).sum() / (reference**2).sum()
    return float(np.linalg.norm(scores - factor * reference) / np.linalg.norm(scores))


def show(title: str, rows: list[dict[str, Any]]) -> None:
    import pandas as pd  # for the processes that are measured to stay small

    frame = pd.DataFrame(rows).rename(columns=lambda name: name.replace("_", " "))
    print(f"\n{title}\n{frame.to_string(index=False, float_format='{:.5g}'.format)}", flush=True)


def compare(options: argparse.Namespace, folder: Path) -> None:
    comparison = Comparison(options, folder)
    cnn = comparison.prepare("digits_cnn", 1)
    show(f"digits_cnn, p = {options.proj_dim}, 1 checkpoint", comparison.speed(cnn))
    if "traker" in options.engines:
        agreement = comparison.agreement("digits_cnn, own projection, 1 checkpoint", cnn)
        exact = replace(comparison.prepare("tiny_mlp", 3), proj_dim=None)
        one = replace(exact, checkpoints=exact.checkpoints[:1])
        agreement += comparison.agreement("tiny_mlp, no projection, 1 checkpoint", one)
        agreement += comparison.agreement("tiny_mlp, no projection, 3 checkpoints", exact)
        show("Spearman of the scores with traker's, at equal λ", agreement)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    sizes = {"batch_sizes": [32, 128, 512], "n_train": 2048, "proj_dim": 2048}
    parser = parser_of(__doc__, **sizes, repeats=2)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--quick", action="store_true", help="one repeat of one small batch size")
    parser.add_argument("--order", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.quick:
        options.batch_sizes, options.n_train, options.repeats = [64], 256, 1
    needed = {"traker": "trak", "dattri": "dattri"}
    for engine in () if options.order else options.engines:
        if engine in needed and importlib.util.find_spec(needed[engine]) is None:
            parser.error(f"{engine} is not installed, and --engines asks for it. {INSTALL}")
    return options


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    if options.order:
        print(json.dumps(obey(options.order)))
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(options, Path(folder))


if __name__ == "__main__":
    main()
