"""What predicts best on texts: all parameters or some of them, and BM25.

    python tests/benchmarks/text.py --cache demo-output/quality    # half an hour

LDS with one checkpoint, three and ten, on random halves, of a small language model, of one with
tied weights that trains twice as long (added when all choices were made), and of two transformers
that classify. "Some parameters" are the layer that reads or writes words: the head of a language
model, which is tied to the embedding in the second one, and the embedding of a classifier. The
BM25 of a classifier is negative for samples of another class. A sum is of standardised scores,
half each.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from _fits import ALL, SKETCH, arguments_of, featurized, setting
from _machine import made_once
from _quality_tasks import N_WORDS, Language, LanguageModel, Subject, text
from _quality_truth import TRUTH, checkpoints, ground, keep, retrain
from torch import nn

import trakdask as td


class Tied(LanguageModel):
    """As GPT-2: the head is the matrix of the words, without bias."""

    def __init__(self, width: int = 40) -> None:
        super().__init__(width)
        self.head = nn.Linear(width, N_WORDS, bias=False)
        self.head.weight = self.words.weight


HELD_OUT = Language("language-tied", Tied, functools.cache(text), 16, 30)
ALL[HELD_OUT.name] = HELD_OUT
TEXTS = "language", "language-tied", "transformer", "text-smoothed"
COUNTS = {"language": (1, 3, 10)}
PARAMETERS = {"language": "head.*"}
RESAMPLES = 300
METHODS = "random", "fit", "parameters"
TITLES = {
    "random": "2,048 random columns",
    "fit": "td.fit",
    "parameters": "td.fit, some parameters",
    "bm25": "BM25",
}


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


def counts(subject: Subject) -> tuple[int, ...]:
    return COUNTS.get(subject.name, (1, 3))


def scores(subject: Subject, method: str, cache: Path) -> xr.DataArray:
    """Return scores (n_checkpoints, sample, target)."""
    _, model, (train, targets) = setting(subject.name, cache, max(counts(subject)))
    projector: Any = SKETCH
    if method == "parameters":
        chosen = PARAMETERS.get(subject.name, "words.*")
        files = checkpoints(subject, cache, max(counts(subject)))
        model = td.Model(subject.build, files, subject.task, parameters=chosen)
    if method != "random":
        projector = td.fit(train, model, progress=False)
    features = featurized(model, train, targets, projector)
    by_count = [
        td.score(*(ds.isel(checkpoint=slice(n)) for ds in features)).drop_attrs()
        for n in counts(subject)
    ]
    every = xr.concat([one.reset_coords(drop=True) for one in by_count], "n_checkpoints")
    return every.compute()


def kept(subject: Subject, method: str, cache: Path) -> xr.DataArray:
    path = cache / "text" / f"{subject.name}-{method}.npy"
    made_once(path, lambda path: np.save(path, scores(subject, method, cache).values))
    return xr.DataArray(np.load(path), dims=("n_checkpoints", "sample", "target"))


def words_in_common(subject: Subject) -> xr.DataArray:
    """Return BM25, (sample, target)."""
    found = bm25(subject)
    if isinstance(subject, Language):
        return found
    labels, of_targets = (part[1] for part in subject.data())
    return found * np.where(labels[:, None] == of_targets, 1, -1)


def table(subject: Subject, cache: Path) -> pd.DataFrame:
    """Return LDS by method and number of checkpoints, with standard errors."""
    by_method = {TITLES[method]: kept(subject, method, cache) for method in METHODS}
    words = words_in_common(subject)
    by_method |= {
        f"{TITLES[method]} + BM25": kind / kind.std(("sample", "target")) + words / words.std()
        for method, kind in zip(METHODS, [*by_method.values()], strict=True)
    }
    by_method[TITLES["bm25"]] = words.expand_dims(n_checkpoints=len(counts(subject)))
    every = xr.concat([*by_method.values()], "method")
    result = td.evaluate.lds(every, *ground(subject), resamples=RESAMPLES).compute()
    low, high = np.moveaxis(result.interval.transpose("method", "n_checkpoints", ...).values, -1, 0)
    mean = result.lds_mean.transpose("method", "n_checkpoints").values
    cells = np.char.add(
        np.char.mod("%.3f ± ", mean), np.char.mod("%.3f", (high - low) / (2 * 1.96))
    )
    return pd.DataFrame(cells, index=[*by_method], columns=counts(subject))


def main() -> None:
    options = arguments_of(__doc__, TEXTS)
    for name in options.tasks:
        subject = ALL[name]
        if not (TRUTH / f"{name}.npz").exists():
            keep(subject, retrain(subject, options.cache))
        print(f"\n{name}: LDS by number of checkpoints, with standard errors")
        print(table(subject, options.cache).to_string(), flush=True)


if __name__ == "__main__":
    main()
