"""Run one task of featurize: a block of samples at one checkpoint, in micro-batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import current_thread, main_thread
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trakdask.arrays.weights import gram_weights, row_norms
from trakdask.errors import BlockError
from trakdask.execution import note_start
from trakdask.featurization.checks import Checked, CheckedEngine
from trakdask.featurization.devices import (
    applied,
    budget_bytes,
    current_worker,
    device_of_task,
    is_out_of_memory,
    on_device,
    states_bytes,
)
from trakdask.featurization.job import Block, BlockResults, Job, Samples, is_of_samples
from trakdask.models.checkpoints import Checkpoint, cache_states
from trakdask.models.curvature import (
    AxisProducts,
    Components,
    Curvature,
    Rotations,
    SquaredCoordinates,
    factors_by_name,
    rotations,
)
from trakdask.models.gradients import SAFER, Sink, out_to_loss_of
from trakdask.models.independence import once_per_task
from trakdask.models.kept_checkpoints import scales
from trakdask.models.tasks import Batch, Forward
from trakdask.projection import ProjectionStream
from trakdask.projection.leading import LeadingStream
from trakdask.torch_internals import few_threads, no_fast_path

_log = logging.getLogger(__name__)


def featurize_block(job: Job, weights: np.ndarray, start: np.ndarray, *arrays: np.ndarray) -> Block:
    """Return feature, its squared norm, output, out_to_loss (and error) of a block of samples."""
    checkpoint, moments, curvature, components = weights.item()
    with running(job, checkpoint, start, arrays) as samples:
        output = _projected(job, checkpoint, moments, curvature, components, samples.device)
        feature, *others = run_samples(samples, checkpoint, output)
        return feature, row_norms(feature), *others


def add_up_block(
    kind: type[AxisProducts | SquaredCoordinates],
    power: float | None,
    length: int,
    job: Job,
    weights: np.ndarray,
    start: np.ndarray,
    eigenvectors: np.ndarray | None,
    *arrays: np.ndarray,
) -> np.ndarray:
    """Return sums over a block, (1, length, 1) float64, with weights q^power (1 - q), or 1."""
    (checkpoint, *_), total = weights.item(), np.zeros(length)
    task, shapes = job.model.task, job.model.shapes
    with running(job, checkpoint, start, arrays) as samples:

        def open_stream(forward: Forward, batch: Batch) -> Stream:
            h = torch.ones(batch.size)
            if power is not None:  # a forward pass of its own, before the gradients
                q = out_to_loss_of(forward, task, batch).numpy(force=True)
                h = torch.tensor(gram_weights(q, power), dtype=torch.float32)
            return kind(shapes, h.to(samples.device), total)

        matrices = None
        if eigenvectors is not None:
            matrices = rotations(eigenvectors[:, 0], shapes, samples.device)
        run_samples(samples, checkpoint, Output(0, open_stream, matrices))
        if not np.isfinite(total).all():
            raise ValueError(
                "expected finite gradients for the curvature, got NaN or infinity; try "
                "td.featurize(samples, model, on_error='record'), which says in which samples"
            )
    return total[None, :, None]


class Stream(Sink, Protocol):
    """A sink of the gradients of a micro-batch, and what it makes of them."""

    def result(self) -> Tensor:
        """Return a row per sample, once all gradients have been received."""


@dataclass(frozen=True)
class Output:
    """What a task makes of gradients.

    Parameters
    ----------
    width
        Length of the rows of the results.
    open
        Returns a stream for a micro-batch.
    rotations
        The coordinates in which streams receive gradients.
    """

    width: int
    open: Callable[[Forward, Batch], Stream]
    rotations: Rotations | None = None


def scaling(
    job: Job, moments: Checkpoint | None, curvature: Curvature | None, device: torch.device
) -> tuple[Rotations | None, dict[str, Tensor]]:
    """Return the coordinates of gradients, and what each parameter's are multiplied by there."""
    shapes = job.model.shapes
    if curvature:
        matrices = rotations(curvature.eigenvectors, shapes, device)
        return matrices, factors_by_name(curvature, shapes, device)
    return None, scales(moments, job.row_map.names, device) if moments else {}


