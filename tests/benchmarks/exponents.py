"""Which exponents weights of layers should have: R of agreement, and D of directions.

    python tests/benchmarks/exponents.py --cache demo-output/quality    # an hour

LDS on random halves of td.fit, λ by default and by the prior, at weights α = R^a D^b, and with a
number of directions that saturates. The ground truth of all tasks is committed. ``--kept`` shows
what a cache has.
"""

from __future__ import annotations

import json
import math
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
from trakdask.fits import fitting, weights
from trakdask.tensors import groups_of

TASKS = SUBJECTS | WIDER | HELD_OUT | UNDERFITTED | LARGE

#: α, of the reliability R and the number of directions D.
RULES = {
    "R2 D.5": lambda r, d: r**2 * d**0.5,
    "none": None,
    "R2": lambda r, d: r**2,
    "R2 D.25": lambda r, d: r**2 * d**0.25,
    "R D.5": lambda r, d: r * d**0.5,
    "D.5": lambda r, d: d**0.5,
    "R2 sat": lambda r, d: r**2 * (d / (d + 30)) ** 0.5,
    "R D.25": lambda r, d: r * d**0.25,
}


def chosen(rule, facts, model):  # type: ignore[no-untyped-def]
    """Return weights by a rule; the same as weights_of in all but α."""
    if rule is None:
        return None
    titles = list(groups_of(model.shapes))
    share, directions = (facts[name].mean(-1) for name in ("traces", "directions"))
    share = share / share.sum()
    n = facts["scores"].shape[-1]
    if n > 1:
        r = np.maximum(weights.mean_agreement(facts["scores"]), weights._LEAST)
        alpha = rule(n * r / (1 + (n - 1) * r), directions)
    else:
        writer = weights._writes_words(model)
        inner = np.array([writer in titles and title != writer for title in titles])
        alpha = np.where(inner, math.sqrt(weights._INNER), 1.0) * rule(1.0, directions)
    lengths = alpha**2 * share
    alpha[lengths < weights._NEGLIGIBLE * lengths.sum()] = 0
    alpha /= np.sqrt((alpha**2 * share).sum())
    columns = {"weight": alpha, "share": share, "directions": directions}
    return {t: {k: float(c[i]) for k, c in columns.items()} for i, t in enumerate(titles)}


def measure(name: str, n: int, cache: Path, rules: list[str]) -> dict[str, list[float]]:
    """Return LDS by default, at the prior λ and λ itself, by rule."""
    subject = TASKS[name]
    model = td.Model(subject.build, checkpoints(subject, cache, n), subject.task)
    samples = [subject.samples(part) for part in range(2)]
    known, found = {}, {}
    fit_of = fitting._curvature

    def once(few, options, at):  # type: ignore[no-untyped-def]
        key = tuple(c.name for c in at.checkpoints)
        if key not in known:
            known[key] = fit_of(few, options, at)
        return known[key]

    for rule in rules:
        patch = {"_curvature": once, "weights_of": partial(chosen, RULES[rule])}
        with mock.patch.multiple(fitting, **patch):
            projector = td.fit(samples[0], model, progress=False)
        features = [td.featurize(each, model, projector).compute() for each in samples]
        by = td.Trak if features[0].attrs.get("default_estimator", "trak") == "trak" else td.Soft
        lds = [
            td.evaluate.lds(td.score(*features, *e), *ground(subject), resamples=1)
            for e in ((), (by(damping="trace"),))
        ]
        rho = float(td.damping(features[0]).relative.compute())
        found[rule] = [*(float(each.lds_mean.compute()) for each in lds), rho]
        print(name, n, rule, np.round(found[rule], 3), flush=True)
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
    rows = []
    for name in options.tasks:
        for n in options.counts:
            path = options.cache / "exponents" / f"{name}-{n}.json"
            if not options.kept:
                made_once(path, partial(write, name, n, options.cache, options.rules))
            if path.exists():
                rows += [(n, name, r, *v) for r, v in json.loads(path.read_text()).items()]
    columns = {"lds": "LDS", "prior": "LDS at the prior λ", "rho": "λ n / tr(K)"}
    frame = pd.DataFrame(rows, columns=["n", "task", "rule", *columns])
    for column, title in columns.items():
        table = frame.pivot(index=["n", "task"], columns="rule", values=column)
        print(f"\n{title}\n{table[options.rules].round(3).to_string()}")
        if column != "rho":
            gains = table.sub(table["R2 D.5"], axis=0).drop(columns="R2 D.5")
            print("\nless that of R2 D.5")
            print(gains.groupby("n").agg(["mean", "min", "max"]).round(3).T.to_string())


if __name__ == "__main__":
    main()
