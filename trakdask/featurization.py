"""Samples and a model in, a lazy Dataset of projected per-sample gradients out."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, current_thread, main_thread
from typing import Any, Literal, get_args

import dask.array as da
import numpy as np
import torch
import xarray as xr
from distributed import get_worker

from trakdask._version import __version__
from trakdask.errors import BlockError
from trakdask.models.checkpoints import Checkpoint
from trakdask.models.gradients import ENGINES, choose_engine, require_same_as_loop
from trakdask.models.model import Model
from trakdask.models.tasks import Batch, Forward
from trakdask.projection import ProjectionStream, Projector, Rademacher, RowMap
from trakdask.provenance import digest
from trakdask.samples import lazy_variables, normalise_coord, validate_samples
from trakdask.variables import CHECKPOINT, SAMPLE, VARIABLES

__all__ = ["featurize"]

Gradients = Literal["auto", "hooks", "vmap", "loop"]
DType = Literal["float64", "float32", "bfloat16", "float16"]
Block = tuple[np.ndarray, np.ndarray, np.ndarray]

_log = logging.getLogger(__name__)
_engines_checked: set[str] = set()

_MICRO_BATCH_BYTES = 2**28
_MICRO_BATCH_MOST = 512


def featurize(
    samples: xr.Dataset,
    model: Model,
    *,
    projector: Projector | None = None,
    gradients: Gradients = "auto",
    batch_size: int | Literal["auto"] = "auto",
    dtype: DType | None = None,
) -> xr.Dataset:
    """Compute the projected gradient of the model output for every sample and checkpoint.

    φ_c(z) = p^-1/2 · P_cᵀ ∇_θ f(z; θ_c): the features of TRAK. The same call makes the features of
    training samples and of targets.

    Parameters
    ----------
    samples
        Dataset with a ``sample`` dimension, from :func:`from_arrays`, :func:`from_torch`,
        :func:`from_dataframe`, or any other: its variables are model inputs, its coords metadata (a
        coord that the task names is an input too).
    model
        What is attributed.
    projector
        ``Rademacher(proj_dim=2048, seed=0)`` unless given.
    gradients
        Engine of the per-sample gradients: ``"hooks"``, one batched backward pass in the memory of
        one layer; ``"vmap"``, ``torch.func`` on single samples; ``"loop"``, one backward pass per
        sample, for models that the others cannot run. ``"auto"`` takes hooks where they reach the
        selected parameters; what it took and why is in ``attrs``. The first block of a process
        compares two samples with the loop.
    batch_size
        Samples per micro-batch inside a task. ``"auto"`` holds the gradients of one in 256 MB (with
        hooks: those of the largest parameter in 64 MB, or 32 samples if that takes at most 1 GB),
        and at most 512 samples. No feature depends on it, given the same gradients. Where memory
        runs out, a micro-batch is halved.
    dtype
        Precision in which the model runs: weights, buffers and inputs that are floating point are
        cast to it. As they are unless given. Output and Q are float32 in any case.

    Returns
    -------
    Lazy Dataset with the samples' coords, a ``checkpoint`` coord, and float32 variables

    - ``feature`` (sample, proj_dim, checkpoint), chunks (sample block, proj_dim, 1);
    - ``output`` (sample, checkpoint): f itself;
    - ``out_to_loss`` (sample, checkpoint): Q, 1 - p for classification.

    Its ``attrs`` say how it was made.

    Raises
    ------
    ValueError
        If the samples lack a variable that the task needs, or an option does not make sense. When
        computed, :class:`BlockError` names samples and checkpoint of whatever failed, and any
        sample whose gradient is not finite.

    Notes
    -----
    One task per (sample block × checkpoint) makes all three variables: compute them in one call, or
    better with :func:`save`, which keeps what is done. Memory of a task: inputs and features of one
    block, gradients of one micro-batch.

    References
    ----------
    Park et al. 2023, "TRAK: Attributing Model Behavior at Scale", section 3.
    """
    if gradients not in ("auto", *ENGINES):
        raise ValueError(f"gradients is {gradients!r}; needed one of {['auto', *ENGINES]}.")
    if not isinstance(model, Model):
        raise TypeError(
            f"model is a {type(model).__name__}; needed a td.Model. "
            "Type td.Model(build, checkpoints=[...], task=...)."
        )
    projector = Rademacher(proj_dim=2048, seed=0) if projector is None else projector
    if isinstance(projector, type) or not isinstance(projector, Projector):
        found = projector.__name__ if isinstance(projector, type) else type(projector).__name__
        raise TypeError(
            f"projector is a {found}; needed a projector. Type td.Rademacher(proj_dim=2048)."
        )
    samples = validate_samples(samples)
    row_map = RowMap.from_shapes(model.shapes, alignment=projector.row_alignment)
    projector = projector.bind(row_map)
    engine, reason = str(gradients), "as asked"
    if gradients == "auto":
        engine, reason = choose_engine(model.skeleton(), model.task, row_map.names)
    _log.info("gradients by %s: %s", engine, reason)
    inputs = _inputs(samples, model)
    if dtype not in (None, *get_args(DType)):
        raise ValueError(f"dtype is {dtype!r}; needed None or one of {get_args(DType)}.")
    size = _batch_size(batch_size, engine, row_map)
    job = _Job(model, projector, row_map, engine, size, tuple(inputs), dtype)
    attrs = {**_attrs(job, samples), "gradients_reason": reason}
    arrays = _lazy_arrays(job, inputs, token=_token(attrs, inputs))
    coords = {**samples.coords, CHECKPOINT: (CHECKPOINT, _checkpoint_names(model))}
    data = {n: (VARIABLES[n].dims, array, VARIABLES[n].attrs) for n, array in arrays.items()}
    return xr.Dataset(data, coords=coords, attrs=attrs)


@dataclass(frozen=True)
class _Job:
    """What a task needs besides its block of samples; small when pickled."""

    model: Model
    projector: Projector
    row_map: RowMap
    engine: str
    batch_size: int
    inputs: tuple[str, ...]
    dtype: DType | None


def _inputs(samples: xr.Dataset, model: Model) -> dict[str, da.Array]:
    """Lazy arrays of the task's variables, looked up among variables, then coords."""
    names = getattr(model.task, "variables", None) or tuple(map(str, samples.data_vars))
    if missing := [name for name in names if name not in samples]:
        raise ValueError(
            f"the samples have the variables {[str(name) for name in samples.variables]}; the task "
            f"needs {missing[0]!r}. Name the variable so (samples.rename(...)), or give the task "
            "its name, as in td.tasks.ImageClassification(image='pixels')."
        )
    coords = {name: samples[name].values for name in names if name in samples.coords}
    lazy = lazy_variables(coords, samples.chunksizes[SAMPLE][0]) if coords else {}
    return {name: lazy[name] if name in coords else samples[name].data for name in names}


