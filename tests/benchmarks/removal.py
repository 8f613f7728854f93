"""LDS when 1 %, 10 % or half of the training samples are removed, and with ten checkpoints.

    python tests/benchmarks/removal.py --stage train    # models without 1 % and 10 %: 40 minutes
    python tests/benchmarks/removal.py                  # ten minutes

The second table has two tasks of images and a language model, with baselines, EK-FAC on whole
gradients and, for images, soft weights of power 1. Models without 1 % or 10 % differ from each
other only by what was left out of the batches; models of halves have other batches.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from _fits import ALL, EXACT_DAMPING, SKETCH, a_quarter, arguments_of, featurized, setting
from _machine import made_once
from _quality_tasks import N_WORDS, Subject
from _quality_truth import TRUTH, ground

import trakdask as td

#: Seeds for each task: the ceiling rises with them, as its noise is averaged.
N_SEEDS = {"mlp": 8, "cnn": 3, "language": 2}
REMOVED = 0.01, 0.1
N_SUBSETS = 60
MAIN = "mlp", "cnn", "cnn-bn", "resnet", "transformer", "language", "noisy", "cancer"
RESAMPLES = 300
FIRST_SEED = 10_000_000  # not a seed of a model that is attributed


def kept_samples(subject: Subject, removed: float) -> xr.DataArray:
    """Draw which samples each model is trained on."""
    n_train = len(subject.data()[0][0])
    return td.evaluate.subsets(n_train, N_SUBSETS, fraction=1 - removed).compute()


def train(subject: Subject, removed: float, cache: Path) -> None:
    """Write outputs (subset, seed, target) of models without some samples, which are committed."""
    folder = cache / f"removed-{subject.name}-{subject.digest()}"
    masks = kept_samples(subject, removed).values

    def write(seed: int, path: Path) -> None:
        states = (subject.train(None, FIRST_SEED + seed, left_in=mask) for mask in masks)
        np.save(path, np.stack([subject.outputs(state) for state in states]))
        print(f"  {subject.name}, without {removed:g}: seed {seed}", file=sys.stderr, flush=True)

    of_seeds = [
        np.load(made_once(folder / f"{removed:g}-{seed}.npy", partial(write, seed)))
        for seed in range(N_SEEDS[subject.name])
    ]
    outputs = np.stack(of_seeds, axis=1).astype(np.float32)
    np.savez_compressed(file_of(subject, removed), outputs=outputs, digest=subject.digest())


def file_of(subject: Subject, removed: float) -> Path:
    return TRUTH / f"{subject.name}-without-{removed:g}.npz"


# --- scores ---------------------------------------------------------------------------------------


def scores_of(
    model: td.Model, samples: Any, projector: Any, estimator: Any = "auto"
) -> xr.DataArray:
    features = featurized(model, *samples, projector)
    return td.score(*features, estimator).drop_attrs().compute()


def by_size(subject: Subject, cache: Path, n: int) -> dict[str, xr.DataArray]:
    """Return scores by n checkpoints, at the default λ."""
    _, model, samples = setting(subject.name, cache, n)
    train = samples[0]
    curved = td.curvature(a_quarter(train), model, leading=4096).then(td.SJLT(proj_dim=4096))
    return {
        "2,048 random": scores_of(model, samples, SKETCH),
        "512 random": scores_of(model, samples, td.SJLT(proj_dim=512)),
        "512 components": scores_of(model, samples, td.principal_components(train, model)),
        "components, curvature": scores_of(
            model, samples, td.principal_components(train, model, projector=curved)
        ),
    }


def others(subject: Subject, cache: Path, n: int) -> dict[str, xr.DataArray]:
    """Return scores of baselines, EK-FAC on whole gradients, and soft weights of power 1."""
    _, model, samples = setting(subject.name, cache, n)
    curved = td.curvature(samples[0], model, damping=EXACT_DAMPING, leading=0)
    found = {
        "EK-FAC": scores_of(model, samples, curved.then(td.Identity()), estimator="grad_dot"),
        "cosine": scores_of(model, samples, SKETCH, estimator="grad_cos"),
    }
    if subject.name == "language":
        return found | {"BM25": bm25(subject)}
    return found | {"power 1": scores_of(model, samples, SKETCH, td.Soft(power=1))}


def bm25(subject: Subject, k: float = 1.2) -> xr.DataArray:
    """Return Okapi's BM25 of training texts for the words of targets; all have equal lengths."""
    counts, asked = (
        np.stack([np.bincount(text, minlength=N_WORDS) for text in part[0]])
        for part in subject.data()
    )
    n_texts = (counts > 0).sum(0)
    rarity = np.log1p((len(counts) - n_texts + 0.5) / (n_texts + 0.5))
    found = (rarity * counts * (k + 1) / (counts + k)) @ asked.T
    return xr.DataArray(found, dims=("sample", "target"))


