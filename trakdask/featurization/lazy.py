"""The graph of featurize: samples and a model in, a lazy Dataset of projected gradients out."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args
from weakref import WeakValueDictionary

import dask.array as da
import numpy as np
import torch
import xarray as xr
from torch.nn.modules.batchnorm import _BatchNorm

from trakdask._version import __version__
from trakdask.execution.layers import feature_layer, featurize_layer
from trakdask.featurization.block import Block, featurize_block
from trakdask.featurization.devices import check_device
from trakdask.featurization.failures import ERROR_DTYPE, OnError
from trakdask.featurization.job import Job
from trakdask.featurization.memory import largest_memory
from trakdask.featurization.precision import DType, Precision
from trakdask.models.gradients import ENGINES, choose_engine, elements_at_once
from trakdask.models.model import Model
from trakdask.models.operations import count_operations
from trakdask.projection import Projector, Rademacher, RowMap
from trakdask.projection.memory import require_block_fits
from trakdask.provenance import EARLIER_SOURCE, digest
from trakdask.samples import lazy_variables, normalise_coord, source_of, validate_samples
from trakdask.variables import CHECKPOINT, SAMPLE, VARIABLES

__all__ = ["featurize", "model_operations"]

Gradients = Literal["auto", "hooks", "vmap", "loop"]

_jobs: WeakValueDictionary[str, Job] = WeakValueDictionary()
"""What each graph of this process does, by the name of its layer, as long as there is the graph."""

_log = logging.getLogger(__name__)

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
    device: str = "auto",
    on_error: OnError = "raise",
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
        selected parameters; what it took and why is in ``attrs``. Whatever the engine, each process
        checks two samples of its first block, and its largest micro-batch, for an f and a Q that
        are the same when a sample is alone, and compares the gradients of the two with the loop.
    batch_size
        Samples per micro-batch inside a task. ``"auto"`` holds the gradients of one in 256 MB (with
        hooks: those of the largest parameter in 64 MB, or 32 samples if that takes at most 1 GB;
        those of linear and embedding layers come in parts), at most 512 samples, and no more than
        fit in half of the memory that a task has, by the activations of two samples. No feature
        depends on it, given the same gradients. Where memory runs out, a micro-batch is halved.
    dtype
        Precision in which the model runs: weights, buffers and inputs that are floating point are
        cast to it. As they are unless given. Output and Q are float32 in any case. The task also
        runs under ``torch.autocast`` and ``torch.set_float32_matmul_precision`` as they are where
        featurize is called; all of it is in ``attrs``.
    device
        Where gradients are computed and projected. ``"auto"`` is the NVIDIA GPU of the worker that
        runs a task, if torch sees one and CuPy is installed (``pip install 'trakdask[cuda]'``),
        else its CPU; or ``"cpu"``, ``"cuda"``. One worker process per GPU, as of
        ``dask_cuda.LocalCUDACluster``. Results are in host memory. **Has not run on a GPU yet.**
    on_error
        What becomes of a sample whose output, gradient or Q is not finite, or at which the model
        raises an error (found by halving its micro-batch). ``"raise"``: the block fails.
        ``"record"``: all three are NaN at that checkpoint, ``error`` says why, and what follows
        leaves the sample out. Errors of files, memory and devices are raised in any case, as is one
        that every sample of a block (of two or more) raises: that is a mistake in the set-up.

    Returns
    -------
    Lazy Dataset with the samples' coords, a ``checkpoint`` coord, and float32 variables

    - ``feature`` (sample, proj_dim, checkpoint), chunks (sample block, proj_dim, 1);
    - ``output`` (sample, checkpoint): f itself;
    - ``out_to_loss`` (sample, checkpoint): Q, 1 - p for classification;
    - with ``on_error="record"``, ``error`` (sample, checkpoint): text, "" where all went well.
      :func:`open` shows it as a coord.

    Its ``attrs`` say how it was made.

    Raises
    ------
    TypeError, ValueError
        If the samples lack a variable that the task needs, the model normalises by statistics of
        the batch, the features of one block cannot fit in the memory of a worker, or an option does
        not make sense.
    BlockError
        When computed, with the samples and the checkpoint of whatever failed: labels that are out
        of range, inputs that a layer cannot take, gradients that are not finite, a model that mixes
        the samples of a batch (so that f and Q of a sample depend on the others).

    Notes
    -----
    One task per (sample block × checkpoint) makes all variables: compute them in one call, or
    better with :func:`save`, which keeps what is done. Memory of a task: inputs and features of one
    block, gradients of one micro-batch.

    Where workers with and without a GPU take part, the projection of the same gradients has the
    same bits (:class:`Kronecker` multiplies on the CPU of either). The gradients are those of
    torch, and differ by its rounding: on GPUs, it takes TF32 for convolutions unless told not to.
    ``attrs["device"]`` is what was asked for; each completion record in a store tells the device
    and the kernels. If workers declare ``resources={"GPU": 1}``, :func:`save` takes gradients on
    these alone. ``features.compute()`` cannot know of it: type
    ``features.compute(resources={"GPU": 1})``.

    References
    ----------
    Park et al. 2023, "TRAK: Attributing Model Behavior at Scale", section 3.

    Examples
    --------
    What failed, and why:

    >>> import numpy as np, torch, trakdask as td
    >>> x = np.ones((4, 2), "f4")
    >>> x[2] = np.inf
    >>> samples = td.from_arrays({"image": x, "label": np.zeros(4, int)})
    >>> model = td.Model(torch.nn.Linear(2, 3), task="image_classification")
    >>> features = td.featurize(samples, model, projector=td.Identity(), on_error="record")
    >>> error = features.error.isel(checkpoint=0).compute()
    >>> error[error != ""].values.tolist()
    ['the output is NaN or infinite']
    """
    if gradients not in ("auto", *ENGINES):
        raise ValueError(
            f"expected one of {['auto', *ENGINES]} as gradients, got {gradients!r}; try "
            "gradients='auto'."
        )
    if dtype not in (None, *get_args(DType)):
        raise ValueError(
            f"expected None or one of {get_args(DType)} as dtype, got {dtype!r}; try "
            "dtype='float32'."
        )
    if on_error not in get_args(OnError):
        raise ValueError(
            f"expected 'raise' or 'record' as on_error, got {on_error!r}; try on_error='record'."
        )
    if not isinstance(model, Model):
        raise TypeError(
            f"expected a td.Model as model, got {type(model).__name__}; try td.Model(build, "
            "checkpoints=[...], task=...)."
        )
    projector = _projector(projector)
    samples = validate_samples(samples)
    _require_running_statistics(model)
    row_map = RowMap.from_shapes(model.shapes, alignment=projector.row_alignment)
    projector = projector.bind(row_map)
    engine, reason = str(gradients), "as asked"
    if gradients == "auto":
        engine, reason = choose_engine(model.skeleton(), model.task, row_map.names)
    _log.info("gradients by %s: %s", engine, reason)
    inputs = _inputs(samples, model)
    block = max(next(iter(inputs.values())).chunks[0])
    require_block_fits(projector, row_map.n_rows, block, largest_memory())
    sizes = {name: row_map.size(name) for name in row_map.names}
    held = elements_at_once(engine, model.skeleton(), sizes)
    size = _batch_size(batch_size, engine, held)
    job = Job(
        model=model,
        projector=projector,
        row_map=row_map,
        engine=engine,
        batch_size=size,
        fits_memory=batch_size == "auto",
        elements_at_once=held,
        inputs={name: (array.shape[1:], array.dtype) for name, array in inputs.items()},
        precision=Precision.here(dtype),
        device=check_device(device),
        on_error=on_error,
    )
    attrs = {**_attrs(job, samples), "gradients_reason": reason}
    arrays = _lazy_arrays(job, inputs, token=_token(attrs, inputs))
    coords = {**samples.coords, CHECKPOINT: (CHECKPOINT, _checkpoint_names(model))}
    data = {n: (VARIABLES[n].dims, array, VARIABLES[n].attrs) for n, array in arrays.items()}
    return xr.Dataset(data, coords=coords, attrs=attrs)


