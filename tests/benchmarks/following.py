"""Is curvature left out where it makes scores worse, and only there?

    python tests/benchmarks/following.py --cache demo-output/quality    # an hour

LDS of td.fit with and without curvature, by default λ, and how much better outputs follow sums of
scores without it, in Fisher's z. One checkpoint is the first one, of five- tasks the mean of three.
Ground truth of five- tasks is trained; that of the others is committed.
"""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path

import dask
import numpy as np
import pandas as pd
import torch
from _five import SUBJECTS as FIVE
from _machine import made_once, parser_of
from _quality_tasks import SUBJECTS, members
from _quality_truth import checkpoints, ground, retrain
from _quality_wider import HELD_OUT, LARGE, UNDERFITTED, WIDER

import trakdask as td
from trakdask.fits.following import _LARGER, totals_of
from trakdask.samples.array_source import validate_samples
from trakdask.samples.datasets import drawn

#: Regressions have no outputs that choose, texts are not asked, and these have too few samples.
OTHERS = {"diabetes", "surface", "language", "transformer", "text-smoothed", "cancer", "wine"}
TASKS = SUBJECTS | WIDER | HELD_OUT | UNDERFITTED | LARGE
TASKS |= {f"five-{name}": subject for name, subject in FIVE.items()}
TASKS = {name: subject for name, subject in TASKS.items() if name not in OTHERS}


def truth(name, cache):  # type: ignore[no-untyped-def]
    if not name.startswith("five-"):
        return ground(TASKS[name])
    subject = TASKS[name]
    n = len(subject.data()[0][0])
    masks = np.stack([members(i, n) for i in range(subject.n_subsets)])
    return masks, retrain(subject, cache, 1).mean(1, dtype=float)


def lds_of(name: str, which: list[int], curvature: bool, cache: Path) -> float:
    """Return the LDS of td.fit."""
    subject = TASKS[name]
    files = checkpoints(subject, cache, 1 + max(which))
    model = td.Model(subject.build, {f"c{i}": files[i] for i in which}, subject.task)
    samples = [subject.samples(part) for part in range(2)]
    projector = td.fit(samples[0], model, curvature=curvature, weights=False, progress=False)
    features = [td.featurize(each, model, projector).compute() for each in samples]
    lds = td.evaluate.lds(td.score(*features), *truth(name, cache), resamples=1)
    return float(lds.lds_mean)


def z_of(name: str, cache: Path) -> list[list[float]]:
    """Return z without and with curvature, for each of three checkpoints and for all."""
    subject = TASKS[name]
    files = {f"c{i}": file for i, file in enumerate(checkpoints(subject, cache, 3))}
    model = td.Model(subject.build, files, subject.task)
    few = drawn(validate_samples(subject.samples(0)), 600, 512)
    fit = td.fits.curvature(few, model, leading=0, progress=False)
    totals = totals_of(few, model, fit)
    found = []
    for some in (*(totals[..., i] for i in range(3)), totals.mean(-1)):
        output, *sums = some.T
        z = np.arctanh([np.corrcoef(output, each)[0, 1] for each in sums]).reshape(2, -1)
        found.append(np.nanmax(z, axis=1).tolist())
    return found


def write(measure, path: Path) -> None:  # type: ignore[no-untyped-def]
    path.write_text(json.dumps(measure()))


def measured(name: str, cache: Path) -> dict[str, dict[str, list[list[float]]]]:
    """Return LDS with and without curvature, by number of checkpoints, and z; from the cache."""
    singles = range(3 if name.startswith("five-") else 1)
    found = {"lds": {"3": [[], []], "1": [[], []]}}
    for n, whiches in (("3", [[0, 1, 2]]), ("1", [[i] for i in singles])):
        for which in whiches:
            for place, curvature in enumerate((True, False)):
                path = cache / "following" / f"{name}-{curvature}-{'-'.join(map(str, which))}.json"
                made_once(path, partial(write, partial(lds_of, name, which, curvature, cache)))
                found["lds"][n][place].append(json.loads(path.read_text()))
    path = made_once(
        cache / "following" / f"{name}-z.json", partial(write, partial(z_of, name, cache))
    )
    return found | {"z": json.loads(path.read_text())}


def main() -> None:
    parser = parser_of(__doc__, cache=Path("demo-output/quality"), tasks=list(TASKS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dask.config.set(scheduler="synchronous")
    rows = []
    for name in options.tasks:
        kept = measured(name, options.cache)
        z = np.array(kept["z"])
        larger = z[:, 0] - z[:, 1]
        for n, (with_curvature, without) in kept["lds"].items():
            of = larger[3:] if n == "3" else larger[: len(without)]
            chosen = np.where(of > _LARGER, without, with_curvature)
            rows.append((n, name, np.mean(with_curvature), np.mean(without), chosen.mean(),
                         " ".join(f"{x:+.2f}" for x in of)))  # fmt: skip
    columns = ["n", "task", "curvature", "without", "by default", "z larger by"]
    frame = pd.DataFrame(rows, columns=columns).set_index(["n", "task"]).sort_index()
    frame["gain"] = frame["by default"] - frame["curvature"]
    print(f"left out above {_LARGER}\n{frame.round(3).to_string()}")
    print(frame.groupby("n")[["curvature", "without", "by default", "gain"]].mean().round(3))


if __name__ == "__main__":
    main()
