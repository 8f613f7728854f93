"""How right td.evaluate.reliability is: LDS of one and ten checkpoints, foretold from three.

    python tests/benchmarks/reliability.py --cache demo-output/quality    # hours

``--kept`` shows what a cache has. The ground truth of all tasks is committed.
"""

from __future__ import annotations

import json
import time
import warnings
from functools import partial
from pathlib import Path

import dask
import pandas as pd
import torch
from _machine import made_once, parser_of
from _quality_tasks import SUBJECTS
from _quality_truth import checkpoints, ground
from _quality_wider import HELD_OUT, LARGE, UNDERFITTED, WIDER

import trakdask as td

TASKS = SUBJECTS | WIDER | HELD_OUT | UNDERFITTED | LARGE
COUNTS = (1, 3, 10)


def measure(name: str, cache: Path) -> dict[str, float]:
    """Return the LDS of td.fit with each number of checkpoints, and what three foretell."""
    subject, found = TASKS[name], {}
    samples = [subject.samples(part) for part in range(2)]
    for n in COUNTS:
        began = time.process_time()
        model = td.Model(subject.build, checkpoints(subject, cache, n), subject.task)
        projector = td.fit(samples[0], model, progress=False)
        features = [td.featurize(each, model, projector).compute() for each in samples]
        lds = td.evaluate.lds(td.score(*features), *ground(subject), resamples=1)
        found[str(n)] = float(lds.lds_mean.compute())
        if n == 3:
            foretold = td.evaluate.reliability(features[0], n_checkpoints=COUNTS)
            found["r"] = float(foretold.agreement)
            found |= {f"x{n}": float(foretold.relative_lds.sel(n_checkpoints=n)) for n in COUNTS}
        print(name, n, round(found[str(n)], 3), f"{time.process_time() - began:.0f} s", flush=True)
    return found


def write(name: str, cache: Path, path: Path) -> None:
    path.write_text(json.dumps(measure(name, cache)))


def main() -> None:
    parser = parser_of(__doc__, cache=Path("demo-output/quality"), tasks=list(TASKS))
    parser.add_argument("--kept", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dask.config.set(scheduler="synchronous")
    rows = {}
    for name in options.tasks:
        path = options.cache / "reliability" / f"{name}.json"
        if not options.kept:
            made_once(path, partial(write, name, options.cache))
        if path.exists():
            rows[name] = json.loads(path.read_text())
    frame = pd.DataFrame(rows).T
    for n in ("1", "10"):
        frame[f"told {n}"] = frame["3"] * frame[f"x{n}"]
        frame[f"off {n}"] = frame[f"told {n}"] - frame[n]
    print(frame.round(3).to_string())
    print(frame[["off 1", "off 10"]].abs().describe().round(3).to_string())


if __name__ == "__main__":
    main()