def model_operations(features: xr.Dataset) -> int | None:
    """Return the operations of the passes through the model, per sample and checkpoint.

    None where features were not made lazily in this process, or where they cannot be counted.
    """
    data = features.feature.variable.data
    layers = data.dask.layers if isinstance(data, da.Array) else ()
    job = next((_jobs[name] for name in layers if name in _jobs), None)
    if job is None:
        return None
    model = job.model
    return count_operations(model.skeleton(), model.task, job.row_map.names, job.inputs)


def _projector(projector: Projector | None) -> Projector:
    if projector is None:
        return Rademacher(proj_dim=2048, seed=0)
    if isinstance(projector, type) or not isinstance(projector, Projector):
        found = projector.__name__ if isinstance(projector, type) else type(projector).__name__
        raise TypeError(
            f"expected a projector, got {found}; try projector=td.Rademacher(proj_dim=2048)."
        )
    return projector


def _require_running_statistics(model: Model) -> None:
    """Refuse batch normalisation by statistics of the batch: it mixes samples."""
    for path, module in model.skeleton().named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ValueError(
                "expected batch normalisation with running statistics, got layer "
                f"{path or type(module).__name__!r} with track_running_stats=False, which "
                "normalises by the other samples of a batch; try track_running_stats=True when "
                "the model is trained, or nn.GroupNorm."
            )


