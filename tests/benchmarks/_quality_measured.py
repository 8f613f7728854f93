"""What quality_wider.py measures of a task. Everything is kept in the cache."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import dask
import numpy as np
import torch
import xarray as xr
from _machine import made_once
from _quality_kernels import Damped, Floats, Kernel, Task, lds, load
from _quality_scores import AUTO, compact, features, ground
from _quality_tasks import Subject
from _quality_truth import checkpoints, truth
from _quality_wider import Wider, trajectory
from quality_ideas import powered, shrunk, weighted

import trakdask as td
from trakdask.projection import Rademacher

CHECKPOINTS = (1, 3, 10)
#: Powers of soft weights, and None for trak.
POWERS = {"trak": None, "soft, a = 0.25": 0.25, "soft": 0.5, "soft, a = 0.75": 0.75,
          "Gauss-Newton": 1.0}  # fmt: skip
#: Powers of Q in scores under the gram matrix of soft, with a = ½.
LOSS_POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
SHARPNESS = (1.125, 1.25)
#: soft with Q in scores, where it has its root.
WITH_Q = "soft, with Q"
#: Which of ten states of the second half of a training: always with the last.
ON_THE_WAY = {1: [9], 3: [3, 6, 9], 10: list(range(10))}
RESAMPLES = 100

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """A task and a cache of what is measured of it."""

    subject: Subject
    cache: Path

    @cached_property
    def seeds(self) -> Task:
        """Read features of models that were trained from different seeds."""
        return load(self.subject, self.cache, checkpoints(self.subject, self.cache))

    @cached_property
    def run(self) -> Task:
        """Read features of states of one training."""
        assert isinstance(self.subject, Wider)
        return load(self.subject, self.cache, trajectory(self.subject, self.cache))

    def once(self, measure: Callable[[Measured], list[Row]]) -> list[Row]:
        """Return what the cache has, or measure it, as rows with the name of the task."""
        stem = f"{self.subject.name}-{self.subject.digest()}-{measure.__name__}"
        path = self.cache / "wider" / f"{stem}.json"

        def write(path: Path) -> None:
            start = time.process_time()
            path.write_text(json.dumps({"rows": measure(self)}))
            took = time.process_time() - start
            print(f"  {stem}: {took:.0f} CPU seconds", file=sys.stderr, flush=True)

        rows: list[Row] = json.loads(made_once(path, write).read_text())["rows"]
        return [{"task": self.subject.name} | row for row in rows]


# --- at the best λ in hindsight -------------------------------------------------------------------


def products(task: Task, power: float | None, chosen: list[int], p: int) -> list[Floats]:
    """Return φ(z)ᵀ(K + λI)⁻¹φ(t) of each checkpoint, (ρ, sample, target)."""
    h = np.ones_like(task.q) if power is None else task.q**power * (1 - task.q)
    return [Damped.of(Kernel.of(task, c, p), h[:, c]).products() for c in chosen]


def loss_weights(task: Task, power: float | None, chosen: list[int]) -> Floats:
    """Return g (sample), the mean of the checkpoints'."""
    return np.asarray((task.q[:, chosen] ** (power or 1.0)).mean(axis=1))


def best(task: Task, scores: Floats) -> float:
    return float(lds(task, scores).max())


def estimators(measured: Measured) -> list[Row]:
    """Compare weights with 3 checkpoints; with trak and soft also changes of 1, 3, 10."""
    task, rows = measured.seeds, []
    for name, power in POWERS.items():
        most = 10 if name in ("trak", "soft") else 3
        each = products(task, power, list(range(most)), 2048)
        for n in (n for n in CHECKPOINTS if n <= most):
            g, mean = loss_weights(task, power, list(range(n))), np.mean(each[:n], axis=0)
            found = {"none": mean} | {f"power {a}": powered(mean, a) for a in SHARPNESS}
            found |= {"shrunk": shrunk(each[:n])} if n > 1 else {}
            rows += [
                {"estimator": name, "checkpoints": n, "change": change,
                 "lds": best(task, weighted(scores, g))}
                for change, scores in found.items()
            ]  # fmt: skip
    return rows