def _projected(
    job: Job,
    checkpoint: Checkpoint,
    moments: Checkpoint | None,
    curvature: Curvature | None,
    components: Components | None,
    device: torch.device,
) -> Output:
    """Project gradients, and reduce what was projected to its principal components."""
    matrices, factors = scaling(job, moments, curvature, device)
    components_matrix = torch.tensor(components.matrix, device=device) if components else None

    def open_stream(forward: Forward, batch: Batch) -> Stream:
        place = job.projector, job.row_map, batch.size, checkpoint.id, device
        stream: Stream = ProjectionStream(*place)
        if curvature:
            stream = LeadingStream(*place, curvature.leading)
        if factors:
            stream = _Scaled(stream, factors)
        return stream if components_matrix is None else _Reduced(stream, components_matrix)

    return Output(job.proj_dim, open_stream, matrices)


class _Scaled:
    """Multiplies gradients by the factors of their parameters, and passes them on."""

    def __init__(self, stream: Stream, factors: Mapping[str, Tensor]) -> None:
        self.result = stream.result
        self._stream, self._factors = stream, factors

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        start = first or 0
        factor = self._factors[name][start : start + gradient.shape[1]]
        self._stream(name, gradient * factor.to(gradient.dtype), first)


class _Reduced:
    """Passes gradients on, and multiplies what was made of them with principal components."""

    def __init__(self, stream: Stream, matrix: Tensor) -> None:
        self._stream, self._matrix = stream, matrix

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        self._stream(name, gradient, first)

    def result(self) -> Tensor:
        with torch.autocast(self._matrix.device.type, enabled=False):  # features are float32
            return self._stream.result() @ self._matrix


@contextmanager
def running(
    job: Job, checkpoint: Checkpoint, start: np.ndarray, arrays: tuple[np.ndarray, ...]
) -> Iterator[Samples]:
    """Give the samples of a task, whose errors say which samples they are."""
    positions = np.arange(start.item(), start.item() + len(arrays[0]))
    what = f"samples {positions[0]}:{positions[-1] + 1} of checkpoint {checkpoint.name!r}"
    note_start(what)
    cache_states(states_bytes())
    try:
        device = device_of_task(job.device)
        with _threads(), no_fast_path(), applied(job.torch_settings, device):
            yield Samples(job, positions, arrays, device)
    except Exception as err:
        raise BlockError(
            f"{what} failed: {type(err).__name__}: {err}"
            f"{_circumstances(job, checkpoint, arrays, err)}"
        ) from err


def _circumstances(
    job: Job, checkpoint: Checkpoint, arrays: tuple[np.ndarray, ...], err: Exception
) -> str:
    """Describe the inputs of the model, for errors that torch raised and not this package."""
    if isinstance(err, ValueError):
        return ""
    inputs = dict(zip(job.inputs, arrays, strict=True))
    shapes = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in inputs.items())
    if isinstance(err, RuntimeError) and "type" in str(err):  # which torch words in many ways
        weights, remedies = {job.torch_settings["dtype"]}, []
        floats = {str(array.dtype) for array in arrays if array.dtype.kind == "f"}
        if weights == {"as given"}:
            tensors = job.model.forward(checkpoint).parameters.values()
            weights = {str(t.dtype)[len("torch.") :] for t in tensors if t.is_floating_point()}
            remedies += ["dtype='float32'"] if (floats or {"float32"}) - weights else []
        if not floats:  # only these are cast
            first = job.inputs[0]
            cast = f"samples.assign({first}=samples[{first!r}].astype('float32'))"
            remedies.append(f"{cast}, unless these are ids")
        if remedies:
            return (
                f"\nThe weights are {' and '.join(sorted(weights))}, the inputs {shapes}; try "
                + " with ".join(remedies)
            )
    engines = f"{SAFER[job.engine]}, or " if job.engine in SAFER else ""
    return (
        f"\nThe inputs of the block were {shapes}; if the model itself runs, try {engines}"
        "a model of transformers that is built with attn_implementation='eager'"
    )


