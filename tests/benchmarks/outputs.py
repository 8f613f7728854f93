"""What coordinates of outputs, the prior of λ and the rule for it cost: the LDS of td.fit.

    python tests/benchmarks/outputs.py --cache demo-output/quality    # hours

``now`` is the default. The others have curvature without eigenvectors of outputs (``kept``), or
with them (``turned``), or none (``without``); λ by its prior alone (``trace``), or the best
(``best``, at 10^``at``). ``z`` is how much better outputs follow scores without curvature.
``--kept`` shows what a cache has. The ground truth of all tasks is committed.
"""

from __future__ import annotations

import json
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any
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
from trakdask.fits import fitting, following

TASKS = SUBJECTS | WIDER | HELD_OUT | UNDERFITTED | LARGE


def measure(name: str, n: int, cache: Path) -> dict[str, float]:
    """Return the LDS of td.fit, with its parts replaced."""
    subject, found, seen = TASKS[name], {}, {}
    model = td.Model(subject.build, checkpoints(subject, cache, n), subject.task)
    samples = [subject.samples(part) for part in range(2)]

    def lds(projector: Any, prior: float | None = None, rule: Any = None) -> float:
        features = [td.featurize(each, model, projector).compute() for each in samples]
        for each in features:
            each.attrs |= {} if prior is None else {"damping_prior": prior}
        scores = td.score(*features) if rule is None else td.score(*features, td.Soft(damping=rule))
        return float(td.evaluate.lds(scores, *ground(subject), resamples=1).lds_mean.compute())

    def asked(totals: np.ndarray) -> bool:
        output, *sums = totals.mean(-1).T
        with np.errstate(all="ignore"):
            z = np.arctanh([np.corrcoef(output, each)[0, 1] for each in sums]).reshape(2, -1)
        seen.setdefault("z", float(np.nanmax(z[0]) - np.nanmax(z[1])))
        return following.follows_better_without(totals) and not seen.get("kept")

    began = time.process_time()
    with mock.patch.object(fitting, "follows_better_without", asked):
        found["now"] = lds(td.fit(samples[0], model, progress=False))
        seen["kept"] = True
        kept = td.fit(samples[0], model, progress=False)
        found["kept"] = lds(kept)
        with mock.patch.object(fitting, "kept_axes", return_value={}):
            found["turned"] = lds(td.fit(samples[0], model, progress=False))
    found["without"] = lds(td.fit(samples[0], model, curvature=False, progress=False))
    found["trace"] = lds(kept, rule="trace")
    exponents = np.arange(-0.5, 2.26, 0.25)
    curve = [lds(kept, 10.0**e, "trace") for e in exponents]
    found["best"], found["at"] = max(curve), float(exponents[np.argmax(curve)])
    found |= {"z": seen["z"]} if "z" in seen else {}
    rounded = {title: round(value, 4) for title, value in found.items()}
    print(name, n, rounded, f"{time.process_time() - began:.0f} s", flush=True)
    return found


def write(name: str, n: int, cache: Path, path: Path) -> None:
    path.write_text(json.dumps(measure(name, n, cache)))


def main() -> None:
    parser = parser_of(__doc__, cache=Path("demo-output/quality"), tasks=list(TASKS), counts=[3, 1])
    parser.add_argument("--kept", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dask.config.set(scheduler="synchronous")
    rows = {}
    for name in options.tasks:
        for n in options.counts:
            path = options.cache / "outputs" / f"{name}-{n}.json"
            if not options.kept:
                made_once(path, partial(write, name, n, options.cache))
            if path.exists():
                rows[n, name] = json.loads(path.read_text())
    frame = pd.DataFrame(rows).T.sort_index(level=0)
    print(frame.round(3).to_string())
    print(frame.groupby(level=0).mean().round(4).T.to_string())


if __name__ == "__main__":
    main()
