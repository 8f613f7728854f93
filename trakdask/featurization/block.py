"""Run one task of featurize: a block of samples at one checkpoint, in micro-batches."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from threading import Lock, current_thread, main_thread
from typing import Any

import numpy as np
import torch

from trakdask.arrays.weights import row_norms
from trakdask.bars import note_share
from trakdask.errors import BlockError
from trakdask.execution import at_work
from trakdask.featurization.checks import Checked, CheckedEngine
from trakdask.featurization.devices import (
    applied,
    budget_bytes,
    current_worker,
    device_of_task,
    is_out_of_memory,
    on_device,
    states_bytes,
    states_there,
)
from trakdask.featurization.job import BlockResults, BlockSamples, FeaturizeJob, is_of_samples
from trakdask.models.checkpoints import Checkpoint, cache_states
from trakdask.models.independence import once_per_task
from trakdask.models.loading import State
from trakdask.models.tasks import Batch, Forward
from trakdask.projection.maps import Maps, Stream
from trakdask.tensors import Rotations
from trakdask.torch_internals import few_threads, no_fast_path

_log = logging.getLogger(__name__)

# Tasks of one checkpoint end while those of the next begin, so two are in use at once. More would
# keep what is large, and may fill a GPU.
_MOST_MAPS = 2
_maps_there: dict[tuple[Any, ...], Maps] = {}
_lock = Lock()


def featurize_block(
    job: FeaturizeJob,
    item: np.ndarray,
    rows: tuple[slice],
    known: np.ndarray,
    *arrays: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Return feature, its squared norm, output, out_to_loss (and error) of a block of samples."""
    checkpoint, fit = item.item()
    (here,), (places, computed) = rows, known.item() or (np.empty(0, np.int64), None)
    # 1. The samples that no fit has computed: mostly all.
    others, results = np.setdiff1d(np.arange(here.stop - here.start), places), []
    if len(others):
        with running(job, checkpoint, rows, arrays) as samples:
            if computed is not None:
                some = tuple(array[others] for array in arrays)
                samples = replace(samples, positions=samples.positions[others], arrays=some)
            maps = _maps(job, checkpoint, fit, samples.device)
            sketch_width = job.projector.sketch_width(job.row_map.n_rows)
            of = samples, checkpoint, job.proj_dim, lambda _, batch: maps.open(batch.size)
            results = [*run_samples(*of, maps.rotations, sketch_width)]
    # 2. Between them, those that one has.
    if computed is not None:
        parts = computed[:, :-2, None], computed[:, -2:-1], computed[:, -1:]
        whole = [np.empty((len(others) + len(places), *part.shape[1:]), "f4") for part in parts]
        for array, part, result in zip(whole, parts, results or parts, strict=True):
            array[places] = part
            if len(others):
                array[others] = result
        results = whole
    feature, f, q, *error = results
    return feature, row_norms(feature), f, q, *error


def _maps(
    job: FeaturizeJob, checkpoint: Checkpoint, fit: Mapping[str, np.ndarray], device: torch.device
) -> Maps:
    """Return the steps of the projector; tasks of a process share what is on a device."""
    digest = job.projector.digests.get(checkpoint.name)
    make = partial(Maps, job.projector, job.row_map, checkpoint.id, fit, device)
    if device.type == "cpu" or digest is None:
        return make()
    key = device, digest, checkpoint.id, repr(job.projector), job.row_map.names
    with _lock:  # other threads wait for the same copy
        kept = _maps_there.pop(key, None) or make()
        _maps_there[key] = kept
        while len(_maps_there) > _MOST_MAPS:
            del _maps_there[next(iter(_maps_there))]
    return kept


