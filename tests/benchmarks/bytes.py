"""What a store with a fit keeps, by variable, beside the same store as it was kept before.

    python tests/benchmarks/_machine.py tests/benchmarks/bytes.py    # minutes

Tasks of ``quality.py``, which have 1000 training samples, and one checkpoint. Before, eigenvectors
of the gram matrix were stored, symmetric matrices as a whole, and nothing was compressed. Below,
both stores are asked: how far features of the targets with ``like=`` are from those of the process
that fitted, the mean rank correlation of scores with those of this process, the LDS, and the CPU
seconds of the first query.
"""

from __future__ import annotations

import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from time import process_time
from unittest.mock import patch

import numpy as np
import torch
import xarray as xr
from _machine import parser_of
from _quality_tasks import SUBJECTS, Subject
from _quality_truth import checkpoints, ground
from scipy.stats import spearmanr

import trakdask as td

BEFORE = {"trakdask.derived.LEAST_DIM": 0, "trakdask.storage.group._COMPRESSED": ()}


def saved(made: xr.Dataset, store: Path, *, before: bool) -> dict[str, int]:
    """Save features and return the bytes of each variable on the disk, those of all under "all"."""
    with ExitStack() as stack:
        for name, value in BEFORE.items() if before else ():
            stack.enter_context(patch(name, value))
        td.save(made, store, progress=False)
    sizes: dict[str, int] = {}
    for path in (p for p in store.rglob("*") if p.is_file()):
        for name in ("all files", path.relative_to(store).parts[0]):
            sizes[name] = sizes.get(name, 0) + path.stat().st_size
    return sizes


def print_bytes(before: dict[str, int], now: dict[str, int]) -> None:
    print(f"{'':24}{'MB before':>10}{'MB':>8}")
    for name in sorted(before, key=before.__getitem__, reverse=True):
        if before[name] > 1e5:
            print(f"{name:24}{before[name] / 1e6:10.2f}{now.get(name, 0) / 1e6:8.2f}")
    print(flush=True)


def print_quality(subject: Subject, model: td.Model, folder: Path) -> None:
    """Print what the fit, the store as it was, and the store as it is give."""
    train, asked = (subject.samples(part) for part in range(2))
    fit = td.fit(train, model, progress=False)
    made = td.featurize(train, model, fit)
    print_bytes(*(saved(made, folder / f"{was}.zarr", before=was) for was in (True, False)))
    ways = {
        "process": made.compute(),
        "before": td.open(folder / "True.zarr"),
        "now": td.open(folder / "False.zarr"),
    }
    exact = None
    print(f"{'':12}{'like= off by':>14}{'ranks':>10}{'LDS':>8}{'CPU s':>8}")
    for way, features in ways.items():
        targets = td.featurize(asked, model, like=features).compute()
        began = process_time()
        scores = td.score(features, targets).compute()
        seconds = process_time() - began
        if exact is None:
            exact = targets.feature.values, scores.values
        off = np.linalg.norm(targets.feature - exact[0]) / np.linalg.norm(exact[0])
        pairs = zip(scores.values.T, exact[1].T, strict=True)
        ranks = np.mean([spearmanr(*pair).statistic for pair in pairs])
        lds = float(td.evaluate.lds(scores, *ground(subject), resamples=1).lds_mean.compute())
        print(f"{way:12}{off:14.1e}{ranks:10.6f}{lds:8.4f}{seconds:8.2f}", flush=True)


def main() -> None:
    parser = parser_of(__doc__, tasks=["mlp", "cnn"], cache=Path("demo-output/quality"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in options.tasks:
        subject = SUBJECTS[name]
        model = td.Model(subject.build, checkpoints(subject, options.cache, 1), subject.task)
        print(f"\n{name}")
        with tempfile.TemporaryDirectory() as folder:
            print_quality(subject, model, Path(folder))


if __name__ == "__main__":
    main()
