"""Axes with eigenvectors, and weights of layers: LDS of td.fit with other choices.

    python tests/benchmarks/words.py --cache demo-output/quality    # ten minutes

Of one checkpoint, and three. Words are those that a language model writes. Weights of layers
have other powers of D, the number of directions. The second language model, which has one
matrix for the words that it reads and writes, is no task that a constant was chosen on.
"""

from __future__ import annotations

import functools
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dask
import torch
from _machine import parser_of
from _quality_tasks import N_WORDS, SUBJECTS, Language, LanguageModel, Subject, Transformer, text
from _quality_truth import checkpoints, ground
from torch import Tensor, nn

import trakdask as td
from trakdask import tensors
from trakdask.fits import fitting


class Tied(LanguageModel):
    """As GPT-2: the head is the matrix of the words, without bias."""

    def __init__(self, width: int = 40) -> None:
        super().__init__(width)
        self.head = nn.Linear(width, N_WORDS, bias=False)
        self.head.weight = self.words.weight


@dataclass(frozen=True)
class Smoothed(Subject):
    """A classifier that is trained with smoothed labels, by AdamW."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    smoothing: float = 0.0

    def optimizer(self, model: nn.Module, n_steps: int) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), self.lr, weight_decay=self.weight_decay)
        cycles = {"cycle_momentum": False, "max_lr": self.lr, "total_steps": n_steps}
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, **cycles)

    def loss(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model(inputs)
        return nn.functional.cross_entropy(logits, labels, label_smoothing=self.smoothing)


SUBJECTS |= {
    "language-tied": Language("language-tied", Tied, functools.cache(text), 16, 30),
    "text-smoothed": Smoothed(
        "text-smoothed", Transformer, functools.cache(text), 12, 60, smoothing=0.1
    ),
}
TEXTS = ["language", "language-tied", "transformer", "text-smoothed"]
TASKS = [*TEXTS, "mlp", "cnn"]
RUNS: dict[str, dict[str, Any]] = {
    "as by default": {},
    "weights R² √D": {"power": 0.25},
    "weights R² D": {"power": 0.5},
    "weights R² D⁴": {"power": 2},
    "equal weights": {"weights": False},
    "eigenvectors of words": {"has_words": False},
    "axes up to 192": {"longest": 192},
    "axes up to 64": {"longest": 64},
}
"""By title; models without tokens have no weights (R D)², and only language models write words."""


def lds_of(
    task: str, cache: Path, n: int, *, power: float = 1, weights: Any = "auto",
    has_words: bool = True, longest: int = tensors.LONGEST_AXIS,
) -> tuple[float, float, Any]:  # fmt: skip
    """Return the LDS, the CPU seconds of fit, features and scores, and the projector."""
    subject, start = SUBJECTS[task], time.process_time()
    drawn, outputs = ground(subject)
    model = td.Model(subject.build, checkpoints(subject, cache, 3)[:n], subject.task)
    train, targets = (subject.samples(part) for part in range(2))
    writer, weigh = fitting.writes_words, fitting.weights_of

    def weights_of(facts: Any, *options: Any) -> Any:
        return weigh({**facts, "directions": facts["directions"] ** power}, *options)

    with (
        patch.object(tensors, "LONGEST_AXIS", longest),
        patch.object(fitting, "writes_words", lambda model: writer(model) if has_words else None),
        patch.object(fitting, "weights_of", weights_of),
    ):
        projector = td.fit(train, model, weights=weights, progress=False)
        features = [td.featurize(x, model, projector).compute() for x in (train, targets)]
    scores = td.score(*features).compute()
    seconds = time.process_time() - start
    lds = td.evaluate.lds(scores, drawn, outputs, resamples=1).lds_mean
    return float(lds), seconds, projector


def main() -> None:
    options = parser_of(__doc__, cache=Path("demo-output/quality"), tasks=TASKS).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dask.config.set(scheduler="synchronous")
    for task in options.tasks:
        shapes = {tuple(p.shape) for p in SUBJECTS[task].build().parameters() if p.ndim > 1}
        print(f"\n{task}: shapes {sorted(shapes)}")
        for title, run in RUNS.items():
            if {"power", "weights"} & {*run} and task not in TEXTS:
                continue
            if "has_words" in run and not task.startswith("language"):
                continue
            for n in (1, 3):
                lds, s, projector = lds_of(task, options.cache, n, **run)
                print(f"  {title:22} {n} checkpoints: LDS {lds:.3f}, {s:.0f} CPU s", flush=True)
                step = projector.curvature
                if n > 1 and not run and step is not None and step.weights is not None:
                    found = {k: float(f"{w['agreement']:.3g}") for k, w in step.weights.items()}
                    print(f"    agreement between checkpoints: {found}", flush=True)


if __name__ == "__main__":
    main()
