"""What weights of parameters buy: LDS by td.fit with them and without, and what reliability says.

    python tests/benchmarks/weights.py --cache demo-output/quality    # half an hour

LDS on random halves, everything by default, and beside it with λ at its prior, 5.62 tr(K)/n.
"Unpruned" also differentiates parameters with less than 0.2 % of the weighted length, and "without"
gives all parameters the weight 1. Then what features and fits take, and the weights; and the LDS of
one checkpoint (or ten) that td.evaluate.reliability expects from the three.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import dask
import torch
import xarray as xr
from _machine import parser_of
from _quality_tasks import SUBJECTS, Subject
from _quality_truth import checkpoints, ground

import trakdask as td

TASKS = "language", "transformer", "mlp", "surface", "cnn", "resnet"
PATCHES = {
    "weights": ("trakdask.fits.weights._LEAST", 0.01),  # as it is
    "unpruned": ("trakdask.fits.weights._NEGLIGIBLE", 0.0),
    "without": ("trakdask.fits.fitting._weights", lambda *_: None),
}


def lds(subject: Subject, sides: list[xr.Dataset], **options: Any) -> float:
    scores = td.score(*sides, **options)
    return float(td.evaluate.lds(scores, *ground(subject), resamples=1).lds_mean.compute())


def measure(subject: Subject, n: int, kind: str, cache: Path) -> None:
    model = td.Model(subject.build, checkpoints(subject, cache, n), subject.task)
    samples, start = [subject.samples(0), subject.samples(1)], time.process_time()
    with mock.patch(*PATCHES[kind]):
        projector = td.fit(samples[0], model, progress=False)
    fitted = time.process_time()
    sides = [td.featurize(s, model, projector).compute() for s in samples]
    done = time.process_time()
    estimator = td.Trak if subject.task == "regression" else td.Soft
    prior = estimator(damping="trace")
    print(f"{subject.name:12} {n} {kind:9} LDS {lds(subject, sides):.3f}, at the prior "
          f"{lds(subject, sides, estimator=prior):.3f}; CPU s: fit {fitted - start:.1f}, features "
          f"{done - fitted:.1f}", flush=True)  # fmt: skip
    if kind != "weights":
        return
    for title, values in projector.steps[0].weights.items():
        print("   ", title, ", ".join(f"{k} {v:.3g}" for k, v in values.items()))
    if n > 1:
        found = td.evaluate.reliability(sides[0], n_checkpoints=[1, 3, 10])
        gains = dict(zip((1, 3, 10), found.relative_lds.values.round(3).tolist(), strict=True))
        print(f"    r = {float(found.agreement):.3f}; LDS to that of {n} checkpoints: {gains}",
              flush=True)  # fmt: skip


def main() -> None:
    parser = parser_of(
        __doc__, cache=Path("demo-output/quality"), tasks=[*TASKS], counts=[3, 1],
        kinds=["weights"],
    )  # fmt: skip
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dask.config.set(scheduler="synchronous")
    for name in options.tasks:
        for n in options.counts:
            for kind in options.kinds:
                measure(SUBJECTS[name], n, kind, options.cache)


if __name__ == "__main__":
    main()
