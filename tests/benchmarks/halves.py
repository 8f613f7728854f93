"""Checkpoints trained on random halves of the data, beside those trained on all of it: LDS.

    python tests/benchmarks/halves.py --cache demo-output/quality    # an hour, mostly training

On every task of the quality benchmark, at the default size, λ and estimator of the package, with 1
and 3 checkpoints, without and with curvature. The halves are others than those of the truth, which
are halves, too: that favours models of halves.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from _fits import ALL, SKETCH, a_quarter, arguments_of, lds, print_gains, rows_of
from _machine import made_once
from _quality_tasks import Subject, members
from _quality_truth import checkpoints

import trakdask as td

FIRST = 1_000_000  # number of the first half: the truth has the halves 0, 1, ...


def half_checkpoints(subject: Subject, cache: Path, n: int) -> list[Path]:
    """Train what is missing of the models of halves and return their files."""
    stem = cache / "halves" / f"{subject.name}-{subject.digest()}"
    n_train = len(subject.data()[0][0])

    def write(index: int, path: Path) -> None:
        torch.save(subject.train(members(FIRST + index, n_train), seed=100 + index), path)

    return [made_once(Path(f"{stem}-h{index}.pt"), partial(write, index)) for index in range(n)]


def measure(name: str, n: int, cache: Path) -> dict[str, Any]:
    """Return LDS by checkpoints of all data and of halves, without and with curvature."""
    subject = ALL[name]
    train, targets = subject.samples(0), subject.samples(1)
    row: dict[str, Any] = {}
    trained = {"all": checkpoints(subject, cache, n), "halves": half_checkpoints(subject, cache, n)}
    for data, paths in trained.items():
        model = td.Model(subject.build, paths, subject.task)
        curved = td.curvature(a_quarter(train), model).then(td.SJLT(proj_dim=1024))
        for kind, projector in (("", SKETCH), (", curvature", curved)):
            features = [
                td.featurize(samples, model, projector).compute() for samples in (train, targets)
            ]
            row[data + kind] = lds(subject, *features)
    return row


def main() -> None:
    arguments = arguments_of(__doc__)
    frame = rows_of(measure, arguments.tasks, arguments.cache, arguments.cache / "halves")
    print("\nLDS by td.score at the defaults, proj_dim 2048, by what checkpoints were trained on")
    for n, part in frame.groupby("checkpoints"):
        shown = part.drop(columns="checkpoints").set_index("task")
        shown["gain"] = shown["halves"] - shown["all"]
        print(f"\n{n} checkpoint{'s' * (n > 1)}")
        print(shown.round(3).to_string())
        print_gains(shown.gain)


if __name__ == "__main__":
    main()