def with_ten(subject: Subject, cache: Path) -> pd.DataFrame:
    """Return LDS by ten checkpoints, for halves."""
    return lds(by_size(subject, cache, 10), 0.5, *ground(subject))


def without_some(subject: Subject, cache: Path) -> pd.DataFrame:
    """Return LDS by three checkpoints, by the share that was removed."""
    scores = by_size(subject, cache, 3) | others(subject, cache, 3)
    tables = []
    for removed in REMOVED:
        outputs = np.load(file_of(subject, removed))["outputs"].astype(np.float64)
        of_models = xr.DataArray(outputs, dims=("subset", "seed", "target"))
        tables.append(lds(scores, removed, kept_samples(subject, removed), of_models))
    return pd.concat([*tables, lds(scores, 0.5, *ground(subject))])


def lds(
    scores: dict[str, xr.DataArray], removed: float, masks: xr.DataArray, outputs: xr.DataArray
) -> pd.DataFrame:
    """Return the LDS of each kind of scores, and the ceiling, with their intervals."""
    every = xr.concat([kind.drop_vars(kind.coords) for kind in scores.values()], "kind")
    found = td.evaluate.lds(every, masks, outputs, resamples=RESAMPLES).compute()
    values = [*found.lds_mean.values, found.ceiling_mean]
    intervals = [*found.interval.transpose("kind", ...).values, found.ceiling_interval]
    cells = [
        f"{value:.3f} [{low:.3f}, {high:.3f}]"
        for value, (low, high) in zip(values, intervals, strict=True)
    ]
    return pd.DataFrame({"removed": removed, "of": [*scores, "ceiling"], "lds": cells})


# --- command line ---------------------------------------------------------------------------------


def print_table(title: str, measure: Any, tasks: Iterable[str], cache: Path) -> None:
    """Print the LDS of all tasks; what the cache has is not measured again."""
    tables = []
    for name in tasks:
        path = cache / "removal" / f"{name}-{measure.__name__}.csv"
        made_once(path, lambda p, name=name: measure(ALL[name], cache).to_csv(p, index=False))
        tables.append(pd.read_csv(path).assign(task=name))
    frame = pd.concat(tables)
    wide = frame.pivot(index=["task", "removed"], columns="of", values="lds")
    columns = sorted(frame.of.unique(), key="ceiling".__eq__)  # that last
    print(f"\n{title}\n{wide.loc[list(tasks), columns].fillna('').to_string()}")


def main() -> None:
    options = arguments_of(__doc__, MAIN, stages=("score", "train"))
    few_removed = [name for name in options.tasks if name in N_SEEDS]
    if options.stage == "train":
        for name, removed in itertools.product(few_removed, REMOVED):
            train(ALL[name], removed, options.cache)
        return
    print("LDS by td.score at the default λ, with intervals of 95 %")
    print_table("10 checkpoints, random halves", with_ten, options.tasks, options.cache)
    if few_removed:
        print_table("3 checkpoints, by what is removed", without_some, few_removed, options.cache)


if __name__ == "__main__":
    main()
