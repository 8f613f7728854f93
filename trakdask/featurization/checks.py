"""Compare the results of an engine for samples in a batch with the results for samples alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from traceback import FrameSummary, extract_tb
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trakdask.errors import warn_once
from trakdask.featurization.devices import activation_bytes
from trakdask.featurization.job import BlockSamples, ModelError, is_of_engine, reason
from trakdask.models.gradients import (
    SAFER,
    WeightedSum,
    engine_of,
    require_per_sample,
    require_same_as_loop,
    require_same_sum,
    sample_weights,
    summed_gradient,
)
from trakdask.models.hooks import in_coordinates
from trakdask.models.independence import reads_values, require_close, require_same_alone
from trakdask.models.padding import ignores_padding
from trakdask.models.products import Products
from trakdask.models.tasks import Batch, Forward
from trakdask.models.tasks.protocol import SampleError, rejecting_later
from trakdask.tensors import Rotations

_log = logging.getLogger(__name__)

_ROUGHLY = 0.05
"""Relative error that one sample of a later block may have.

A mistake of an engine is of the size of the gradient itself. Rounding is not always small: of the
millions of units of a large model, one in a few blocks has an input so close to zero that its ReLU
is on in a batch and off for the sample alone.
"""


@dataclass
class Checked:
    """The findings of a thread about a model, run with some settings.

    Parameters
    ----------
    engines
        The engines that have not failed, of which the first one runs.
    n_samples
        Size of the largest micro-batch that passed by this engine.
    activation_bytes
        Memory of the activations of one sample; None until a sample has passed the model.
    ignores_padding
        Whether padding of sequences can be cut.
    """

    engines: tuple[str, ...]
    n_samples: int = 0
    activation_bytes: int | None = None
    ignores_padding: bool = False

    def measure(self, samples: BlockSamples, forward: Forward) -> None:
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


class CheckedEngine:
    """Runs the micro-batches of a block, and compares their gradients, f and Q with others.

    A micro-batch that is larger than any before is compared as a whole with one backward pass, and
    otherwise one sample of the block with the same sample alone.

    Parameters
    ----------
    checked
        The findings so far, which are updated.
    samples
        The samples of the block.
    forward
        The model.
    rotations
        The coordinates of gradients.
    """

    def __init__(
        self, checked: Checked, samples: BlockSamples, forward: Forward, rotations: Rotations | None
    ) -> None:
        self._checked, self._samples, self._forward = checked, samples, forward
        self._task, self._seconds = samples.job.model.task, 0.0
        self._names, self._rotations = samples.job.row_map.names, rotations
        # Drawn from the place of the block, so that a task that runs again checks the same sample.
        draw = np.random.default_rng(int(samples.positions[0]))
        self._spot = int(draw.integers(len(samples)))

    @property
    def _engine(self) -> str:
        return self._checked.engines[0]

    def run(self, part: slice, batch: Batch, stream: Any) -> tuple[Tensor, Tensor]:
        """Pass the gradients of a micro-batch to a stream, and return its f and Q.

        Raises
        ------
        ModelError
            If f, Q or the gradient of a sample is another one in the batch than alone.
        """
        # 1. The gradients, and their sum beside them.
        n, row = part.stop - part.start, self._spot - part.start
        is_whole, has_spot = n > self._checked.n_samples, 0 <= row < n
        weights = sample_weights(self._forward, n) if is_whole else torch.ones(1)
        weights = weights.to(self._samples.device)
        # Others are compared with the loop, and products of tokens are not gradients.
        has_sums = self._engine != "loop" and not self._multiplies_tokens(stream)
        sink = stream
        if has_sums and (is_whole or has_spot):
            sink = WeightedSum(weights, n, 0 if is_whole else row, stream)
        run, start = engine_of(self._engine), perf_counter()
        forward, names = self._forward, self._names
        f, q = run(forward, self._task, batch, names, sink, rotations=self._rotations)
        self._seconds += perf_counter() - start
        with _of_model(self._samples.positions[part]):
            # 2. A larger micro-batch than any before is compared as a whole.
            if is_whole:
                self._require_same_alone(batch, f, q)
                if has_sums and _are_finite(f, q, sink.sums):
                    expected, *_ = self._summed_gradient(batch, weights)
                    require_same_sum(self._engine, sink.sums, expected)
                elif self._multiplies_tokens(stream) and self._checked.n_samples == 0:
                    # Products are no gradients, so these are formed here, one for each token: of
                    # two samples, which show whether the terms of tokens add up, and whose they
                    # are.
                    few = Batch({name: value[:2] for name, value in batch.items()})
                    require_same_as_loop(self._engine, forward, self._task, few, names)
                self._checked.n_samples = n
            # 3. One sample of the block is compared with the same sample alone.
            elif has_spot:
                if self._engine == "loop":  # whose f and Q are of the sample alone
                    self._require_same_alone(batch)
                one = self._samples.batch(slice(self._spot, self._spot + 1))
                with rejecting_later(ever=False):  # nor was it in its batch
                    expected, *alone = self._summed_gradient(one, weights)
                if has_sums:
                    require_same_sum(self._engine, sink.sums, expected, _ROUGHLY)
                require_close(forward, row, (f, q), (alone[0][0], alone[1][0]), _ROUGHLY)
        return f, q

    def leave(self, part: slice, err: Exception, size_of: Callable[[str], int]) -> Exception | None:
        """Go on by the next engine that runs all samples of a micro-batch.

        Parameters
        ----------
        part, err
            The micro-batch, and the error that it has raised.
        size_of
            Returns the size of the micro-batches of an engine.

        Returns
        -------
        None, or the error to raise if there is no such engine: the one of the model itself.
        """
        # 1. Each further engine has to run the whole micro-batch, since any sample may be the
        # cause.
        first, errors = err, {self._engine: err}
        for i, name in enumerate(self._checked.engines[1:], 1) if is_of_engine(err) else ():
            try:
                seconds = self._seconds_of(name, part, size_of(name))
            except Exception as other:
                errors[name] = err = other
                continue
            # 2. Why it is another one, and how much slower it is, once in the log.
            why = {name: reason(each).partition("; try ")[0] for name, each in errors.items()}
            failed = " and ".join(f"{name} failed ({text})" for name, text in why.items())
            slower = ""
            with suppress(Exception):  # if the batch has a backward pass to compare with
                batch, start = self._samples.batch(part), perf_counter()
                self._summed_gradient(batch, sample_weights(self._forward, batch.size))
                ratio = seconds / (perf_counter() - start)
                slower = (
                    f", which takes {ratio:.2g} times as long as one backward pass of the batch"
                )
            text = f"gradients by {name}{slower}, because {failed}"
            warn_once(("gradients", self._samples.job.model.token, name), text, _log.warning)
            self._checked.engines, self._checked.n_samples = self._checked.engines[i:], 0
            return None
        # 3. No engine has run them, or none was allowed: an error, with a remedy if the loop runs
        # them.
        if len(errors) == 1 and self._engine in SAFER and is_of_engine(err):
            self._note_remedy(part, err, size_of("loop"))
        # Of one error of the model, the first one tells more: other engines have smaller batches.
        return first if _origin(first) == _origin(err) else err

    def _seconds_of(self, engine: str, part: slice, size: int) -> float:
        """Return how long an engine takes for a micro-batch, whose gradients are discarded."""
        # With findings of its own, so that it is compared as in the first micro-batch of a thread.
        once = CheckedEngine(Checked((engine,)), self._samples, self._forward, None)
        for start in range(part.start, part.stop, size):
            few = slice(start, min(start + size, part.stop))
            try:
                once.run(few, self._samples.batch(few), lambda *gradient: None)
            except SampleError as err:
                raise self._samples.named(err, few) from err.__cause__
        return once._seconds

    def _note_remedy(self, part: slice, err: Exception, size: int) -> None:
        """Say in an error of the only engine what to try, if this engine causes it."""
        if self._samples.job.on_error != "raise" or isinstance(err, ModelError):
            return
        with suppress(Exception):
            self._seconds_of("loop", part, size)
            # Other engines know no tokens.
            text, separator, _ = str(err).partition("; try gradients=")
            if separator and self._engine == "tokens":
                err.args = (text,)
            elif separator:
                return
            remedy = SAFER[self._engine]
            if self._engine == "vmap":
                remedy += ", or a model of transformers with attn_implementation='eager'"
            err.add_note(f"The loop runs these samples; try {remedy}")

    def require_independent(self, rows: np.ndarray) -> None:
        """Compare two samples that ran alone so far with both in a batch.

        Micro-batches of one sample tell nothing about mixing, but other workers may have larger
        ones.
        """
        if self._checked.n_samples == 1 and len(rows) > 1:
            with _of_model(self._samples.positions[rows[:2]]):
                self._require_same_alone(self._samples.batch(rows[:2]))

    def _multiplies_tokens(self, stream: Any) -> bool:
        return isinstance(stream, Products) and self._engine == "tokens"

    def _require_same_alone(self, batch: Batch, *values: Tensor) -> None:
        forward, task = self._forward, self._task
        # Alone, as in the loop, a sample may take another branch than in a batch. Who asks for the
        # loop wants that; who does not would not know.
        if self._samples.job.engines == ("loop",) and reads_values(forward, task, batch):
            return
        if self._engine == "loop":  # such that the model can differentiate itself here, too
            leaves = {n: forward.parameters[n].detach().requires_grad_() for n in self._names}
            forward = forward.with_parameters(leaves)
        if self._engine not in ("hooks", "tokens") or not values:  # which take f of the batch
            try:
                output = require_per_sample(task.output(forward, batch), batch.size, "output")
                values = output, task.out_to_loss(forward, batch)
            except Exception:
                if reads_values(forward, task, batch):
                    return  # it runs single samples only, and so mixes none
                raise
        require_same_alone(forward, task, batch, values[0].detach(), values[1].detach())

    def _summed_gradient(
        self, batch: Batch, weights: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        expected, f, q = summed_gradient(self._forward, self._task, batch, self._names, weights)
        turned = {
            name: in_coordinates(total.reshape(1, -1), name, self._forward, self._rotations)[0]
            for name, total in expected.items()
        }
        return turned, f, q


def _origin(err: Exception) -> list[FrameSummary]:
    """Return the line that has raised an error."""
    return extract_tb((err.__cause__ or err).__traceback__)[-1:]


def _are_finite(f: Tensor, q: Tensor, sums: Mapping[str, list[Tensor]]) -> bool:
    tensors = chain((f, q), *sums.values())
    return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())


@contextmanager
def _of_model(positions: np.ndarray) -> Iterator[None]:
    """Make errors of a check errors of the model, which name the sample by its position."""
    try:
        yield
    except SampleError as err:
        raise ModelError(str(err.at(int(positions[err.row])))) from err
    except ValueError as err:
        raise ModelError(str(err)) from err
