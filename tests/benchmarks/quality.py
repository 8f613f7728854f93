"""How good are the scores? LDS of estimators × dampings on models retrained on random halves.

    python tests/benchmarks/quality.py

Compares plain TRAK and soft weights at the closed-form, the automatic and the best λ, over tasks,
checkpoints, proj_dim and projectors. The retrained models' outputs are committed; features, scores
and intervals stay in the cache: a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
import torch
import xarray as xr
from _fits import ALL
from _machine import made_once, parser_of
from _quality_peers import PEERS, PeerJob
from _quality_report import comparisons, report, summary, verdicts
from _quality_scores import (
    ESTIMATORS,
    FACTORS,
    PROJECTORS,
    Setting,
    evaluate,
    judge,
    keep_row,
    read_row,
)
from _quality_subjects import SUBJECTS
from _quality_truth import checkpoints, keep, retrain, truth

POWERS = tuple(name for name in ESTIMATORS if name not in ("trak", "soft"))


# --- stages ---------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """Train the models to attribute, and the truth that is committed."""
    for name in options.tasks:
        checkpoints(ALL[name], options.cache, max(options.checkpoints))
        keep(ALL[name], retrain(ALL[name], options.cache))


def score(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for every setting."""
    for name in options.tasks:
        truth(SUBJECTS[name])  # what is missing is missing before hours of work
    wanted = list(settings(options))
    rows = []
    for done, setting in enumerate(wanted, start=1):
        start = time.perf_counter()
        rows.append(evaluate(setting, options.cache))
        if (seconds := time.perf_counter() - start) > 1:
            what = " ".join(map(str, asdict(setting).values()))
            print(f"  {done}/{len(wanted)} {what}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return rows


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    """Yield all of them, those of one set of features together.

    SJLT only at the number of checkpoints in the middle, other powers at the largest proj_dim.
    """
    middle = sorted(options.checkpoints)[len(options.checkpoints) // 2]
    for task, projector, p in itertools.product(options.tasks, PROJECTORS, options.proj_dims):
        is_dense = projector == "Rademacher"
        for n in options.checkpoints if is_dense else [middle]:
            has_powers = is_dense and p == max(options.proj_dims)
            has_powers &= SUBJECTS[task].task != "regression"
            for estimator in ("trak", "soft", *(POWERS if has_powers else ())):
                yield Setting(task, projector, p, n, estimator)


def score_peers(options: argparse.Namespace) -> None:
    """Keep the scores of other packages at λ = 0 and at every factor."""

    def write(engine: str, job: PeerJob, path: Path) -> None:
        start = time.perf_counter()
        np.save(path, np.stack(list(PEERS[engine](job, [0.0, *FACTORS]))))
        print(f"  {path.stem}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)

    for engine, path, job in peer_jobs(options):
        made_once(path, partial(write, engine, job))


def peer_jobs(options: argparse.Namespace) -> Iterator[tuple[str, Path, PeerJob]]:
    """Yield package, file of its scores, and what it is to score: classifiers."""
    tasks = [name for name in options.tasks if is_classification(name)]
    for task, p, n in itertools.product(tasks, options.proj_dims, options.peer_checkpoints):
        subject = SUBJECTS[task]
        job = PeerJob(subject, checkpoints(subject, options.cache, n), p)
        for engine in PEERS:
            name = f"{engine}-{task}-{subject.digest()}-p{p}-c{n}.npy"
            yield engine, options.cache / "peers" / name, job


def peer_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for every set of other packages' scores that the cache has."""
    rows = []
    for engine, path, job in peer_jobs(options):
        row_path = path.with_name(f"{path.stem}-row.json")
        if path.exists() and not row_path.exists():
            names = ["default", *(f"{factor:.4g}" for factor in FACTORS)]
            scores = xr.DataArray(
                np.load(path), dims=("damping", "sample", "target"), coords={"damping": names}
            )
            facts = {"engine": engine, "task": job.subject.name, "proj_dim": job.proj_dim}
            facts["checkpoints"] = len(job.checkpoints)
            keep_row(row_path, job.subject, scores.transpose("sample", "target", "damping"), facts)
        if row_path.exists():
            rows.append(read_row(row_path))
    return rows


# --- result ---------------------------------------------------------------------------------------


def assemble(
    options: argparse.Namespace, rows: list[dict[str, Any]], peers: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return everything that is printed."""
    tasks = []
    for name in options.tasks:
        of_task = [row for row in (*rows, *peers) if row["task"] == name]
        tasks.append(facts(name, options) | judge(SUBJECTS[name], of_task, options.resamples))
    compared = comparisons(rows, peers)
    names = [f"{name} auto - trak best" for name in ("soft", *POWERS)]
    names.append("soft auto - trak closed form")
    return {
        "header": {
            "truth": "random halves of the training samples",
            "λ grid": f"{FACTORS[0]:.2g} to {FACTORS[-1]:.2g} tr(K²)/tr(K), a quarter decade apart",
            "resamples": options.resamples,
        },
        "tasks": tasks,
        "rows": rows,
        "comparisons": compared,
        "peers": peers,
        "verdicts": {name: verdicts(compared, name) for name in names},
        "summary": {
            kind: summary([row for row in rows if is_classification(row["task"]) == wanted])
            for kind, wanted in (("classification", True), ("regression and language", False))
        },
    }


def is_classification(task: str) -> bool:
    return SUBJECTS[task].task == "image_classification"


def facts(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what the task is."""
    subject = SUBJECTS[name]
    n_subsets, n_seeds, n_targets = truth(subject).shape
    state = torch.load(checkpoints(subject, options.cache, 1)[0], weights_only=True)
    return {
        "task": name,
        "parameters": sum(parameter.numel() for parameter in subject.build().parameters()),
        "n": len(subject.data()[0][0]),
        "targets": n_targets,
        "subsets": n_subsets,
        "seeds": n_seeds,
        f"{subject.skill} (train, targets)": ", ".join(
            f"{subject.skill_of(state, part):.2f}" for part in (0, 1)
        ),
    }


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(
        __doc__, tasks=list(SUBJECTS), proj_dims=[512, 2048], checkpoints=[1, 3, 10],
        peer_checkpoints=[1, 3], resamples=500, cache=Path("demo-output/quality"),
    )  # fmt: skip
    parser.add_argument("--stage", choices=("train", "peers", "score"), default="score")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(1)
    if options.stage == "train":
        train(options)
        return
    if options.stage == "peers":
        score_peers(options)
        return
    with dask.config.set(scheduler="synchronous"):
        print(report(assemble(options, score(options), peer_rows(options))))


if __name__ == "__main__":
    main()
