"""Ground truth of the quality benchmark: outputs of models retrained on random halves."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from _machine import made_once
from _quality_tasks import Subject, members
from numpy.typing import NDArray

TRUTH = Path(__file__).parent / "results" / "quality"
CHUNK = 10  # subsets of one file of the cache
SEEDS = 2  # models of each subset
N_CHECKPOINTS = 10


def checkpoints(subject: Subject, cache: Path, n: int = N_CHECKPOINTS) -> list[Path]:
    """Train what is missing of the full-data models and return their files."""
    stem = cache / "checkpoints" / f"{subject.name}-{subject.digest()}"

    def write(seed: int, path: Path) -> None:
        torch.save(subject.train(None, seed), path)

    return [made_once(Path(f"{stem}-c{seed}.pt"), partial(write, seed)) for seed in range(n)]


def retrain(subject: Subject, cache: Path, n_seeds: int = SEEDS) -> NDArray[np.float32]:
    """Return outputs (subset, seed, target), trained where the cache has them not."""
    folder = cache / f"retrained-{subject.name}-{subject.digest()}"

    def write(subsets: range, path: Path) -> None:
        np.save(path, _outputs(subject, subsets, n_seeds))
        print(f"  {subject.name}: {subsets.stop} subsets", file=sys.stderr, flush=True)

    found = []
    for start in range(0, subject.n_subsets, CHUNK):
        make = partial(write, range(start, start + CHUNK))
        found.append(np.load(made_once(folder / f"subset{start:04}.npy", make)))
    return np.concatenate(found)[: subject.n_subsets]


def _outputs(subject: Subject, subsets: range, n_seeds: int) -> NDArray[np.float32]:
    n_train = len(subject.data()[0][0])
    # Other seeds than 0, 1, ..., which the models have that are attributed.
    states = [
        subject.train(members(subset, n_train), seed=1_000_000 * (seed + 1) + subset)
        for subset in subsets
        for seed in range(n_seeds)
    ]
    outputs = np.stack([subject.outputs(state) for state in states]).astype(np.float32)
    return outputs.reshape(len(subsets), n_seeds, -1)


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


def ground(subject: Subject) -> tuple[xr.DataArray, xr.DataArray]:
    """Return which samples each model was trained on, and the outputs."""
    outputs = xr.DataArray(truth(subject), dims=("subset", "seed", "target"))
    n_train = len(subject.data()[0][0])
    drawn = np.stack([members(subset, n_train) for subset in range(len(outputs))])
    return xr.DataArray(drawn, dims=("subset", "sample")), outputs
