"""What the curvature between wrong classes buys, and what it costs.

    python tests/benchmarks/wrong_classes.py --cache demo-output/quality    # ten minutes

On the classifications of the quality benchmark, with 1 and 3 checkpoints, at the default λ: LDS of
2,048 random columns, of 512 principal components, and of these with curvature (fitted as in
components.py), and what the wrong classes add to each. That λ comes
from the gram matrix alone was chosen on nine of these tasks, and there is no constant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from _quality_truth import checkpoints
from curvature import ALL, SKETCH, a_quarter, arguments_of, cpu_seconds, lds, print_gains, rows_of

import trakdask as td

OTHERS = "diabetes", "surface", "language", "strokes"  # no task with one of several classes
MANY = 4000
KINDS = {
    "random 2048": "2,048 random columns",
    "512": "512 principal components",
    "curved 512": "512 principal components, curvature",
}


def measure(name: str, n: int, cache: Path) -> dict[str, Any]:
    """Return LDS of three kinds of features, with and without the wrong classes."""
    subject = ALL[name]
    model = td.Model(subject.build, checkpoints(subject, cache, n), subject.task)
    train, targets = subject.samples(0), subject.samples(1)
    curved = model.with_curvature(td.curvature(a_quarter(train), model))
    row: dict[str, Any] = {"task": name, "checkpoints": n}
    for kind, of in zip(KINDS, (model, model, curved), strict=True):
        projector = SKETCH if kind == "random 2048" else None
        if projector is None:
            of = of.with_components(td.principal_components(train, of))
        features = td.featurize(train, of, projector=projector).compute()
        explained = td.featurize(targets, of, projector=projector).compute()
        row[kind] = lds(subject, features, explained)
        features["wrong_classes"] = td.wrong_classes(train, of, projector=projector).compute()
        row[f"{kind}, wrong classes"] = lds(subject, features, explained)
    return row


def print_cost(name: str, cache: Path) -> None:
    """Print CPU seconds for more samples, drawn from the few that there are; least of three."""
    subject = ALL[name]
    model = td.Model(subject.build, checkpoints(subject, cache, 1), subject.task)
    train = subject.samples(0)
    draw = np.random.default_rng(0).integers(0, train.sizes["sample"], MANY)
    many = train.isel(sample=draw).chunk(sample=500)
    reduced = model.with_components(td.principal_components(train, model))
    for kind, of in (("random 2048", model), ("512", reduced)):
        features = td.featurize(many, of)
        h = features.out_to_loss**0.5 * (1 - features.out_to_loss)
        seconds = []
        for matrix in (td.gram(features, weights=h), td.wrong_classes(many, of)):
            matrix.compute()  # what a process does once
            seconds.append(min(cpu_seconds(matrix.compute) for _ in range(3)))
        print(
            f"{name}, {KINDS[kind]}: features and their gram matrix {seconds[0]:.2f} s, wrong "
            f"classes {seconds[1]:.2f} s"
        )


def main() -> None:
    arguments = arguments_of(__doc__)
    tasks = [name for name in arguments.tasks if name not in OTHERS]
    frame = rows_of(measure, tasks, arguments.cache, arguments.cache / "wrong-classes")
    print("\nLDS by td.score at the default λ, and what the wrong classes add")
    for n, part in frame.groupby("checkpoints"):
        shown = part.drop(columns="checkpoints").set_index("task")
        gains = pd.DataFrame(
            {f"{kind}, gain": shown.pop(f"{kind}, wrong classes") - shown[kind] for kind in KINDS}
        )
        print(f"\n{n} checkpoint{'s' * (n > 1)}")
        print(shown.join(gains).round(3).to_string())
        for kind, label in KINDS.items():
            print(f"{label}: ", end="")
            print_gains(gains[f"{kind}, gain"])
    print(f"\nCPU seconds of {MANY:,} samples, 1 checkpoint; least of three")
    for name in ("cnn", "resnet", "mlp"):
        print_cost(name, arguments.cache)


if __name__ == "__main__":
    main()