def ensembles(measured: Measured) -> list[Row]:
    """Compare checkpoints of several seeds and of one run, and dimensions, by soft."""
    rows = []
    for source, p in (("seeds", 512), ("seeds", 2048), ("one run", 2048)):
        task = measured.seeds if source == "seeds" else measured.run
        each = products(task, 0.5, list(range(10)), p)
        for n in CHECKPOINTS:
            chosen = list(range(n)) if source == "seeds" else ON_THE_WAY[n]
            mean = np.mean([each[c] for c in chosen], axis=0)
            found = best(task, weighted(mean, loss_weights(task, 0.5, chosen)))
            rows.append({"source": source, "p": p, "checkpoints": n, "lds": found})
    return rows


def by_loss_power(measured: Measured) -> list[Row]:
    """Keep the gram matrix of soft, and weight samples by other powers of Q; 3 checkpoints."""
    task, chosen = measured.seeds, [0, 1, 2]
    mean = np.mean(products(task, 0.5, chosen, 2048), axis=0)
    powers = {
        f"Q^{b:g}": best(task, weighted(mean, (task.q[:, chosen] ** b).mean(axis=1)))
        for b in LOSS_POWERS
    }
    trak = np.mean(products(task, None, chosen, 2048), axis=0)
    return [powers | {"trak": best(task, weighted(trak, loss_weights(task, None, chosen)))}]


# --- of the data ----------------------------------------------------------------------------------


def of_data(measured: Measured) -> list[Row]:
    """Describe the task, and how much Q and f of its training samples differ."""
    subject, q = measured.subject, measured.seeds.q[:, :3].mean(axis=1)
    state = torch.load(checkpoints(subject, measured.cache, 1)[0], weights_only=True)
    return [
        {
            "parameters": sum(p.numel() for p in subject.build().parameters()),
            "n": len(q),
            "halves": len(truth(subject)),
            "on training samples": subject.skill_of(state, 0),
            "on targets": subject.skill_of(state, 1),
            "mean Q": float(q.mean()),
            "spread of Q": float(q.std() / q.mean()),
            "deviation": _deviation(measured.seeds.q[:, :3]),
        }
    ]


def _deviation(q: Floats) -> float:
    """Return the root mean square, over checkpoints, of the deviation of log((1 - q)/q)."""
    q = q.clip(1e-12, 1 - 1e-6)
    return float(np.sqrt(np.log((1 - q) / q).var(axis=0).mean()))


# --- by the package -------------------------------------------------------------------------------


def by_package(measured: Measured) -> list[Row]:
    """Score 3 checkpoints by the public functions, with λ as the package chooses it.

    Intervals of differences are those of paired resamples of subsets and targets.
    """
    subject = measured.subject
    paths = checkpoints(subject, measured.cache)
    made = features(subject, Rademacher(proj_dim=2048, seed=0), measured.cache, paths)
    train, targets = compact(*(part.isel(checkpoint=slice(3)) for part in made))
    train, targets = (part.chunk(checkpoint=1) for part in (train, targets))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # λ at an end of the grid
        default = td.score(train, targets)
        kinds = {
            "trak": td.Trak(AUTO),
            "soft": td.Soft(0.5, AUTO),
            "Gauss-Newton": td.Soft(1, AUTO),
        }
        lazy = {"default": default} | {
            name: td.score(train, targets, kind) for name, kind in kinds.items()
        }
        (found,) = dask.compute(lazy)
    task = measured.seeds
    q = task.q[:, :3]
    # The same products, and the same λ: it is chosen under the root, whatever weights scores.
    found[WITH_Q] = found["soft"] * ((q.mean(axis=1) / (q**0.5).mean(axis=1))[:, None])
    mean = np.mean(products(task, None, [0, 1, 2], 2048), axis=0)
    trak = weighted(mean, loss_weights(task, None, [0, 1, 2]))
    values = [each.values for each in found.values()] + [trak[lds(task, trak).argmax()]]
    stacked = xr.DataArray(np.stack(values), dims=("entry", "sample", "target"))
    judged = td.evaluate.lds(stacked, *ground(subject), resamples=RESAMPLES).compute()
    draws = judged.draws.transpose("entry", ...).values
    low, high = np.quantile(draws[0] - draws[-1], (0.025, 0.975))
    return [
        dict(zip((*found, "trak, best λ"), judged.lds_mean.values.tolist(), strict=True))
        | {"low": float(low), "high": float(high), "ceiling": float(judged.ceiling_mean)}
        | {"is": f"{default.attrs['estimator']}, {default.attrs['damping']}"}
    ]
