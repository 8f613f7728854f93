"""Run one task of featurize: a block of samples at one checkpoint, in micro-batches."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from threading import current_thread, main_thread
from typing import Any

import numpy as np
import torch

from trakdask.arrays.weights import row_norms
from trakdask.errors import BlockError
from trakdask.execution.scheduling import note_start
from trakdask.featurization.checks import BlockCheck, checked_of
from trakdask.featurization.devices import (
    budget_bytes,
    described,
    device_of_task,
    is_out_of_memory,
    on_device,
    on_worker,
    states_bytes,
)
from trakdask.featurization.failures import Block, BlockResults, is_of_samples
from trakdask.featurization.job import Job, Samples
from trakdask.featurization.streams import Sink, Streams, Sums
from trakdask.models.checkpoints import Checkpoint, cache_states
from trakdask.models.curvature import (
    AxisProducts,
    SquaredCoordinates,
    factors_of,
    rotations,
    whole,
)
from trakdask.models.gradients import engine_of
from trakdask.models.tasks import Forward
from trakdask.models.torch_internals import few_threads, no_fast_path

__all__ = ["featurize_block", "multiply_block"]

_log = logging.getLogger(__name__)


def featurize_block(
    job: Job, weights: np.ndarray, start: np.ndarray, *arrays: np.ndarray
) -> tuple[Any, ...]:
    """Return feature, its squared norm, output and out_to_loss (and error) of a block of samples.

    And last a mapping that says on what device, and by what kernels, they were computed.
    """
    checkpoint, moments, curvature = weights.item()
    with _task(job, checkpoint, start, arrays) as samples:
        samples = replace(samples, moments=moments, curvature=curvature)
        feature, *others = _featurize_samples(samples, checkpoint)
        return feature, row_norms(feature), *others, described(samples.device)


def multiply_block(
    job: Job, weights: np.ndarray, start: np.ndarray, vectors: np.ndarray, *arrays: np.ndarray
) -> Block:
    """Return products of gradients with vectors (vector, row, 1), in the place of features.

    Otherwise as :func:`featurize_block`. Products with a vector that is not finite are NaN.
    """
    (checkpoint, *_), flat = weights.item(), torch.tensor(vectors[..., 0])
    is_finite = flat.isfinite().all(1)
    flat[~is_finite] = 0  # so that samples, which share the pass, are not taken for the cause
    with _task(job, checkpoint, start, arrays) as samples:
        rows = job.row_map
        by_name = {
            name: flat[:, rows.offset(name) : rows.offset(name) + rows.size(name)]
            .unflatten(1, rows.shape(name) or (1,))
            .to(samples.device)
            for name in rows.names
        }
        products, *others = _featurize_samples(replace(samples, vectors=by_name), checkpoint)
    products[..., ~is_finite.numpy(), :] = np.nan
    return products, *others


def axis_products(
    job: Job, power: float | None, weights: np.ndarray, start: np.ndarray, *arrays: np.ndarray
) -> np.ndarray:
    """Return Σ h M Mᵀ of every axis over a block of samples, (1, entry, 1) float64."""
    shapes = job.model.shapes
    length = max((place.stop for *_, place in factors_of(shapes)), default=0)

    def collect(h: torch.Tensor, sums: np.ndarray) -> Sink:
        return whole(shapes, AxisProducts(shapes, h, sums))

    return _summed(job, weights, start, arrays, Sums(np.zeros(length), collect, power))


def squared_coordinates(
    job: Job,
    power: float | None,
    weights: np.ndarray,
    start: np.ndarray,
    eigenvectors: np.ndarray,
    *arrays: np.ndarray,
) -> np.ndarray:
    """Return Σ h g² of every coordinate over a block of samples, (1, coordinate, 1) float64."""
    shapes = job.model.shapes
    total = np.zeros(job.row_map.n_parameters)
    matrices = rotations(eigenvectors[:, 0], shapes, device_of_task(job.device))
    collect = functools.partial(SquaredCoordinates, shapes)
    return _summed(job, weights, start, arrays, Sums(total, collect, power, matrices))


def _summed(
    job: Job, weights: np.ndarray, start: np.ndarray, arrays: tuple[np.ndarray, ...], sums: Sums
) -> np.ndarray:
    checkpoint, *_ = weights.item()
    with _task(job, checkpoint, start, arrays) as samples:
        _featurize_samples(replace(samples, keeps_rows=False), checkpoint, sums)
        if not np.isfinite(sums.total).all():
            raise ValueError(
                "expected finite gradients for the curvature, got NaN or infinity; try "
                "td.featurize(samples, model, on_error='record'), which says in which samples"
            )
    return sums.total[None, :, None]


@contextmanager
def _task(
    job: Job, checkpoint: Checkpoint, start: np.ndarray, arrays: tuple[np.ndarray, ...]
) -> Iterator[Samples]:
    """Give the samples of a task, whose errors say which samples they are."""
    positions = np.arange(start.item(), start.item() + len(arrays[0]))
    what = f"samples {positions[0]}:{positions[-1] + 1} of checkpoint {checkpoint.name!r}"
    note_start(what)
    cache_states(states_bytes())
    try:
        device = device_of_task(job.device)
        with _threads(), no_fast_path(), job.precision.applied(device.type):
            yield Samples(job, positions, arrays, device)
    except Exception as err:
        raise BlockError(
            f"{what} failed: {type(err).__name__}: {err}{_circumstances(job, arrays, err)}"
        ) from err


def _circumstances(job: Job, arrays: tuple[np.ndarray, ...], err: Exception) -> str:
    """Describe the inputs of the model, for errors that torch raised and not this package."""
    if isinstance(err, ValueError):
        return ""
    inputs = zip(job.inputs, arrays, strict=True)
    given = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in inputs)
    advice = "" if job.engine == "loop" else "; if the model itself runs, try gradients='loop'"
    return f"\nThe inputs of the block were {given}{advice}"


def _featurize_samples(samples: Samples, checkpoint: Checkpoint, sums: Sums | None = None) -> Block:
    job, device = samples.job, samples.device
    forward = job.model.forward(checkpoint)
    if job.precision.dtype is not None:
        forward = forward.to(getattr(torch, job.precision.dtype))
    forward = on_device(forward, device)
    samples, places = samples.by_length()
    checked = checked_of(job.checked_as)
    checked.measure(samples, forward)
    samples = replace(samples, trims=bool(checked.ignores_padding))
    streams = Streams(samples, forward, checkpoint, sums)
    check = BlockCheck(checked, samples, forward, streams.rotations)
    size = _micro_batch(samples, checked.activation_bytes, budget_bytes(forward.parameters, device))
    rows = BlockResults.empty(samples, checkpoint)
    todo = _slices(0, len(samples), size)
    while todo:
        part = todo.pop()
        n = part.stop - part.start
        try:
            block = _featurize_micro_batch(samples, forward, part, streams, check)
        except Exception as err:
            if n > 1 and is_out_of_memory(err):
                _log.warning("out of memory: continuing with micro-batches of %d samples", n // 2)
                todo = _slices(part.start, len(samples), n // 2)
            elif job.on_error == "raise" or not is_of_samples(err):
                raise samples.named(err, part) from err.__cause__
            elif n > 1:
                todo += _slices(part.start, part.stop, -(-n // 2))
            else:
                rows.fail(part.start, samples.named(err, part))
            continue
        rows.put(part, block)
    check.require_independent(np.flatnonzero(np.isfinite(rows.output)))
    return tuple(array[places] for array in rows.result())


def _slices(start: int, stop: int, size: int) -> list[slice]:
    """Split rows into micro-batches, in reverse order, to be popped from a stack."""
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)][::-1]


def _featurize_micro_batch(
    samples: Samples,
    forward: Forward,
    part: slice,
    streams: Streams,
    check: BlockCheck,
) -> Block:
    job, n = samples.job, part.stop - part.start
    run, batch = engine_of(job.engine), samples.batch(part)
    stream, sink = streams.open(batch)
    sink = check.watched(part, sink)
    f, q = run(forward, job.model.task, batch, job.row_map.names, sink, streams.rotations)
    feature = stream.result().numpy(force=True)
    if job.partition is not None:
        size = job.partition.of(batch).size
        products = feature.reshape(n, size, -1)
        feature = np.zeros(samples.feature_shape(n), np.float32)
        feature[:, :size] = products  # those of padding, which was cut, are zero
    block = feature, f.numpy(force=True), q.numpy(force=True)
    check.require_right(part, sink, block)
    return block


def _micro_batch(samples: Samples, activations: int | None, budget: int) -> int:
    """Return the number of samples whose activations and gradients fit in the budget.

    They are limited before anything runs out, because Linux promises a process more memory than
    there is, and kills it later; only GPUs raise an error, whereupon micro-batches are halved.
    """
    job = samples.job
    if activations is None:
        return job.batch_size
    # Besides activations: gradients, then float64 sums and copies of them.
    others = 4 * job.elements_at_once + 16 * samples.width * job.rows_of_sample
    fits = max(1, min(job.batch_size, budget // (activations + others)))
    if fits < job.batch_size:
        _log.info("micro-batches of %d samples instead of %d save memory", fits, job.batch_size)
    return fits


def _threads() -> AbstractContextManager[None]:
    """Limit torch to one thread while the threaded scheduler runs a task on every core.

    A distributed worker takes its number of threads from the environment (1 by default), and a task
    on the main thread can use all cores.
    """
    is_alone = current_thread() is main_thread() or on_worker()
    return nullcontext() if is_alone else few_threads()