def _inputs(samples: xr.Dataset, model: Model) -> dict[str, da.Array]:
    """Lazy arrays of the task's variables, looked up among variables, then coords."""
    names = getattr(model.task, "variables", None) or tuple(map(str, samples.data_vars))
    if missing := [name for name in names if name not in samples]:
        raise ValueError(
            f"expected the variable {missing[0]!r}, which the task reads, got samples with the "
            f"variables {[str(name) for name in samples.variables]}; try samples.rename(...), or "
            "the task with its name, as in td.tasks.ImageClassification(image='pixels')."
        )
    coords = {name: samples[name].values for name in names if name in samples.coords}
    lazy = lazy_variables(coords, samples.chunksizes[SAMPLE][0]) if coords else {}
    return {name: lazy[name] if name in coords else samples[name].data for name in names}


def _batch_size(batch_size: int | Literal["auto"], engine: str, held: int) -> int:
    if batch_size == "auto":
        fits = _MICRO_BATCH_BYTES // (4 * max(held, 1))
        if engine == "hooks":
            # Beside gradients, autograd keeps the forward pass: most often more. Below 32 samples,
            # drawing the random matrix costs more than multiplying with it.
            fits = max(fits // 4, min(32, 4 * fits))
        return max(1, min(_MICRO_BATCH_MOST, fits))
    is_integer = isinstance(batch_size, int | np.integer) and not isinstance(batch_size, bool)
    if not is_integer or int(batch_size) < 1:
        raise ValueError(
            f"expected a positive integer or 'auto' as batch_size, got {batch_size!r}; try "
            "batch_size='auto'."
        )
    return int(batch_size)


def _attrs(job: Job, samples: xr.Dataset) -> dict[str, Any]:
    return {
        **job.model.spec(),
        "projector": job.projector.spec(),
        "batch_norm": any(isinstance(m, _BatchNorm) for m in job.model.skeleton().modules()),
        **_sources(job, samples),
        "gradients": job.engine,
        "batch_size": job.batch_size,
        **job.precision.attrs(),
        "device": job.device,
        "on_error": job.on_error,
        "formula": "feature = p^-1/2 P^T grad f",
        "trakdask_version": __version__,
        "torch_version": str(torch.__version__),
    }


def _sources(job: Job, samples: xr.Dataset) -> dict[str, str]:
    """Name the samples by what the model reads of them: metadata may change.

    Stores that were made before this was so are known by a name made from all numeric coords.
    """
    source, earlier = source_of(samples, job.inputs), samples.attrs["source"]
    return {"source": source} | ({EARLIER_SOURCE: earlier} if earlier != source else {})


def _checkpoint_names(model: Model) -> np.ndarray:
    names = [checkpoint.name for checkpoint in model.checkpoints]
    return normalise_coord(CHECKPOINT, names, len(names))


def _token(attrs: dict[str, Any], inputs: dict[str, da.Array]) -> str:
    """Name of the graph's layers: whatever could change a block must be in it."""
    arrays = {name: [array.name, [list(c) for c in array.chunks]] for name, array in inputs.items()}
    made = {name: value for name, value in attrs.items() if name != EARLIER_SOURCE}
    return digest({"attrs": made, "arrays": arrays})[:32]


def _lazy_arrays(job: Job, inputs: dict[str, da.Array], token: str) -> dict[str, da.Array]:
    """Build the graph: 1 one bundle per (sample block × checkpoint), 2 one getter per variable."""
    job = replace(job, token=token)
    _jobs[featurize_layer(token)] = job
    chunks = next(iter(inputs.values())).chunks[0]
    checkpoints = len(job.model.checkpoints)
    bundle = da.blockwise(
        functools.partial(featurize_block, job),
        "sc",
        da.from_array(np.arange(checkpoints), chunks=1, name=f"checkpoint-{token}"),
        "c",
        _positions(chunks, token),
        "s",
        *_indexed(inputs),
        name=featurize_layer(token),
        dtype=object,
        meta=np.empty((0, 0), dtype=object),
        concatenate=True,
        align_arrays=False,  # all chunks agree; aligning would warn about the outer product
    )
    width = job.projector.width(job.row_map.n_rows)
    feature = da.blockwise(
        _take, "spc", bundle, "sc", 0, None,
        new_axes={"p": width}, name=feature_layer(token),
        dtype=np.float32, meta=np.empty((0, 0, 0), np.float32),
    )  # fmt: skip
    others: dict[str, Any] = dict.fromkeys(("output", "out_to_loss"), np.dtype(np.float32))
    if job.on_error == "record":
        others["error"] = ERROR_DTYPE
    return {"feature": feature} | {
        name: da.blockwise(
            _take, "sc", bundle, "sc", item, None,
            name=f"{name}-{token}", dtype=dtype, meta=np.empty((0, 0), dtype),
        )
        for item, (name, dtype) in enumerate(others.items(), start=1)
    }  # fmt: skip


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
