"""What a store with a fit keeps, by variable, and what the codes of its components cost.

    python tests/benchmarks/bytes.py    # minutes

Tasks of ``quality.py``, which have 1000 training samples, and one checkpoint. The bytes before are
those of components in 16 bits, and of matrices of p² numbers in 64. Below, components in single
precision, in 16 bits, and as codes: how far features of the targets are from the first (one matrix
of all samples and columns), the mean rank correlation of scores with the first, and the LDS.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import xarray as xr
from _machine import parser_of
from _quality_tasks import SUBJECTS, Subject
from _quality_truth import checkpoints, ground
from scipy.stats import spearmanr

import trakdask as td
from trakdask.projection.companding import encoded

BEFORE = {"principal_components": 2, "gram": 8, "gram_eigenvectors": 8, "wrong_classes": 8}
"""Bytes of a number, where they were others."""
WAYS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float32": np.float32,
    "float16": np.float16,
    "int8": encoded,
}


def features(subject: Subject, model: td.Model, way: str) -> tuple[xr.Dataset, xr.Dataset]:
    """Return features of training samples and of targets, with components in one of the ways."""
    train, targets = (subject.samples(part) for part in range(2))
    with patch("trakdask.fits.components.encoded", WAYS[way]):
        fit = td.fit(train, model, progress=False)
    return td.featurize(train, model, fit), td.featurize(targets, model, fit)


def print_bytes(made: xr.Dataset) -> None:
    """Print the bytes of each variable in a store, and what they were."""
    with tempfile.TemporaryDirectory() as folder:
        opened = td.save(made, Path(folder) / "f.zarr", progress=False)
        now = {str(name): array.nbytes for name, array in opened.data_vars.items()}
        before = {n: opened[n].size * BEFORE.get(n, opened[n].dtype.itemsize) for n in now}
        files = sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file())
    print(f"{'':24}{'MB before':>10}{'MB':>8}")
    for name in sorted(now, key=now.__getitem__, reverse=True):
        if before[name] > 1e5:
            print(
                f"{name:24}{before[name] / 1e6:10.2f}{now[name] / 1e6:8.2f}  {opened[name].dtype}"
            )
    print(f"{'all':24}{sum(before.values()) / 1e6:10.2f}{sum(now.values()) / 1e6:8.2f}")
    print(f"{'all files':24}{'':10}{files / 1e6:8.2f}\n", flush=True)


def print_quality(subject: Subject, model: td.Model) -> None:
    """Print what each way of keeping the components does to features, ranks, and LDS."""
    exact = None
    print(f"{'components':12}{'features off by':>16}{'ranks':>9}{'LDS':>8}")
    for way in WAYS:
        train, targets = (ds.compute() for ds in features(subject, model, way))
        scores = td.score(train, targets).compute()
        if exact is None:
            exact = targets.feature.values, scores.values
        off = np.linalg.norm(targets.feature - exact[0]) / np.linalg.norm(exact[0])
        pairs = zip(scores.values.T, exact[1].T, strict=True)
        ranks = np.mean([spearmanr(*pair).statistic for pair in pairs])
        lds = float(td.evaluate.lds(scores, *ground(subject), resamples=1).lds_mean.compute())
        print(f"{way:12}{off:16.1e}{ranks:9.5f}{lds:8.4f}", flush=True)


def main() -> None:
    parser = parser_of(__doc__, tasks=["mlp", "cnn"], cache=Path("demo-output/quality"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in options.tasks:
        subject = SUBJECTS[name]
        model = td.Model(subject.build, checkpoints(subject, options.cache, 1), subject.task)
        print(f"\n{name}")
        print_bytes(features(subject, model, "int8")[0])
        print_quality(subject, model)


if __name__ == "__main__":
    main()
