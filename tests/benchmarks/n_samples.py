"""How many samples components have to be fitted to, on a task that has many.

    python tests/benchmarks/n_samples.py --cache demo-output/quality --tasks mnist    # minutes

LDS on random halves, λ by default, and CPU seconds. The ground truth of all tasks is committed.
``--kept`` shows what a cache has after an interruption.
"""

from __future__ import annotations

import json
import time
import warnings
from functools import partial
from pathlib import Path

import dask
import pandas as pd
import torch
from _machine import made_once, parser_of
from _quality_tasks import SUBJECTS
from _quality_truth import checkpoints, ground
from _quality_wider import HELD_OUT, LARGE, UNDERFITTED, WIDER

import trakdask as td

TASKS = SUBJECTS | WIDER | HELD_OUT | UNDERFITTED | LARGE

#: How many samples the components are fitted to.
VARIANTS = {str(n): n for n in (2000, 1500, 1200)}


def measure(name: str, n: int, variant: str, cache: Path) -> list[float]:
    """Return the LDS of a variant, and the CPU seconds of its fit and of its features."""
    subject = TASKS[name]
    model = td.Model(subject.build, checkpoints(subject, cache, n), subject.task)
    samples = [subject.samples(part) for part in range(2)]
    start = time.process_time()
    projector = td.fit(samples[0], model, n_samples=VARIANTS[variant], progress=False)
    fitted = time.process_time()
    features = [td.featurize(each, model, projector).compute() for each in samples]
    done = time.process_time()
    found = td.evaluate.lds(td.score(*features), *ground(subject), resamples=1)
    return [float(found.lds_mean.compute()), fitted - start, done - fitted]


def write(name: str, n: int, variant: str, cache: Path, path: Path) -> None:
    path.write_text(json.dumps(measure(name, n, variant, cache)))


def main() -> None:
    parser = parser_of(
        __doc__, cache=Path("demo-output/quality"), tasks=list(TASKS), counts=[3, 1],
        variants=list(VARIANTS),
    )  # fmt: skip
    parser.add_argument("--kept", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dask.config.set(scheduler="synchronous")
    rows = []
    for variant in options.variants:
        for name in options.tasks:
            for n in options.counts:
                path = options.cache / "n_samples" / f"{name}-{n}-{variant.replace(' ', '_')}.json"
                if not options.kept:
                    made_once(path, partial(write, name, n, variant, options.cache))
                if path.exists():
                    rows.append((n, name, variant, *json.loads(path.read_text())))
    columns = {"lds": "LDS", "fit_s": "CPU seconds of the fit", "features_s": "and of features"}
    frame = pd.DataFrame(rows, columns=["n", "task", "variant", *columns])
    for column, title in columns.items():
        table = frame.pivot(index=["n", "task"], columns="variant", values=column)
        print(f"\n{title}\n{table[options.variants].round(3).to_string()}")
        if column == "lds":
            gains = table.sub(table[options.variants[0]], axis=0).drop(columns=options.variants[0])
            print("\nLDS less that of the default")
            print(gains.groupby("n").agg(["mean", "min", "max"]).round(3).T.to_string())


if __name__ == "__main__":
    main()
