"""One task of featurize: a block of samples at one checkpoint, in micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, current_thread, main_thread

import numpy as np
import torch

from trakdask.errors import BlockError
from trakdask.featurization.devices import device_of_task, on_device
from trakdask.featurization.memory import activation_bytes, available_bytes, on_worker
from trakdask.featurization.precision import Precision
from trakdask.models.checkpoints import Checkpoint
from trakdask.models.gradients import ENGINES, require_same_as_loop
from trakdask.models.model import Model
from trakdask.models.tasks import Batch, Forward
from trakdask.projection import ProjectionStream, Projector, RowMap
from trakdask.provenance import digest

__all__ = ["Block", "Job", "featurize_block"]

Block = tuple[np.ndarray, np.ndarray, np.ndarray]

_log = logging.getLogger(__name__)
_activation_bytes: dict[str, int] = {}  # of one sample, by what was checked in this process
_SHARE_OF_MEMORY = 0.5


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a task needs besides its block of samples; small when pickled."""

    model: Model
    projector: Projector
    row_map: RowMap
    engine: str
    batch_size: int
    fits_memory: bool
    """Whether a micro-batch may be smaller than ``batch_size`` where memory is short."""
    elements_at_once: int
    inputs: tuple[str, ...]
    precision: Precision
    device: str


def featurize_block(
    job: Job, index: np.ndarray, positions: np.ndarray, *arrays: np.ndarray
) -> Block:
    """Return feature, output and out_to_loss of a block of samples at one checkpoint."""
    checkpoint = job.model.checkpoints[int(index[0])]
    try:
        device = device_of_task(job.device)
        with _few_torch_threads(), job.precision.applied(device.type):
            return _featurize_samples(job, checkpoint, device, positions, arrays)
    except Exception as err:
        raise BlockError(
            f"samples {positions[0]}:{positions[-1] + 1} of checkpoint {checkpoint.name!r} failed: "
            f"{type(err).__name__}: {err}{_circumstances(job, arrays, err)}"
        ) from err


def _circumstances(job: Job, arrays: tuple[np.ndarray, ...], err: Exception) -> str:
    """Say what the model was given, where the error is torch's and not ours."""
    if isinstance(err, ValueError):
        return ""
    inputs = zip(job.inputs, arrays, strict=True)
    given = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in inputs)
    advice = (
        " Type gradients='loop' if the model cannot run under vmap." if "vmap" in str(err) else ""
    )
    return f"\nThe block's inputs were {given}.{advice}"


def _featurize_samples(
    job: Job,
    checkpoint: Checkpoint,
    device: torch.device,
    positions: np.ndarray,
    arrays: tuple[np.ndarray, ...],
) -> Block:
    n = len(positions)
    feature = np.empty((n, job.projector.width(job.row_map.n_rows), 1), np.float32)
    output, out_to_loss = np.empty((n, 1), np.float32), np.empty((n, 1), np.float32)
    forward = job.model.forward(checkpoint)
    if job.precision.dtype is not None:
        forward = forward.to(getattr(torch, job.precision.dtype))
    forward = on_device(forward, device)
    key = _check_once(job, forward, device, arrays)
    start, size = 0, _micro_batch(job, _activation_bytes[key], device)
    while start < n:
        part = slice(start, min(start + size, n))
        try:
            batch = _batch(job, arrays, part, device)
            found = _featurize_micro_batch(job, forward, checkpoint, device, batch)
        except RuntimeError as err:
            if size == 1 or not _is_out_of_memory(err):
                raise
            size = min(size, part.stop - start) // 2 or 1
            _log.warning("out of memory: going on with micro-batches of %d samples", size)
            continue
        feature[part, :, 0], output[part, 0], out_to_loss[part, 0] = found
        _require_finite(positions[part], checkpoint, feature[part], output[part], out_to_loss[part])
        start = part.stop
    return feature, output, out_to_loss


def _featurize_micro_batch(
    job: Job, forward: Forward, checkpoint: Checkpoint, device: torch.device, batch: Batch
) -> Block:
    n = len(next(iter(batch.values())))
    stream = ProjectionStream(job.projector, job.row_map, n, checkpoint.id, device)
    f, q = ENGINES[job.engine](forward, job.model.task, batch, job.row_map.names, stream.add)
    return stream.result().numpy(force=True), f.numpy(force=True), q.numpy(force=True)


def _micro_batch(job: Job, activations: int, device: torch.device) -> int:
    """Return the number of samples whose activations and gradients fit in the task's memory."""
    if not job.fits_memory:
        return job.batch_size
    width = job.projector.width(job.row_map.n_rows)
    beside = 4 * job.elements_at_once + 16 * width  # gradients; sums in float64 and their copies
    fits = max(1, int(_SHARE_OF_MEMORY * available_bytes(device)) // (activations + beside))
    if fits < job.batch_size:
        _log.info("memory is for micro-batches of %d samples, not %d", fits, job.batch_size)
    return min(job.batch_size, fits)


def _is_out_of_memory(err: RuntimeError) -> bool:
    """Tell it of CUDA, and of torch on a CPU, which has no error of its own for it."""
    return isinstance(err, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(err)


def _batch(job: Job, arrays: tuple[np.ndarray, ...], part: slice, device: torch.device) -> Batch:
    # Copied: torch refuses to share read-only memory, such as a memory-mapped file.
    inputs = zip(job.inputs, arrays, strict=True)
    return Batch({name: torch.tensor(array[part], device=device) for name, array in inputs})


def _check_once(
    job: Job, forward: Forward, device: torch.device, arrays: tuple[np.ndarray, ...]
) -> str:
    """Compare two samples with the loop, once per process, architecture, engine and device."""
    how = {"engine": job.engine, "device": str(device), **job.precision.attrs()}
    key = digest({**job.model.spec(), "checkpoints": job.model.token, "how": how})
    if key not in _activation_bytes:
        two, task = _batch(job, arrays, slice(0, 2), device), job.model.task
        if job.engine != "loop":
            require_same_as_loop(job.engine, forward, task, two, job.row_map.names)
        _activation_bytes[key] = activation_bytes(forward, task, two)
    return key


def _require_finite(positions: np.ndarray, checkpoint: Checkpoint, *arrays: np.ndarray) -> None:
    names = ("gradient", "output", "out_to_loss")
    for name, array in zip(names, arrays, strict=True):
        finite = np.isfinite(array).reshape(len(positions), -1).all(1)
        if not finite.all():
            bad = positions[~finite]
            more = f" and {len(bad) - 1} more of this batch" if len(bad) > 1 else ""
            raise ValueError(
                f"sample {bad[0]}{more}: the {name} at checkpoint {checkpoint.name!r} is NaN or "
                "infinite; needed finite numbers. Look at the sample with "
                f"samples.isel(sample={bad[0]}), or leave it out."
            )


_threads_lock = Lock()
_threads_inside = 0
_threads_before = 0


@contextmanager
def _few_torch_threads() -> Iterator[None]:
    """Give torch one thread while the threaded scheduler runs a task on every core.

    A distributed worker has its number from the environment (1 unless the user says otherwise), and
    a task on the main thread has the machine for itself.
    """
    global _threads_inside, _threads_before
    if current_thread() is main_thread() or on_worker():
        yield
        return
    with _threads_lock:
        if _threads_inside == 0:
            _threads_before = torch.get_num_threads()
        _threads_inside += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _threads_lock:
            _threads_inside -= 1
            if _threads_inside == 0:
                torch.set_num_threads(_threads_before)
