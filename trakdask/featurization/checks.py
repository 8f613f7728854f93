"""Check that a model works with an engine, on the first samples that a process computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trakdask.featurization.job import Samples
from trakdask.featurization.memory import activation_bytes
from trakdask.models.gradients import (
    ENGINES,
    require_batch_independence,
    require_same_as_loop,
)
from trakdask.models.independence import require_same_alone
from trakdask.models.padding import ignores_padding
from trakdask.models.tasks import Batch, Forward
from trakdask.provenance import digest

__all__ = ["Checked", "check_micro_batch", "check_once"]


@dataclass
class Checked:
    """What a process has learned about a model from the samples that it was checked on.

    Parameters
    ----------
    activation_bytes
        Memory of the activations of one sample; None until two samples have passed the checks.
    n_samples
        Size of the largest batch whose f and Q were compared with those of single samples.
    ignores_padding
        Whether padding of sequences can be cut.
    """

    activation_bytes: int | None = None
    n_samples: int = 1
    ignores_padding: bool = False


_checked: dict[str, Checked] = {}


def check_once(samples: Samples, forward: Forward) -> Checked:
    """Check a model on two samples, once per process, architecture, engine and device.

    Their f and Q must equal those of each sample alone, and their gradients those of the loop.
    """
    job = samples.job
    how = {"engine": job.engine, "device": str(samples.device), **job.precision.attrs()}
    key = digest({**job.model.spec(), "checkpoints": job.model.token, "how": how})
    checked = _checked.setdefault(key, Checked())
    if checked.activation_bytes is None or (checked.n_samples == 1 and len(samples) > 1):
        pair = _pair(samples, forward)
        if pair is not None:
            two, task = samples.batch(pair), job.model.task
            with _explained(samples, forward, pair):
                require_batch_independence(job.engine, forward, task, two)
                if job.engine != "loop":
                    require_same_as_loop(job.engine, forward, task, two, job.row_map.names)
                checked.activation_bytes = activation_bytes(forward, task, two)
                checked.ignores_padding = ignores_padding(forward, task, two)
            checked.n_samples = max(checked.n_samples, len(samples.positions[pair]))
    return checked


def check_micro_batch(
    checked: Checked, samples: Samples, forward: Forward, part: slice, block: tuple[np.ndarray, ...]
) -> None:
    """Compare f and Q with those of single samples if a micro-batch is larger than any before.

    A larger batch may reveal that samples are mixed where two samples do not.
    """
    n = part.stop - part.start
    if n > checked.n_samples:
        _, output, out_to_loss = (torch.from_numpy(array) for array in block)
        batch, task = samples.batch(part), samples.job.model.task
        with _explained(samples, forward, part):
            require_same_alone(forward, task, batch, output, out_to_loss)
        checked.n_samples = n


@contextmanager
def _explained(samples: Samples, forward: Forward, part: slice) -> Iterator[None]:
    try:
        yield
    except Exception as err:
        better = samples.explained(err, forward, part)
        if better is err:
            raise
        raise better from err


def _pair(samples: Samples, forward: Forward) -> slice | None:
    """Return the first two samples, or the first pair without failures if these are recorded."""
    if samples.job.on_error == "raise":
        return slice(0, 2)
    pairs = (slice(start, start + 2) for start in range(0, len(samples), 2))
    return next((pair for pair in pairs if _passes(samples, forward, samples.batch(pair))), None)


def _passes(samples: Samples, forward: Forward, batch: Batch) -> bool:
    finite: list[bool] = []

    def sink(name: str, gradient: Tensor, first: int | None = None) -> None:
        finite.append(bool(gradient.isfinite().all()))

    job = samples.job
    try:
        results = ENGINES["loop"](forward, job.model.task, batch, job.row_map.names, sink)
    except Exception:  # reported with the sample when its micro-batch raises it again
        return False
    return all(finite) and all(bool(tensor.isfinite().all()) for tensor in results)
