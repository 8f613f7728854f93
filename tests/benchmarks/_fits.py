"""What benchmarks of scores share: tasks, LDS, and rows that a run which was interrupted keeps."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pandas as pd
import torch
import xarray as xr
from _machine import made_once, parser_of
from _quality_tasks import SUBJECTS
from _quality_truth import checkpoints, ground
from _quality_wider import HELD_OUT, LARGE, WIDER

import trakdask as td

ALL = SUBJECTS | WIDER | HELD_OUT
SKETCH = td.SJLT(proj_dim=2048)
EXACT_DAMPING = 1.0

Measure = Callable[[str, int, Path], dict[str, Any]]


def setting(name: str, cache: Path, n: int) -> tuple[Any, td.Model, tuple[xr.Dataset, xr.Dataset]]:
    """Return a task, its model with n checkpoints, and its training samples and targets."""
    subject = (ALL | LARGE)[name]
    model = td.Model(subject.build, checkpoints(subject, cache, n), subject.task)
    return subject, model, (subject.samples(0), subject.samples(1))


def a_quarter(samples: xr.Dataset) -> xr.Dataset:
    n = samples.sizes["sample"]
    return samples.isel(sample=np.sort(np.random.default_rng(0).choice(n, n // 4, replace=False)))


def featurized(
    model: td.Model, train: xr.Dataset, targets: xr.Dataset, projector: Any
) -> list[xr.Dataset]:
    return [td.featurize(samples, model, projector).compute() for samples in (train, targets)]


def lds(subject: Any, train: xr.Dataset, targets: xr.Dataset, **options: Any) -> float:
    scores = td.score(train, targets, **options)
    return float(td.evaluate.lds(scores, *ground(subject), resamples=1).lds_mean.compute())


def cpu_seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def rows_of(
    measure: Measure, tasks: list[str], cache: Path, folder: Path, numbers: tuple[int, ...]
) -> pd.DataFrame:
    """Return a row for each task and number of checkpoints; those in the folder are kept."""

    def row(name: str, n: int) -> dict[str, Any]:
        file = made_once(
            folder / f"{name}-{n}.json",
            lambda path: path.write_text(json.dumps(measure(name, n, cache))),
        )
        return {"task": name, "checkpoints": n} | json.loads(file.read_text())

    return pd.DataFrame([row(name, n) for n in numbers for name in tasks])


def arguments_of(
    doc: str | None, tasks: Iterable[str] = ALL, stages: tuple[str, ...] = ()
) -> argparse.Namespace:
    """Return the options of the script; torch and dask use one thread from now on."""
    parser = parser_of(doc or "", cache=Path("demo-output/quality"), tasks=list(tasks))
    if stages:
        parser.add_argument("--stage", choices=stages, default=stages[0])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dask.config.set(scheduler="synchronous")
    return parser.parse_args()


def print_gains(gain: pd.Series[float]) -> None:
    """Print on how many tasks a gain is clear."""
    print(f"mean gain {gain.mean():.3f}, least {gain.min():.3f}, "
          f"above 0.003 on {(gain > 0.003).sum()} of {len(gain)} tasks, "
          f"below -0.003 on {(gain < -0.003).sum()}")  # fmt: skip
