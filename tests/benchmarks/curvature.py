"""What the curvature buys: LDS of defaults with and without it, and what it costs.

    python tests/benchmarks/curvature.py --cache demo-output/quality    # half an hour

On every task of the quality benchmark, at the default size and λ of the package, with 1 and 3
checkpoints; beside them exact EK-FAC, the products of whole gradients with the inverse of the
curvature. The curvature is fitted on a quarter of the training samples, drawn at random. The
damping of 100 means, half of the columns for leading coordinates, and √10 tr(K)/n as the least λ
were chosen on these tasks with one checkpoint; those with three were not looked at before.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pandas as pd
import torch
import xarray as xr
from _machine import made_once, parser_of
from _quality_scores import ground
from _quality_subjects import SUBJECTS
from _quality_truth import checkpoints
from _quality_wider import HELD_OUT, WIDER

import trakdask as td

ALL = SUBJECTS | WIDER | HELD_OUT
N_CHECKPOINTS = (1, 3)
MANY, FITTED = 8000, 500
SKETCH = td.SJLT(proj_dim=2048)
EXACT_DAMPING = 1.0


def a_quarter(samples: xr.Dataset) -> xr.Dataset:
    n = samples.sizes["sample"]
    return samples.isel(sample=np.sort(np.random.default_rng(0).choice(n, n // 4, replace=False)))


def lds(subject: Any, train: xr.Dataset, targets: xr.Dataset, estimator: Any = "auto") -> float:
    scores = td.score(train, targets, estimator)
    return float(td.evaluate.lds(scores, *ground(subject), resamples=1).lds_mean.compute())


def cpu_seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(name: str, n: int, cache: Path) -> dict[str, Any]:
    """Return LDS with and without curvature, and of exact EK-FAC."""
    subject = ALL[name]
    model = td.Model(subject.build, checkpoints(subject, cache, n), subject.task)
    train, targets = subject.samples(0), subject.samples(1)

    def features(of: td.Model, samples: xr.Dataset, projector: Any = SKETCH) -> xr.Dataset:
        return td.featurize(samples, of, projector=projector).compute()

    curved = model.with_curvature(td.curvature(a_quarter(train), model))
    exact = model.with_curvature(td.curvature(train, model, damping=EXACT_DAMPING))
    whole = [features(exact, samples, td.Identity()) for samples in (train, targets)]
    return {
        "task": name,
        "checkpoints": n,
        "exact EK-FAC": lds(subject, *whole, "grad_dot"),
        "default": lds(subject, features(model, train), features(model, targets)),
        "curvature": lds(subject, features(curved, train), features(curved, targets)),
    }


def print_cost(name: str, cache: Path) -> None:
    """Print CPU seconds for more samples, of which fewer are fitted: these are drawn again."""
    subject = ALL[name]
    model = td.Model(subject.build, checkpoints(subject, cache, 1), subject.task)
    train = subject.samples(0)
    draw = np.random.default_rng(0).integers(0, train.sizes["sample"], MANY)
    many = train.isel(sample=draw).chunk(sample=500)
    some = many.isel(sample=slice(FITTED))

    def least_seconds(call: Callable[[], Any]) -> float:
        call()  # what a process does once
        return min(cpu_seconds(call) for _ in range(3))

    fit = least_seconds(lambda: td.curvature(some, model))
    times = [
        least_seconds(lambda of=of: td.featurize(many, of, projector=SKETCH).compute())
        for of in (model, model.with_curvature(td.curvature(some, model)))
    ]
    print(
        f"{name}: features {times[0]:.2f} s, with curvature {times[1]:.2f} s, fit {fit:.2f} s: "
        f"{(times[1] + fit) / times[0]:.2f} x"
    )


Measure = Callable[[str, int, Path], dict[str, Any]]


def rows_of(measure: Measure, tasks: list[str], cache: Path, folder: Path) -> pd.DataFrame:
    """Return a row for each task and number of checkpoints; those in the folder are kept."""

    def row(name: str, n: int) -> dict[str, Any]:
        made = made_once(
            folder / f"{name}-{n}.json",
            lambda path: path.write_text(json.dumps(measure(name, n, cache))),
        )
        return json.loads(made.read_text())

    return pd.DataFrame([row(name, n) for n in N_CHECKPOINTS for name in tasks])


def arguments_of(doc: str | None) -> argparse.Namespace:
    """Return the options of the script; torch and dask use one thread from now on."""
    parser = parser_of(doc or "", cache=Path("demo-output/quality"), tasks=list(ALL))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dask.config.set(scheduler="synchronous")
    return parser.parse_args()


def print_gains(gain: pd.Series[float]) -> None:
    """Print on how many tasks a gain is clear."""
    print(f"mean gain {gain.mean():.3f}, least {gain.min():.3f}, "
          f"above 0.003 on {(gain > 0.003).sum()} of {len(gain)} tasks, "
          f"below -0.003 on {(gain < -0.003).sum()}")  # fmt: skip


def main() -> None:
    arguments = arguments_of(__doc__)
    folder = arguments.cache / "curvature"
    frame = rows_of(measure, arguments.tasks, arguments.cache, folder)
    frame = frame.set_index(["checkpoints", "task"])
    frame["gain"] = frame["curvature"] - frame["default"]
    print(
        "\nLDS by td.score at the defaults, proj_dim 2048; gain by the curvature; EK-FAC of whole"
    )
    print("gradients, with the weights Q")
    for n, part in frame.groupby("checkpoints"):
        shown = part.droplevel("checkpoints")[["default", "curvature", "gain", "exact EK-FAC"]]
        print(f"\n{n} checkpoint{'s' * (n > 1)}")
        print(shown.round(3).to_string())
        print_gains(shown.gain)
    print(f"\nCPU time of {MANY:,} samples, {FITTED} of them fitted, 1 checkpoint; least of three")
    for name in ("cnn", "resnet", "mlp"):
        print_cost(name, arguments.cache)


if __name__ == "__main__":
    main()
