"""What the constants of td.fit are worth on all tasks: weights, width of the sketch, columns, δ.

    python tests/benchmarks/choices.py --cache demo-output/quality    # two hours

LDS on random halves, λ by default, of td.fit as it is and with one thing changed; and CPU seconds.
The ground truth of all tasks is committed. "both of 600" fits curvature and wrong classes to 600 of
the samples; "half as wide" halves the columns of the sketch. ``--kept`` shows what a cache has after an interruption.
"""

from __future__ import annotations

import json
import time
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import dask
import pandas as pd
import torch
from _machine import made_once, parser_of
from _quality_tasks import SUBJECTS
from _quality_truth import checkpoints, ground
from _quality_wider import HELD_OUT, LARGE, UNDERFITTED, WIDER

import trakdask as td
from trakdask.fits import fitting, weights
from trakdask.fits.components import sketch_for
from trakdask.samples import drawn

TASKS = SUBJECTS | WIDER | HELD_OUT | UNDERFITTED | LARGE
CURVATURE, WRONG_CLASSES = fitting.fit_curvature, fitting.wrong_classes


def of_some(fit, n, samples, *args, **options):  # type: ignore[no-untyped-def]
    """Fit something to fewer samples."""
    return fit(drawn(samples, n, n), *args, **options)


def negligible(share, facts, model):  # type: ignore[no-untyped-def]
    """Return weights; parameters with less than a share of the weighted length have none."""
    with mock.patch.object(weights, "_NEGLIGIBLE", share):
        return weights.weights_of(facts, model)


#: What is changed, by name: options of td.fit, and a patch.
VARIANTS = {
    "default": ({}, {}),
    "no weights": ({}, {"_weights": lambda *_: None}),
    "all layers": ({}, {"weights_of": partial(negligible, 0.0)}),
    "above 0.2 %": ({}, {"weights_of": partial(negligible, 0.002)}),
    "half as wide": ({"sketch": 2}, {}),
    "a quarter as wide": ({"sketch": 4}, {}),
    "columns 512": ({"proj_dim": 512}, {}),
    "curvature of 300": ({}, {"fit_curvature": partial(of_some, CURVATURE, 300)}),
    "both of 300": (
        {},
        {
            "fit_curvature": partial(of_some, CURVATURE, 300),
            "wrong_classes": partial(of_some, WRONG_CLASSES, 300),
        },
    ),
    "both of 600": (
        {},
        {
            "fit_curvature": partial(of_some, CURVATURE, 600),
            "wrong_classes": partial(of_some, WRONG_CLASSES, 600),
        },
    ),
    "δ 3": ({}, {"fit_curvature": partial(CURVATURE, damping=3.0)}),
    "δ 30": ({}, {"fit_curvature": partial(CURVATURE, damping=30.0)}),
}


def measure(name: str, n: int, variant: str, cache: Path) -> list[float]:
    """Return the LDS of a variant, and the CPU seconds of its fit and of its features."""
    subject, (options, patch) = TASKS[name], VARIANTS[variant]
    model = td.Model(subject.build, checkpoints(subject, cache, n), subject.task)
    samples = [subject.samples(part) for part in range(2)]
    if "sketch" in options:  # so many times narrower than the sketch that td.fit takes
        options = {"sketch": td.SJLT(sketch_for(model).proj_dim // options["sketch"])}
    start = time.process_time()
    with mock.patch.multiple(fitting, **(patch or {"_LONG_S": 60.0})):
        projector = td.fit(samples[0], model, progress=False, **options)
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
                path = options.cache / "choices" / f"{name}-{n}-{variant.replace(' ', '_')}.json"
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
            gains = table.sub(table["default"], axis=0).drop(columns="default")
            print("\nLDS less that of the default")
            print(gains.groupby("n").agg(["mean", "min", "max"]).round(3).T.to_string())


if __name__ == "__main__":
    main()
