"""LDS of estimators and of rules for λ; and the ground truth of a task, computed again.

    python tests/benchmarks/quality.py --tasks mlp cancer                # minutes
    python tests/benchmarks/quality.py --stage train --tasks surface

The models of the first command are trained into the cache, with 1 and 3 checkpoints. The second one
retrains models on random halves, and writes their outputs, which are committed.
"""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path

import dask
import pandas as pd
import torch
from _machine import made_once, parser_of
from _quality_tasks import SUBJECTS
from _quality_truth import checkpoints, ground, keep, retrain

import trakdask as td

SKETCH = td.SJLT(proj_dim=2048)
PROJECTORS = {"random": lambda *_: SKETCH, "fit": partial(td.fit, progress=False)}
ESTIMATORS = {"trak": td.Trak(), "soft": td.Soft()}
RULES = (0.03, "trace", "completeness")


def measure(name: str, n: int, projector: str, cache: Path) -> dict[str, float]:
    """Return the LDS of every estimator with every rule for λ."""
    subject = SUBJECTS[name]
    model = td.Model(subject.build, checkpoints(subject, cache, n), subject.task)
    samples = [subject.samples(part) for part in range(2)]
    made = PROJECTORS[projector](samples[0], model)
    features = [td.featurize(each, model, projector=made).compute() for each in samples]

    def lds(estimator: td.Trak | td.Soft) -> float:
        found = td.evaluate.lds(td.score(*features, estimator), *ground(subject), resamples=1)
        return float(found.lds_mean.compute())

    return {
        f"{estimator}, {rule}": lds(value.with_damping(rule))
        for estimator, value in ESTIMATORS.items()
        for rule in RULES
    }


def main() -> None:
    parser = parser_of(__doc__, cache=Path("demo-output/quality"), tasks=list(SUBJECTS))
    parser.add_argument("--stage", choices=("score", "train"), default="score")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dask.config.set(scheduler="synchronous")
    if options.stage == "train":
        for name in options.tasks:
            keep(SUBJECTS[name], retrain(SUBJECTS[name], options.cache))
        return

    def row(name: str, n: int, projector: str) -> dict[str, float]:
        """Measure, unless a run that was interrupted has kept the numbers."""
        file = made_once(
            options.cache / "estimators" / f"{name}-{n}-{projector}.json",
            lambda path: path.write_text(json.dumps(measure(name, n, projector, options.cache))),
        )
        return json.loads(file.read_text())

    for n in (1, 3):
        for projector in PROJECTORS:
            rows = {name: row(name, n, projector) for name in options.tasks}
            print(f"\n{n} checkpoint{'s' * (n > 1)}, {projector}")
            print(pd.DataFrame(rows).T.round(3).to_string(), flush=True)


if __name__ == "__main__":
    main()
