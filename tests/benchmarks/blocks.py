"""What eigenvectors of parts of an axis cost: the LDS of td.fit with blocks on the diagonal.

    python tests/benchmarks/blocks.py --cache demo-output/quality    # hours

The matrix of an axis keeps what is between coordinates of one block; ``quarters`` divides each axis
into four, as blocks of 1,024 would an axis of 4,096. Curvatures ``of 300`` samples cost half as
much, and so does the last product with ``half`` of the sketch. ``--kept`` shows what a cache has.
The ground truth of all tasks is committed.
"""

from __future__ import annotations

import json
import time
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import dask
import numpy as np
import pandas as pd
import torch
from _machine import made_once, parser_of
from _quality_tasks import SUBJECTS
from _quality_truth import checkpoints, ground
from _quality_wider import HELD_OUT, LARGE, UNDERFITTED, WIDER

import trakdask as td
from trakdask.fits import curvatures, fitting
from trakdask.tensors import factors_of

TASKS = SUBJECTS | WIDER | HELD_OUT | UNDERFITTED | LARGE
RULES = {
    "whole": lambda d: 1,
    "512": lambda d: -(-d // 512),
    "256": lambda d: -(-d // 256),
    "128": lambda d: -(-d // 128),
    "64": lambda d: -(-d // 64),
    "32": lambda d: -(-d // 32),
    "64 of 300": lambda d: -(-d // 64),
    "64, half": lambda d: -(-d // 64),
    "quarters": lambda d: 4 if d >= 16 else 1,
}
_WHOLE, _SKETCH = curvatures.eigenvectors_of, fitting.sketch_of


def in_blocks(rule: str, sums: np.ndarray, shapes, writer=None) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Do as eigenvectors_of, with zeros between blocks."""
    sums = sums.copy()
    for _, _, length, place in factors_of(shapes, writer):
        owner = np.arange(length) * RULES[rule](length) // length
        sums[place] *= (owner[:, None] == owner).reshape(sums[place].shape)
    return _WHOLE(sums, shapes, writer)


def _narrower(shapes) -> td.SJLT:  # type: ignore[no-untyped-def]
    return td.SJLT(max(_SKETCH(shapes).proj_dim // 2, 4096), seed=0)


def measure(name: str, n: int, cache: Path, rules: list[str]) -> dict[str, float]:
    """Return the LDS of td.fit by rule."""
    subject, found = TASKS[name], {}
    model = td.Model(subject.build, checkpoints(subject, cache, n), subject.task)
    samples = [subject.samples(part) for part in range(2)]
    for rule in rules:
        began = time.process_time()
        few = 300 if rule.endswith("of 300") else fitting.N_CURVATURE
        with (
            mock.patch.object(curvatures, "eigenvectors_of", partial(in_blocks, rule)),
            mock.patch.object(fitting, "N_CURVATURE", few),
            mock.patch.object(fitting, "sketch_of", _narrower if "half" in rule else _SKETCH),
        ):
            projector = td.fit(samples[0], model, progress=False)
        features = [td.featurize(each, model, projector).compute() for each in samples]
        lds = td.evaluate.lds(td.score(*features), *ground(subject), resamples=1)
        found[rule] = float(lds.lds_mean.compute())
        took = time.process_time() - began
        print(name, n, rule, round(found[rule], 4), f"{took:.0f} s", flush=True)
    return found


def write(name: str, n: int, cache: Path, rules: list[str], path: Path) -> None:
    path.write_text(json.dumps(measure(name, n, cache, rules)))


def main() -> None:
    parser = parser_of(
        __doc__, cache=Path("demo-output/quality"), tasks=list(TASKS), counts=[3, 1],
        rules=list(RULES),
    )  # fmt: skip
    parser.add_argument("--kept", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dask.config.set(scheduler="synchronous")
    rows = {}
    for name in options.tasks:
        for n in options.counts:
            path = options.cache / "blocks" / f"{name}-{n}.json"
            if not options.kept:
                made_once(path, partial(write, name, n, options.cache, options.rules))
            if path.exists():
                rows[n, name] = json.loads(path.read_text())
    frame = pd.DataFrame(rows).T.sort_index(level=0)
    gains = frame.sub(frame["whole"], axis=0).drop(columns="whole")
    print(frame.round(3).to_string())
    print("\nless that of whole axes")
    print(gains.round(3).to_string())
    print(gains.groupby(level=0).agg(["mean", "min", "max"]).round(4).T.to_string())


if __name__ == "__main__":
    main()
