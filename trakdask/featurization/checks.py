"""Compare what an engine computes for samples in a batch with what samples alone give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trakdask.featurization.devices import activation_bytes
from trakdask.featurization.failures import ModelError
from trakdask.featurization.job import Samples
from trakdask.models.curvature import Rotations, rotated
from trakdask.models.gradients import (
    WeightedSum,
    require_same_as_loop,
    require_same_sum,
    sample_weights,
    summed_gradient,
)
from trakdask.models.independence import (
    ignores_padding,
    reads_values,
    require_close,
    require_same_alone,
)
from trakdask.models.rules import Products
from trakdask.models.tasks import Batch, Forward
from trakdask.models.tasks.protocol import SampleError

_ROUGHLY = 0.05
"""Relative error that one sample of a later block may have.

A mistake of an engine is of the size of the gradient itself. Rounding is not always small: of the
millions of units of a large model, one in a few blocks has an input so close to zero that its ReLU
is on in a batch and off for the sample alone.
"""


@dataclass
class Checked:
    """What a process has found out about a model, run by one engine in one precision.

    Parameters
    ----------
    n_samples
        Size of the largest micro-batch that passed.
    activation_bytes
        Memory of the activations of one sample; None until a sample has passed the model.
    ignores_padding
        Whether padding of sequences can be cut; None until it is known.
    """

    n_samples: int = 0
    activation_bytes: int | None = None
    ignores_padding: bool | None = None

    def measure(self, samples: Samples, forward: Forward) -> None:
        """Run the first two samples that the model can process, if that has not been done."""
        task = samples.job.model.task
        for start in range(0, len(samples), 2) if self.activation_bytes is None else ():
            two = samples.batch(slice(start, start + 2))
            try:
                self.ignores_padding = ignores_padding(forward, task, two)
                self.activation_bytes = activation_bytes(forward, task, two)
                return
            except Exception:  # their micro-batch raises it again, and is halved or reported then
                if samples.job.on_error == "raise":
                    return


@lru_cache(maxsize=64)
def checked_of(checked_as: str) -> Checked:
    """Return what this process has found out about a model, by ``Job.checked_as``."""
    return Checked()


class BlockCheck:
    """Checks the micro-batches of a block: wholly if larger than any before, else one sample.

    Parameters
    ----------
    checked
        What is known already; it is updated.
    samples
        The samples of the block.
    forward
        The model.
    rotations
        The coordinates of the gradients that are checked.
    """

    def __init__(
        self,
        checked: Checked,
        samples: Samples,
        forward: Forward,
        rotations: Rotations | None = None,
    ) -> None:
        self._checked, self._samples, self._forward = checked, samples, forward
        self._task, self._engine = samples.job.model.task, samples.job.engine
        self._names = samples.job.row_map.names
        self._rotations = rotations
        # Drawn from the place of the block, so that a task that runs again checks the same sample.
        draw = np.random.default_rng(int(samples.positions[0]))
        self._spot = int(draw.integers(len(samples)))
        self._is_whole = False

    def watched(self, part: slice, sink: Any) -> Any:
        """Return a sink that also adds up the gradients that this micro-batch is checked by."""
        n = part.stop - part.start
        # Decided here and not after the pass: meanwhile, other threads check micro-batches, too.
        self._is_whole = n > self._checked.n_samples
        if self._engine == "loop" or (isinstance(sink, Products) and self._engine == "tokens"):
            return sink
        if self._is_whole:
            return WeightedSum(sample_weights(self._forward, n), n, sink=sink)
        if part.start <= self._spot < part.stop:
            return WeightedSum(torch.ones(1), n, self._spot - part.start, sink)
        return sink

    def require_right(self, part: slice, sink: Any, block: Sequence[np.ndarray]) -> None:
        """Compare the results of a micro-batch, if it is one to be checked.

        Raises
        ------
        ModelError
            If f, Q or the gradient of a sample is another one in the batch than alone.
        """
        with _of_model(self._samples.positions[part]):
            if self._is_whole:
                self._require_whole(part, sink, block)
                self._checked.n_samples = max(self._checked.n_samples, part.stop - part.start)
            elif part.start <= self._spot < part.stop:
                self._require_spot(part, sink, block)

    def require_independent(self, rows: np.ndarray) -> None:
        """Compare two samples that ran alone so far with both in a batch.

        Micro-batches of one sample tell nothing about mixing, but those of other workers may be
        larger.
        """
        if self._checked.n_samples == 1 and len(rows) > 1:
            with _of_model(self._samples.positions[rows[:2]]):
                self._require_same_alone(self._samples.batch(rows[:2]))

    def _require_same_alone(self, batch: Batch, *values: Tensor) -> None:
        if self._engine == "loop" and reads_values(self._forward, self._task, batch):
            return  # the loop runs every sample alone then, for f and for Q
        if not values:
            with torch.no_grad():
                values = (
                    self._task.output(self._forward, batch),
                    self._task.out_to_loss(self._forward, batch),
                )
        require_same_alone(self._forward, self._task, batch, values[0], values[1])

    def _require_whole(self, part: slice, sink: Any, block: Sequence[np.ndarray]) -> None:
        batch = self._samples.batch(part)
        # Other engines take f of each sample alone.
        is_of_batch = self._engine in ("hooks", "tokens")
        self._require_same_alone(batch, *(map(torch.from_numpy, block[1:]) if is_of_batch else ()))
        if isinstance(sink, WeightedSum) and all(np.isfinite(array).all() for array in block):
            weights = sample_weights(self._forward, part.stop - part.start)
            expected, *_ = self._summed_gradient(batch, weights)
            require_same_sum(self._engine, sink.sums, expected)
        elif isinstance(sink, Products) and self._checked.n_samples == 0:
            few = self._samples.batch(slice(part.start, min(part.start + 2, part.stop)))
            require_same_as_loop(self._engine, self._forward, self._task, few, self._names)

    def _require_spot(self, part: slice, sink: Any, block: Sequence[np.ndarray]) -> None:
        row = self._spot - part.start
        if not all(np.isfinite(array[row]).all() for array in block):
            return
        one = self._samples.batch(slice(self._spot, self._spot + 1))
        expected, *alone = self._summed_gradient(one, torch.ones(1))
        if isinstance(sink, WeightedSum):
            require_same_sum(self._engine, sink.sums, expected, _ROUGHLY)
        output, out_to_loss = map(torch.from_numpy, block[1:])
        f, q = map(float, alone)
        in_batch = output, out_to_loss
        require_close(self._forward, row, in_batch, (f, q), _ROUGHLY)

    def _summed_gradient(
        self, batch: Batch, weights: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        expected, f, q = summed_gradient(self._forward, self._task, batch, self._names, weights)
        for name, matrices in (self._rotations or {}).items():
            flat = expected[name].reshape(1, -1)
            expected[name] = rotated(flat, tuple(expected[name].shape), matrices)[0]
        return expected, f, q


@contextmanager
def _of_model(positions: np.ndarray) -> Iterator[None]:
    """Make errors of a check errors of the model, which name the sample by its position."""
    try:
        yield
    except SampleError as err:
        raise ModelError(str(err.at(int(positions[err.row])))) from err
    except ValueError as err:
        raise ModelError(str(err)) from err
