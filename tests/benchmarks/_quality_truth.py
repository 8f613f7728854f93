"""Ground truth of the quality benchmark: outputs of models retrained on random halves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _quality_tasks import Subject, members
from numpy.typing import NDArray

TRUTH = Path(__file__).parent / "results" / "quality"
CHUNK = 10  # subsets of one file of the cache
SEEDS = 2  # models of each subset
N_CHECKPOINTS = 10


def checkpoints(subject: Subject, cache: Path, n: int = N_CHECKPOINTS) -> list[Path]:
    """Train what is missing of the full-data models and return their files."""
    folder = cache / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{subject.name}-{subject.digest()}-c{index}.pt" for index in range(n)]
    for index, path in enumerate(paths):
        if not path.exists():
            partial = path.with_suffix(".partial")
            torch.save(subject.train(None, seed=index), partial)
            partial.replace(path)
    return paths


def retrain(subject: Subject, cache: Path) -> NDArray[np.float32]:
    """Return outputs (subset, seed, target), trained where the cache has them not."""
    folder = cache / f"retrained-{subject.name}-{subject.digest()}"
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for start in range(0, subject.n_subsets, CHUNK):
        path = folder / f"subset{start:04}.npy"
        if not path.exists():
            partial = path.with_suffix(".partial.npy")
            np.save(partial, _chunk(subject, range(start, start + CHUNK)))
            partial.replace(path)
            print(f"  {subject.name}: {start + CHUNK} subsets", file=sys.stderr, flush=True)
        found.append(np.load(path))
    return np.concatenate(found)[: subject.n_subsets]


def _chunk(subject: Subject, subsets: range) -> NDArray[np.float32]:
    n_train = len(subject.data()[0][0])
    # Seeds of their own: 0, 1, ... are those of the models that are attributed.
    states = [
        subject.train(members(subset, n_train), seed=1_000_000 * (seed + 1) + subset)
        for subset in subsets
        for seed in range(SEEDS)
    ]
    outputs = np.stack([subject.outputs(state) for state in states]).astype(np.float32)
    return outputs.reshape(len(subsets), SEEDS, -1)


def keep(subject: Subject, outputs: NDArray[np.float32]) -> None:
    """Write the truth that is committed; half precision moves a rank correlation by 1e-4."""
    TRUTH.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        TRUTH / f"{subject.name}.npz",
        outputs=outputs.astype(np.float16),
        digest=subject.digest(),
        torch=torch.__version__,
    )


def truth(subject: Subject) -> NDArray[np.float64]:
    """Read the committed outputs (subset, seed, target)."""
    path = TRUTH / f"{subject.name}.npz"
    stored: dict[str, Any] = dict(np.load(path)) if path.exists() else {"digest": "nothing"}
    if (found := str(stored["digest"])) != (needed := subject.digest()):
        raise ValueError(
            f"{path.name} holds {found}; needed the truth of {needed}. Type python "
            f"tests/benchmarks/quality.py --stage train --tasks {subject.name}."
        )
    return np.asarray(stored["outputs"], dtype=np.float64)