@contextmanager
def running(
    job: FeaturizeJob, checkpoint: Checkpoint, rows: tuple[slice], arrays: tuple[np.ndarray, ...]
) -> Iterator[BlockSamples]:
    """Give the samples of a task, whose errors say which samples they are."""
    (here,) = rows
    what = f"samples {here.start}:{here.stop} of checkpoint {checkpoint.name!r}"
    cache_states(states_bytes())
    try:
        device = device_of_task(job.device)
        # The threaded scheduler runs a task on every core, with one thread of torch. A distributed
        # worker takes its number of threads from the environment (1 by default), and a task on the
        # main thread can use all cores.
        is_alone = current_thread() is main_thread() or current_worker() is not None
        with (
            at_work(what),
            torch.inference_mode(False),  # whatever the caller is in
            torch.enable_grad(),
            nullcontext() if is_alone else few_threads(),
            no_fast_path(),
            applied(job.torch_settings, device),
        ):
            yield BlockSamples(job, np.arange(here.start, here.stop), arrays, device, what)
    except Exception as err:
        raise BlockError(
            f"{what} failed: {type(err).__name__}: {err}{_circumstances(job, arrays, err)}"
        ) from err


def _circumstances(job: FeaturizeJob, arrays: tuple[np.ndarray, ...], err: Exception) -> str:
    """Describe the inputs of the model, unless this package raised the error, and advises."""
    notes = "".join(f"\n{note}" for note in getattr(err, "__notes__", ()))
    # By the innermost frame: errors of this package say what to try, and others do not.
    *_, (raising, _) = traceback.walk_tb(err.__traceback__)
    if raising.f_globals["__name__"].startswith("trakdask."):
        return notes
    inputs = dict(zip(job.inputs, arrays, strict=True))
    shapes = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in inputs.items())
    remedy = ""
    if isinstance(err, RuntimeError) and "type" in str(err):  # which torch words in many ways
        first = job.inputs[0]
        remedy = (
            f"; try samples.assign({first}=samples[{first!r}].astype('float32')) if these are no "
            "ids, or td.featurize(..., dtype='float32') if the weights have another dtype"
        )
    elif isinstance(err, RuntimeError | IndexError) and not notes:
        remedy = "; try inputs of the shape and range that the model was trained on"
    return f"\nThe inputs of the block were {shapes}{remedy}{notes}"


def _forward(job: FeaturizeJob, checkpoint: Checkpoint, device: torch.device) -> Forward:
    """Return the model at a checkpoint, in the precision and on the device of the job."""
    here, dtype = job.model.forward(checkpoint), job.torch_settings["dtype"]
    if dtype == "as given" and device.type == "cpu":
        return here
    kind, states = None if dtype == "as given" else getattr(torch, dtype), states_there(device)

    def moved() -> State:
        return on_device(here if kind is None else here.to(kind), device).tensors()

    if device.type != "cpu":  # where other weights are cached already, and casts are cheap
        states.most_bytes = states_bytes(device)
    state = dict(states.get(f"{job.model.token} {checkpoint.digest} {dtype}", moved))
    for name in here.reading.overwritten:  # by each call of the model
        state[name] = state[name].clone()
    groups = here.parameters, here.buffers, here.others
    parameters, buffers, others = ({name: state[name] for name in group} for group in groups)
    return replace(here, parameters=parameters, buffers=buffers, others=others, dtype=kind)


