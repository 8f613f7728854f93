"""Whole runs of a TRAKer, the original's or ours, on small models; and what they leave on disk."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tests.trak._models import built, images
from trakdask.trak import TRAKer

QUIET = 100
N, M, BATCH = 48, 6, 16


@dataclass(frozen=True)
class Run:
    """A script, as users write them."""

    model: str = "mlp"
    n_checkpoints: int = 1
    by_inds: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    ids: Sequence[int] | None = None

    def states(self) -> dict[int, dict[str, Tensor]]:
        ids = range(self.n_checkpoints) if self.ids is None else self.ids
        return {i: built(self.model, seed=i).state_dict() for i in ids}

    def make(self, kind: Any, folder: Path, **more: Any) -> Any:
        arguments = {"proj_dim": 8, "task": "image_classification", "device": "cpu", **self.options}
        arguments = {"logging_level": QUIET, "train_set_size": N, **arguments, **more}
        return kind(model=built(self.model), save_dir=folder, **arguments)

    def featurize(self, traker: Any, batches: Sequence[int] = range(0, N, BATCH)) -> None:
        x, y = images(N)
        order = np.random.default_rng(0).permutation(N)
        for model_id, state in self.states().items():
            traker.load_checkpoint(state, model_id=model_id)
            for start in batches:
                rows = np.arange(start, start + BATCH)
                rows = order[rows] if self.by_inds else rows
                options = {"inds": rows} if self.by_inds else {"num_samples": BATCH}
                traker.featurize([x[rows], y[rows]], **options)

    def score(self, traker: Any, exp_name: str = "test") -> np.ndarray:
        x, y = images(M, seed=1)
        for model_id, state in self.states().items():
            traker.start_scoring_checkpoint(exp_name, state, model_id, num_targets=M)
            for rows in np.split(np.arange(M), [4]):
                options = {"inds": rows} if self.by_inds else {"num_samples": len(rows)}
                traker.score([x[rows], y[rows]], **options)
        return traker.finalize_scores(exp_name)

    def whole(self, kind: Any, folder: Path, **more: Any) -> np.ndarray:
        """Run everything; the original's progress bars go nowhere."""
        with contextlib.redirect_stderr(io.StringIO()):
            traker = self.make(kind, folder, **more)
            self.featurize(traker)
            traker.finalize_features()
            # The original loses matrices of one block in finalize_features (quirk 3).
            return np.array(self.score(self.make(kind, folder, **more)))


def started(folder: Path, **options: Any) -> TRAKer:
    """Return a TRAKer with model id 0 loaded."""
    traker = Run(options=options).make(TRAKer, folder)
    traker.load_checkpoint(built("mlp").state_dict(), model_id=0)
    return traker


def content(folder: Path) -> dict[str, Any]:
    """Return arrays, JSON and other files of a folder, but not its lock, by relative path."""
    files: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".mmap":
            files[name] = np.load(path)
        elif path.suffix == ".json":
            files[name] = json.loads(path.read_text())
        elif path.is_file() and name != ".lock":
            files[name] = path.read_bytes()
    return files


def relative(found: Any, expected: Any) -> float:
    """Return the largest difference over the largest magnitude."""
    a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