def _batch_size(batch_size: int | Literal["auto"], engine: str, row_map: RowMap) -> int:
    if batch_size == "auto":
        if engine != "hooks":  # the gradients of all parameters are held at once
            return max(1, min(_MICRO_BATCH_MOST, _MICRO_BATCH_BYTES // (4 * row_map.n_rows)))
        # One parameter's gradients are, and what autograd keeps of the forward pass: most often
        # more. Below 32 samples, drawing the random matrix costs more than multiplying with it.
        fits = _MICRO_BATCH_BYTES // (4 * max(map(row_map.size, row_map.names)))
        return max(1, min(_MICRO_BATCH_MOST, max(fits // 4, min(32, 4 * fits))))
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size!r}; needed a positive integer, or 'auto'.")
    return batch_size


def _attrs(job: _Job, samples: xr.Dataset) -> dict[str, Any]:
    return {
        **job.model.spec(),
        "projector": job.projector.spec(),
        "source": samples.attrs["source"],
        "gradients": job.engine,
        "batch_size": job.batch_size,
        "dtype": job.dtype or "as given",
        "formula": "feature = p^-1/2 P^T grad f",
        "trakdask_version": __version__,
        "torch_version": str(torch.__version__),
    }


def _checkpoint_names(model: Model) -> np.ndarray:
    names = [checkpoint.name for checkpoint in model.checkpoints]
    return normalise_coord(CHECKPOINT, names, len(names))


def _token(attrs: dict[str, Any], inputs: dict[str, da.Array]) -> str:
    """Name of the graph's layers: whatever could change a block must be in it."""
    arrays = {name: [array.name, [list(c) for c in array.chunks]] for name, array in inputs.items()}
    return digest({"attrs": attrs, "arrays": arrays})[:32]


def _lazy_arrays(job: _Job, inputs: dict[str, da.Array], token: str) -> dict[str, da.Array]:
    """Build the graph: 1 one bundle per (sample block × checkpoint), 2 one getter per variable."""
    chunks = next(iter(inputs.values())).chunks[0]
    checkpoints = len(job.model.checkpoints)
    bundle = da.blockwise(
        functools.partial(_featurize_block, job),
        "sc",
        da.from_array(np.arange(checkpoints), chunks=1, name=f"checkpoint-{token}"),
        "c",
        _positions(chunks, token),
        "s",
        *_indexed(inputs),
        name=f"featurize-{token}",
        dtype=object,
        meta=np.empty((0, 0), dtype=object),
        concatenate=True,
        align_arrays=False,  # all chunks agree; aligning would warn about the outer product
    )
    width = job.projector.width(job.row_map.n_rows)
    feature = da.blockwise(
        _take, "spc", bundle, "sc", 0, None,
        new_axes={"p": width}, name=f"feature-{token}",
        dtype=np.float32, meta=np.empty((0, 0, 0), np.float32),
    )  # fmt: skip
    output, out_to_loss = (
        da.blockwise(
            _take, "sc", bundle, "sc", item, None,
            name=f"{name}-{token}", dtype=np.float32, meta=np.empty((0, 0), np.float32),
        )
        for item, name in ((1, "output"), (2, "out_to_loss"))
    )  # fmt: skip
    return {"feature": feature, "output": output, "out_to_loss": out_to_loss}


def _indexed(inputs: dict[str, da.Array]) -> Iterator[Any]:
    for name, array in inputs.items():
        yield array
        yield ("s", *(f"{name}.{axis}" for axis in range(1, array.ndim)))


def _positions(chunks: tuple[int, ...], token: str) -> da.Array:
    """Position of every sample, made inside the tasks: errors must name the sample."""
    bounds = np.concatenate([[0], np.cumsum(chunks)])
    positions: da.Array = da.map_blocks(
        functools.partial(_range_of_block, bounds),
        chunks=(chunks,), name=f"position-{token}", dtype=np.int64, meta=np.empty(0, np.int64),
    )  # fmt: skip
    return positions


def _range_of_block(bounds: np.ndarray, block_id: tuple[int, ...]) -> np.ndarray:
    return np.arange(*bounds[block_id[0] : block_id[0] + 2])


def _take(bundle: Block, item: int) -> np.ndarray:
    return bundle[item]


def _featurize_block(
    job: _Job, index: np.ndarray, positions: np.ndarray, *arrays: np.ndarray
) -> Block:
    checkpoint = job.model.checkpoints[int(index[0])]
    try:
        with _few_torch_threads():
            return _featurize_samples(job, checkpoint, positions, arrays)
    except Exception as err:
        raise BlockError(
            f"samples {positions[0]}:{positions[-1] + 1} of checkpoint {checkpoint.name!r} failed: "
            f"{type(err).__name__}: {err}{_circumstances(job, arrays, err)}"
        ) from err


def _circumstances(job: _Job, arrays: tuple[np.ndarray, ...], err: Exception) -> str:
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
    job: _Job, checkpoint: Checkpoint, positions: np.ndarray, arrays: tuple[np.ndarray, ...]
) -> Block:
    n = len(positions)
    feature = np.empty((n, job.projector.width(job.row_map.n_rows), 1), np.float32)
    output, out_to_loss = np.empty((n, 1), np.float32), np.empty((n, 1), np.float32)
    forward = job.model.forward(checkpoint)
    if job.dtype is not None:
        forward = forward.to(getattr(torch, job.dtype))
    _check_engine(job, forward, arrays)
    start, size = 0, job.batch_size
    while start < n:
        part = slice(start, min(start + size, n))
        try:
            found = _featurize_micro_batch(job, forward, checkpoint, _batch(job, arrays, part))
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
    job: _Job, forward: Forward, checkpoint: Checkpoint, batch: Batch
) -> Block:
    n = len(next(iter(batch.values())))
    stream = ProjectionStream(job.projector, job.row_map, n, checkpoint.id)
    f, q = ENGINES[job.engine](forward, job.model.task, batch, job.row_map.names, stream.add)
    return stream.result().numpy(), f.numpy(), q.numpy()


def _is_out_of_memory(err: RuntimeError) -> bool:
    """Tell it of CUDA, and of torch on a CPU, which has no error of its own for it."""
    return isinstance(err, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(err)


def _batch(job: _Job, arrays: tuple[np.ndarray, ...], part: slice) -> Batch:
    # Copied: torch refuses to share read-only memory, such as a memory-mapped file.
    inputs = zip(job.inputs, arrays, strict=True)
    return Batch({name: torch.tensor(array[part]) for name, array in inputs})


def _check_engine(job: _Job, forward: Forward, arrays: tuple[np.ndarray, ...]) -> None:
    """Compare two samples with the loop, once per process, architecture and engine."""
    model = job.model
    key = digest({**model.spec(), "checkpoints": model.token, "how": (job.engine, job.dtype)})
    if job.engine != "loop" and key not in _engines_checked:
        names = job.row_map.names
        require_same_as_loop(
            job.engine, forward, job.model.task, _batch(job, arrays, slice(0, 2)), names
        )
        _engines_checked.add(key)


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


def _on_worker() -> bool:
    try:
        get_worker()
    except ValueError:
        return False
    return True


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
    if current_thread() is main_thread() or _on_worker():
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