def run_samples(
    samples: BlockSamples,
    checkpoint: Checkpoint,
    width: int,
    open_stream: Callable[[Forward, Batch], Stream],
    rotations: Rotations | None = None,
    sketch_width: int = 0,
) -> tuple[np.ndarray, ...]:
    """Run the samples of a block in micro-batches, which are halved where memory runs out.

    A micro-batch that the engine cannot run, or runs wrong, goes to the next of the engines, which
    then stays.

    Parameters
    ----------
    samples, checkpoint
        The samples, and the weights of the model.
    width
        Length of the rows of the results.
    open_stream
        Returns the stream that makes them of the gradients of a micro-batch.
    rotations
        The coordinates in which streams receive gradients.
    sketch_width
        Columns that streams hold for each sample before they reduce them to ``width``.

    Returns
    -------
    Features (sample, width, 1), output and out_to_loss (sample, 1), float32, and errors (sample, 1)
    if failures are recorded.
    """
    job, device = samples.job, samples.device
    # 1. The model here, and the samples with the longest sequences first.
    forward = _forward(job, checkpoint, device)
    samples, places = samples.by_length()
    # 2. What this thread has found out about the model under the same settings, or finds out now.
    settings = *job.torch_settings.values(), rotations is not None
    run_as, find = (job.engines, job.row_map.names, settings, device), partial(Checked, job.engines)
    first = samples.batch(slice(1))
    checked = once_per_task("checks", forward, job.model.task, first, run_as, find)
    checked.measure(samples, forward)
    samples = replace(samples, trims=checked.ignores_padding)
    engine = CheckedEngine(checked, samples, forward, rotations)
    # 3. Micro-batches that fit in memory, as a stack: one that fails is put back in smaller ones.
    budget = budget_bytes(forward.parameters, device)
    size_of = partial(_micro_batch, job, max(width, sketch_width), checked.activation_bytes, budget)
    rows = BlockResults(samples, checkpoint, width)
    run_part = partial(_run_micro_batch, samples, width, partial(open_stream, forward), engine)
    todo = _slices(0, len(samples), size_of(checked.engines[0]))
    while todo:
        part = todo.pop()
        n = part.stop - part.start
        try:
            block = run_part(part)
        except Exception as err:
            fault: Exception | None = err
            if n > 1 and is_out_of_memory(err):
                _log.warning("out of memory: continuing with micro-batches of %d samples", n // 2)
                todo = _slices(part.start, len(samples), n // 2)
                continue
            # Where samples may be at fault, an engine that has run others is left for one of them.
            if job.on_error == "raise" or not is_of_samples(err) or n == 1 or not checked.n_samples:
                fault = engine.leave(part, err, size_of)
            if fault is None:
                todo = _slices(part.start, len(samples), size_of(checked.engines[0]))
            elif job.on_error == "raise" or not is_of_samples(fault):
                raise samples.named(fault, part) from fault.__cause__
            elif n > 1:
                todo += _slices(part.start, part.stop, -(-n // 2))
            else:
                rows.fail(part.start, samples.named(fault, part))
            continue
        rows.put(part, block)
        if job.counted_as:
            note_share(job.counted_as, samples.what, part.stop / len(samples))
    # 4. A block that ran one by one is compared with a batch; results are put in their old order.
    engine.require_independent(np.flatnonzero(np.isfinite(rows.arrays[1])))
    return tuple(array[places] for array in rows.result())


def _slices(start: int, stop: int, size: int) -> list[slice]:
    """Split rows into micro-batches, in reverse order, to be popped from a stack."""
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)][::-1]


def _run_micro_batch(
    samples: BlockSamples,
    width: int,
    open_stream: Callable[[Batch], Stream],
    engine: CheckedEngine,
    part: slice,
) -> tuple[np.ndarray, ...]:
    job, n, batch = samples.job, part.stop - part.start, samples.batch(part)
    stream = open_stream(batch)
    f, q = engine.run(part, batch, stream)
    feature = stream.result().numpy(force=True)
    if job.partition is not None:
        size = job.partition.of(batch).size
        # (sample, part of this batch, vector)
        products = feature.reshape(n, size, -1)
        feature = np.zeros(job.feature_shape(n, width), np.float32)
        n_tokens = size - job.partition.has_others
        feature[:, :n_tokens] = products[:, :n_tokens]  # padding was cut, and has zeros
        feature[:, feature.shape[1] - size + n_tokens :] = products[:, n_tokens:]
    return feature, f.numpy(force=True), q.numpy(force=True)


def _micro_batch(
    job: FeaturizeJob, width: int, activations: int | None, budget: int, engine: str
) -> int:
    """Return the number of samples whose activations and gradients fit in the budget.

    They are limited before anything runs out, because Linux promises a process more memory than
    there is, and kills it later; only GPUs raise an error, whereupon micro-batches are halved.
    """
    if activations is None:
        return job.batch_size
    # Besides activations: gradients, then float64 sums and copies of them.
    is_first = engine == job.engines[0]
    held = job.elements_at_once if is_first else job.row_map.n_parameters
    others = 4 * held + 16 * math.prod(job.feature_shape(1, width))
    fits = max(1, min(job.batch_size, budget // (activations + others)))
    if fits < job.batch_size:
        _log.info("micro-batches of %d samples instead of %d save memory", fits, job.batch_size)
    return fits
