"""A run that is killed at each of its write operations, and jobs that share a folder.

A script, for one process: everything is imported once, and a run that is killed is a fork. It ends
by SIGKILL before its k-th write operation, or in the middle of it, and is run again. Prints as JSON
what differs from a run that nobody disturbed, and how the jobs ended.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.trak._models import checkpoints, images
from tests.trak._runs import M, N, Run
from trakdask.trak import TRAKer
from trakdask.trak.gradient_computers import AbstractGradientComputer
from trakdask.trak.projectors import NoOpProjector

N_JOBS, N_SAMPLES = 2, 8


class Pixels(AbstractGradientComputer):
    """Images in place of gradients, since this is about files, and many runs have to pass.

    Somebody else may have written it: it knows the abstract class only.
    """

    def __init__(
        self, model: Any, task: Any, grad_dim: Any, dtype: Any, device: Any, grad_wrt: Any
    ) -> None:
        super().__init__(model, task, grad_dim, dtype, device)

    def load_model_params(self, model: Any) -> None:
        pass

    def compute_per_sample_grad(self, batch: Any) -> torch.Tensor:
        return batch[0].flatten(1).repeat(1, 4)[:, : self.grad_dim]

    def compute_loss_grad(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
        return 1 / (2.0 + batch[1][:, None])


OPTIONS = {"gradient_computer": Pixels, "projector": NoOpProjector(), "lambda_reg": 0.1}


class Killer:
    """Counts write operations, and ends its process at one of them, or in the middle of it."""

    def begin(self, at: int = 0, half: bool = False) -> None:
        self.at, self.half = at, half
        self.operations: list[str] = []

    def wrap(self, owner: Any, name: str, halfway: Callable[..., Any] | None = None) -> None:
        original = getattr(owner, name)

        def operation(*args: Any, **kwargs: Any) -> Any:
            self.operations.append(name)
            if len(self.operations) == self.at:
                if self.half:
                    assert halfway is not None
                    halfway(original, *args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, operation)


def assign_half(original: Any, array: Any, key: Any, value: Any) -> None:
    """Write half of the rows."""
    rows = np.arange(len(array))[key] if not isinstance(key, np.ndarray) else key
    half = rows[: len(rows) // 2]
    original(array, half, value[: len(half)] if np.ndim(value) else value)


def write_half(original: Any, descriptor: int) -> None:
    """Leave half of a file, where all of it is to be synchronised."""
    os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)


KILLER = Killer()


def run(folder: Path) -> None:
    (state,), (x, y) = checkpoints("linear", 1), images(N_SAMPLES)
    traker = Run("linear", options=OPTIONS).make(TRAKer, folder, train_set_size=N_SAMPLES)
    traker.load_checkpoint(state, model_id=0)
    for rows in (slice(0, 4), slice(4, N_SAMPLES)):
        traker.featurize((x[rows], y[rows]), num_samples=4)
    traker.finalize_features(del_grads=True)
    traker.start_scoring_checkpoint("test", state, 0, num_targets=4)
    traker.score((x[:4], y[:4]), num_samples=4)
    traker.finalize_scores("test")


def killed(folder: Path, at: int, half: bool) -> int:
    """Return the signal that ends a run in a process of its own."""
    child = os.fork()
    if child == 0:
        KILLER.begin(at, half)
        run(folder)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status)


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def job(folder: Path, model_id: int, barrier: Any) -> None:
    """Do what one job of several does on one folder."""
    options = {"lambda_reg": 0.1, "load_from_save_dir": model_id != 1}
    traker = Run(options=options).make(TRAKer, folder)
    state = checkpoints("mlp", N_JOBS)[model_id]
    barrier.wait()
    traker.load_checkpoint(state, model_id=model_id)
    traker.featurize(images(N), num_samples=N)
    traker.finalize_features(model_ids=[model_id])
    for i in range(3):
        for exp_name in ("shared", f"{model_id} {i}"):
            traker.start_scoring_checkpoint(exp_name, state, model_id, M)
            traker.score(images(M, seed=1), num_samples=M)


def exit_codes_of_jobs(folder: Path) -> list[int | None]:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(N_JOBS)
    jobs = [context.Process(target=job, args=(folder, i, barrier)) for i in range(N_JOBS)]
    for process in jobs:
        process.start()
    for process in jobs:
        process.join()
    return [process.exitcode for process in jobs]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # A killed process loses nothing that it has written, so nothing need reach the disk.
    np.memmap.flush = lambda self: None  # type: ignore[method-assign]
    os.fsync = lambda descriptor: None  # type: ignore[assignment]
    KILLER.wrap(np.memmap, "__setitem__", assign_half)
    KILLER.wrap(os, "replace")
    KILLER.wrap(os, "unlink")
    KILLER.wrap(os, "fsync", write_half)
    here, failed = folder / "run", []
    KILLER.begin()
    run(here)
    operations, undisturbed = list(KILLER.operations), hashes(here)
    shutil.rmtree(here)
    for at, name in enumerate(operations, 1):
        for half in (False, True) if name in ("__setitem__", "fsync") else (False,):
            signal_number = killed(here, at, half)
            run(here)
            is_same = hashes(here) == undisturbed
            shutil.rmtree(here)
            if (signal_number, is_same) != (signal.SIGKILL, True):
                failed.append([at, name, half, signal_number, is_same])
    jobs = exit_codes_of_jobs(folder / "jobs")
    print(json.dumps({"operations": operations, "failed": failed, "jobs": jobs}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
