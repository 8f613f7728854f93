"""Scores from inner products of features: dense arrays that serve many variants of an estimator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _quality_scores import features, ground
from _quality_tasks import Subject
from numpy.typing import NDArray
from scipy.stats import rankdata

from trakdask.projection import Rademacher

Floats = NDArray[np.floating]
#: ρ = λ n / tr(K), half a decade apart.
GRID = 10.0 ** np.linspace(-1.5, 2, 8)
LEAST_WEIGHT = 1e-9  # weights are divided by


@dataclass(frozen=True)
class Task:
    """Features (checkpoint, sample, p), Q (sample, checkpoint), and the truth."""

    name: str
    train: Floats
    targets: Floats
    q: Floats
    is_regression: bool
    members: Floats
    truth_ranks: Floats


def load(subject: Subject, cache: Path, paths: list[Path]) -> Task:
    """Read features of a task at some checkpoints, made where the cache has them not."""
    train, targets = features(subject, Rademacher(proj_dim=2048, seed=0), cache, paths)
    drawn, outputs = ground(subject)
    return Task(
        subject.name,
        np.moveaxis(train.feature.values, 2, 0).astype(np.float32),
        np.moveaxis(targets.feature.values, 2, 0).astype(np.float32),
        train.out_to_loss.values.astype(np.float64),
        subject.task == "regression",
        drawn.values.astype(np.float32),
        unit_ranks(outputs.mean("seed").values),
    )


def unit_ranks(values: Floats) -> Floats:
    ranks = rankdata(values, axis=0)
    ranks -= ranks.mean(axis=0)
    norm = np.linalg.norm(ranks, axis=0)
    return np.asarray(ranks / np.where(norm > 0, norm, 1))


def lds(task: Task, scores: Floats) -> Floats:
    """Return the LDS of every set of scores (ρ, sample, target)."""
    predicted = (task.members @ each.astype(np.float32) for each in scores)
    return np.array([(unit_ranks(p) * task.truth_ranks).sum(axis=0).mean() for p in predicted])


@dataclass(frozen=True)
class Kernel:
    """Inner products of training samples G, and with targets X, of a checkpoint."""

    train: Floats
    cross: Floats

    @classmethod
    def of(cls, task: Task, checkpoint: int, proj_dim: int) -> Kernel:
        x = task.train[checkpoint][:, :proj_dim]
        t = task.targets[checkpoint][:, :proj_dim]
        return cls((x @ x.T).astype(np.float64), (x @ t.T).astype(np.float64))


@dataclass(frozen=True)
class Damped:
    """W^½ G W^½ = U diag(s) Uᵀ of a kernel and weights of samples, for all λ."""

    kernel: Kernel
    root: Floats
    values: Floats
    vectors: Floats

    @classmethod
    def of(cls, kernel: Kernel, weights: Floats) -> Damped:
        root = np.sqrt(np.maximum(weights, LEAST_WEIGHT))
        values, vectors = np.linalg.eigh(kernel.train * np.outer(root, root))
        return cls(kernel, root, values.clip(min=0), vectors)

    @property
    def damping(self) -> Floats:
        """Return λ for every ρ of the grid."""
        return np.asarray(GRID * self.values.mean())

    def products(self) -> Floats:
        """Return φ(z)ᵀ (ΦᵀWΦ + λI)⁻¹ φ(t), (ρ, sample, target)."""
        across = (self.vectors.T @ (self.root[:, None] * self.kernel.cross)).astype(np.float32)
        back = (self.vectors / self.root[:, None]).astype(np.float32)
        by_damping = [(1 / (self.values + lam)).astype(np.float32) for lam in self.damping]
        return np.stack([back @ (each[:, None] * across) for each in by_damping])