def run_samples(samples: Samples, checkpoint: Checkpoint, output: Output) -> Block:
    """Run the samples of a block in micro-batches, which are halved where memory runs out."""
    job, device = samples.job, samples.device
    forward = job.model.forward(checkpoint)
    if job.torch_settings["dtype"] != "as given":
        forward = forward.to(getattr(torch, job.torch_settings["dtype"]))
    forward = on_device(forward, device)
    given, (samples, places) = samples, samples.by_length()
    is_rotated, settings = output.rotations is not None, tuple(job.torch_settings.values())
    run_as = job.engine, job.row_map.names, settings, device, is_rotated
    first = samples.batch(slice(1))
    checked = once_per_task("checks", forward, job.model.task, first, run_as, Checked)
    if job.falls_back and checked.needs_vmap:
        return run_samples(given.by_vmap(), checkpoint, output)
    checked.measure(samples, forward)
    samples = replace(samples, trims=checked.ignores_padding)
    engine = CheckedEngine(checked, samples, forward, output.rotations)
    budget = budget_bytes(forward.parameters, device)
    size = _micro_batch(job, output.width, checked.activation_bytes, budget)

    def vmap_runs(part: slice) -> bool:  # all samples of a micro-batch that hooks failed for
        other = samples.by_vmap()
        size = _micro_batch(other.job, output.width, checked.activation_bytes, budget)
        once = CheckedEngine(Checked(), other, forward, None)
        try:
            for few in _slices(part.start, part.stop, size):
                once.run(few, other.batch(few), lambda *gradient: None)
        except Exception as err:  # that of the hooks is raised
            _log.info("vmap fails as well: %s", err)
            return False
        return True

    rows = BlockResults(samples, checkpoint, output.width)
    todo = _slices(0, len(samples), size)
    while todo:
        part = todo.pop()
        n = part.stop - part.start
        try:
            block = _run_micro_batch(samples, forward, part, output, engine)
        except Exception as err:
            if n > 1 and is_out_of_memory(err):
                _log.warning("out of memory: continuing with micro-batches of %d samples", n // 2)
                todo = _slices(part.start, len(samples), n // 2)
            elif job.falls_back and not checked.n_samples and vmap_runs(part):
                _log.warning("gradients by vmap, which is slower, because hooks failed: %s", err)
                checked.needs_vmap = True
                return run_samples(given, checkpoint, output)
            elif job.on_error == "raise" or not is_of_samples(err):
                raise samples.named(err, part) from err.__cause__
            elif n > 1:
                todo += _slices(part.start, part.stop, -(-n // 2))
            else:
                rows.fail(part.start, samples.named(err, part))
            continue
        rows.put(part, block)
    engine.require_independent(np.flatnonzero(np.isfinite(rows.arrays[1])))
    return tuple(array[places] for array in rows.result())


def _slices(start: int, stop: int, size: int) -> list[slice]:
    """Split rows into micro-batches, in reverse order, to be popped from a stack."""
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)][::-1]


def _run_micro_batch(
    samples: Samples, forward: Forward, part: slice, output: Output, engine: CheckedEngine
) -> Block:
    job, n, batch = samples.job, part.stop - part.start, samples.batch(part)
    stream = output.open(forward, batch)
    f, q = engine.run(part, batch, stream)
    feature = stream.result().numpy(force=True)
    if job.partition is not None:
        size = job.partition.of(batch).size
        products = feature.reshape(n, size, -1)
        feature = np.zeros(job.feature_shape(n, output.width), np.float32)
        n_tokens = size - job.partition.has_others
        feature[:, :n_tokens] = products[:, :n_tokens]  # those of padding, which was cut, are zero
        feature[:, feature.shape[1] - size + n_tokens :] = products[:, n_tokens:]
    return feature, f.numpy(force=True), q.numpy(force=True)


def _micro_batch(job: Job, width: int, activations: int | None, budget: int) -> int:
    """Return the number of samples whose activations and gradients fit in the budget.

    They are limited before anything runs out, because Linux promises a process more memory than
    there is, and kills it later; only GPUs raise an error, whereupon micro-batches are halved.
    """
    if activations is None:
        return job.batch_size
    # Besides activations: gradients, then float64 sums and copies of them.
    width = max(width, job.projector.width(job.row_map.n_rows))  # features may be reduced later
    others = 4 * job.elements_at_once + 16 * math.prod(job.feature_shape(1, width))
    fits = max(1, min(job.batch_size, budget // (activations + others)))
    if fits < job.batch_size:
        _log.info("micro-batches of %d samples instead of %d save memory", fits, job.batch_size)
    return fits


def _threads() -> AbstractContextManager[None]:
    """Limit torch to one thread while the threaded scheduler runs a task on every core.

    A distributed worker takes its number of threads from the environment (1 by default), and a task
    on the main thread can use all cores.
    """
    is_alone = current_thread() is main_thread() or current_worker() is not None
    return nullcontext() if is_alone else few_threads()
