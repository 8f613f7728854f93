"""Which axes need eigenvectors: LDS of td.fit with fewer, with one checkpoint and three.

    python tests/benchmarks/words.py --cache demo-output/quality    # ten minutes

Words are those that a language model writes. The second language model, which has one matrix for
the words that it reads and writes, is no task that a constant was chosen on.
"""

from __future__ import annotations

import functools
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dask
import torch
from _machine import parser_of
from _quality_tasks import N_WORDS, SUBJECTS, Language, LanguageModel, text
from _quality_truth import checkpoints, ground
from torch import nn

import trakdask as td
from trakdask import tensors
from trakdask.fits import fitting


class Tied(LanguageModel):
    """As GPT-2: the head is the matrix of the words, without bias."""

    def __init__(self, width: int = 40) -> None:
        super().__init__(width)
        self.head = nn.Linear(width, N_WORDS, bias=False)
        self.head.weight = self.words.weight


TIED = Language("language-tied", Tied, functools.cache(text), 16, 30)
SUBJECTS[TIED.name] = TIED
TASKS = ["language", "language-tied", "transformer", "mlp", "cnn"]
LONGEST = {"all axes": 4096, "axes up to 192": 192, "axes up to 64": 64}


def lds_of(
    task: str, cache: Path, n: int, longest: int, has_words: bool, weights: Any = "auto"
) -> tuple[float, float, Any]:
    """Return the LDS, the CPU seconds of fit, features and scores, and the projector."""
    subject, start = SUBJECTS[task], time.process_time()
    drawn, outputs = ground(subject)
    model = td.Model(subject.build, checkpoints(subject, cache, 3)[:n], subject.task)
    train, targets = (subject.samples(part) for part in range(2))
    with patch.object(tensors, "LONGEST_AXIS", longest):
        with patch.object(fitting, "writes_words", fitting.writes_words if has_words else none):
            projector = td.fit(train, model, weights=weights, progress=False)
        features = [td.featurize(x, model, projector).compute() for x in (train, targets)]
    scores = td.score(*features).compute()
    seconds = time.process_time() - start
    lds = td.evaluate.lds(scores, drawn, outputs, resamples=1).lds_mean
    return float(lds), seconds, projector


def none(model: td.Model) -> None:
    """Take the place of the function that finds the matrix which writes words."""


def main() -> None:
    options = parser_of(__doc__, cache=Path("demo-output/quality"), tasks=TASKS).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dask.config.set(scheduler="synchronous")
    for task in options.tasks:
        shapes = {tuple(p.shape) for p in SUBJECTS[task].build().parameters() if p.ndim > 1}
        print(f"\n{task}: shapes {sorted(shapes)}")
        runs: dict[str, Any] = {name: (longest, False) for name, longest in LONGEST.items()}
        if task.startswith("language"):
            runs |= {"all axes but words": (4096, True), "and equal weights": (4096, True, False)}
        for name, run in runs.items():
            for n in (1, 3):
                lds, s, projector = lds_of(task, options.cache, n, *run)
                print(f"  {name:20} {n} checkpoints: LDS {lds:.3f}, {s:.0f} CPU s", flush=True)
                if n > 1 and len(run) == 2 and run[1]:
                    weights = projector.curvature.weights
                    agreement = {k: float(f"{w['agreement']:.3g}") for k, w in weights.items()}
                    print(f"    agreement between checkpoints: {agreement}", flush=True)


if __name__ == "__main__":
    main()
