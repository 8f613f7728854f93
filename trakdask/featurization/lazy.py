"""Build the graph of featurize: a lazy Dataset of projected gradients of samples."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Literal, get_args

import dask
import dask.array as da
import numpy as np
import torch
import xarray as xr
from dask.base import tokenize
from distributed.system import MEMORY_LIMIT

from trakdask._version import __version__
from trakdask.arrays.blocks import take
from trakdask.checks import require_choice, require_integer, shown
from trakdask.execution import active_client, workers_of
from trakdask.featurization.block import add_up_block, featurize_block
from trakdask.featurization.job import ERROR_DTYPE, DType, Job, OnError, Partition
from trakdask.models.curvature import AxisProducts, SquaredCoordinates, eigenvectors_of, factors_of
from trakdask.models.gradients import ENGINES
from trakdask.models.layers import choose_engine, elements_at_once
from trakdask.models.model import Model
from trakdask.models.tasks import task_spec
from trakdask.projection import SJLT, Projector, RowMap
from trakdask.projection.leading import n_leading
from trakdask.projection.protocol import from_spec, require_block_fits
from trakdask.provenance import DEFAULTS, digest
from trakdask.samples import lazy_variables, normalise_coord, source_of, validate_samples
from trakdask.variables import CHECKPOINT, SAMPLE, VARIABLES

Gradients = Literal["auto", "hooks", "vmap", "loop"]
Arrays = dict[str, da.Array]
Divide = Callable[[Model, Arrays], Partition]

_log = logging.getLogger(__name__)

_DEFAULT = SJLT(proj_dim=2048, seed=0)
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")

_FORMULAS = {
    (False, False): "feature = p^-1/2 P^T grad f",
    (True, False): "feature = p^-1/2 P^T D grad f, D = (sqrt(v) + 1e-8)^-1/2 with Adam's second "
    "moments v",
    (False, True): "feature = [leading | q^-1/2 P^T others] of (L + d mean(L))^-1/2 U^T grad f, "
    "with eigenvalues L and eigenvectors U of the curvature; leading coordinates are the first "
    "half of the columns",
}
"""By whether there are second moments, and whether there is a curvature."""
_MICRO_BATCH_BYTES = 2**28
_MICRO_BATCH_MOST = 256


@dataclass(frozen=True)
class Prepared:
    """What a graph is built from: all that is known before anything runs."""

    job: Job
    inputs: Arrays
    attrs: dict[str, Any]
    coords: dict[Hashable, Any]

    @cached_property
    def token(self) -> str:
        """Name of the graph's layers: a digest of everything that could change a block."""
        arrays = {
            name: [array.name, [list(sizes) for sizes in array.chunks]]
            for name, array in self.inputs.items()
        }
        return digest({"attrs": self.attrs, "arrays": arrays})[:32]

    @property
    def rows(self) -> tuple[int, ...]:
        """Number of samples of each block."""
        rows: tuple[int, ...] = next(iter(self.inputs.values())).chunks[0]
        return rows


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

    φ_c(z) = p^-1/2 · P_cᵀ ∇_θ f(z; θ_c): the features of TRAK. Use the same call for training
    samples and for targets.

    Parameters
    ----------
    samples
        Dataset with a ``sample`` dimension, from :func:`from_arrays`, :func:`from_torch`,
        :func:`from_dataframe`, or any other. Its variables are model inputs and its coords are
        metadata (a coord that the task names is an input, too).
    model
        The model whose outputs are attributed.
    projector
        ``SJLT(proj_dim=2048, seed=0)`` by default: four random signs per gradient element. For
        another size of the features, ``td.SJLT(proj_dim=4096)``.
    gradients
        Engine of the per-sample gradients: ``"hooks"``, one batched backward pass in the memory of
        one layer; ``"vmap"``, ``torch.func`` on single samples; ``"loop"``, one backward pass per
        sample, for models that the others cannot run. ``"auto"`` chooses hooks if they can handle
        a selected parameter; the choice and the reason for it are in ``attrs``. Each thread checks
        the gradients of its first (and of any larger) micro-batch by a random weighted sum, which
        one plain backward pass gives, too. Of every later block, it compares f, Q and the gradient
        of one sample with those of the sample alone, which costs a backward pass of one sample.
    batch_size
        Most samples per micro-batch inside a task. With ``"auto"`` the gradients of a micro-batch
        fit in 256 MB (with hooks: those of the largest parameter fit in 64 MB, or it has 32 samples
        if that takes at most 1 GB; gradients of linear and embedding layers are computed in
        slices), it has at most 256 samples.
        Activations, measured on two samples, and gradients of a micro-batch always fit in half of
        the memory of a task and, on a CPU, in 96 MiB or, for large models, in 8 times the size of
        the weights. The batch size does not change features, given the same gradients.
        If memory runs out, the micro-batch is halved.
    dtype
        Precision in which the model runs: floating-point weights, buffers and inputs are cast to
        it. By default they are used as they are. Output and Q are always float32. Tasks also use
        the settings of ``torch.autocast`` and ``torch.set_float32_matmul_precision`` that are
        active where featurize is called. All of these are recorded in ``attrs``.
    device
        Device on which gradients are computed and projected: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        ``"auto"`` is the NVIDIA GPU of the worker that runs a task, if torch sees one and CuPy is
        installed (``pip install 'trakdask[cuda]'``), else its CPU. Start one worker process per
        GPU, as ``dask_cuda.LocalCUDACluster`` does. Results are in host memory. **This has not run
        on a GPU yet.**
    on_error
        What to do with a sample whose output, gradient or Q is not finite, or for which the model
        raises an error (located by halving its micro-batch). ``"raise"``: the block fails.
        ``"record"``: all three are NaN at that checkpoint, ``error`` states the reason, and later
        computations leave the sample out. Errors of files, memory and devices are always raised,
        and so is an error of every sample of a block of two or more, which indicates a mistake in
        the setup.

    Returns
    -------
    Lazy Dataset with the samples' coords, a ``checkpoint`` coord, and float32 variables

    - ``feature`` (sample, proj_dim, checkpoint), chunks (sample block, proj_dim, 1);
    - ``feature_norm`` (sample, checkpoint): ‖φ‖², float64, large for outliers; scores compare it
      with the features before they use the gram matrix of a store;
    - ``output`` (sample, checkpoint): f itself;
    - ``out_to_loss`` (sample, checkpoint): Q, 1 - p for classification;
    - with ``on_error="record"``, ``error`` (sample, checkpoint): text, "" for samples that
      did not fail. :func:`open` returns it as a coord.

    Its ``attrs`` record how it was computed.

    Raises
    ------
    TypeError, ValueError
        If the samples lack a variable that the task needs, the features of one block cannot fit in
        the memory of a worker, or an option is invalid.
    BlockError
        When computed, naming the samples and the checkpoint that failed: labels that are out of
        range, inputs that a layer cannot process, gradients that are not finite, or a model that
        mixes the samples of a batch (so that f and Q of a sample depend on the others).

    Notes
    -----
    One task per (sample block × checkpoint) computes all variables, so compute them in one call, or
    better with :func:`save`, which stores every finished block. Memory of a task: inputs and
    features of one block, and gradients of one micro-batch.

    If some workers have a GPU and others do not, the projection of equal gradients has the same
    bits on both (:class:`Kronecker` multiplies on the CPU in either case). The gradients themselves
    come from torch and differ by rounding: on GPUs, torch uses TF32 for convolutions by default.
    ``attrs["device"]`` is the device that was requested. If workers declare
    ``resources={"GPU": 1}``, :func:`save` computes gradients only on these. ``features.compute()``
    does not do so by itself: call ``features.compute(resources={"GPU": 1})``.

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
    prepared = prepare(
        samples,
        model,
        projector=projector,
        gradients=gradients,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        on_error=on_error,
    )
    job, n_samples = prepared.job, max(prepared.rows)
    require_block_fits(job.projector, job.row_map.n_rows, n_samples, _largest_memory())
    arrays = lazy_arrays(prepared)
    data = {
        name: (VARIABLES[name].dims, array, {"description": VARIABLES[name].description})
        for name, array in arrays.items()
    }
    return xr.Dataset(data, coords=prepared.coords, attrs=prepared.attrs)


def prepare(
    samples: xr.Dataset,
    model: Model,
    *,
    projector: Projector | None = None,
    gradients: Gradients = "auto",
    batch_size: int | Literal["auto"] = "auto",
    dtype: DType | None = None,
    device: str = "auto",
    on_error: OnError = "raise",
    divide: Divide | None = None,
    adds_up: bool = False,
) -> Prepared:
    """Check the arguments of :func:`featurize`, and gather what its graph is built from.

    ``divide`` says how to divide samples into parts, whose gradients are multiplied with vectors
    and not projected; ``adds_up``, that gradients are only added up.
    """
    _require_options(model, projector, device)
    require_choice("gradients", gradients, ["auto", *ENGINES], remedy="try gradients='auto'")
    require_choice("on_error", on_error, get_args(OnError), remedy="try on_error='record'")
    if dtype is not None:
        require_choice("dtype", dtype, get_args(DType), remedy="try dtype='float32', or None")
    projector = _projector(model, projector)
    samples = validate_samples(samples)
    model = model.for_variables({str(n): array.ndim for n, array in samples.variables.items()})
    row_map = RowMap.from_shapes(model.shapes, alignment=projector.row_alignment)
    projector = projector.bind(row_map)
    columns = [components.matrix.shape[1] for components in model.components.values()]
    if model.curvature:
        n_leading(projector, row_map.n_parameters)
    inputs = _inputs(samples, model)
    partition = divide(model, inputs) if divide else None
    engine, reason = _engine(gradients, model, partition)
    _log.info("gradients by %s: %s", engine, reason)
    sizes = dict(zip(model.shapes, map(math.prod, model.shapes.values()), strict=True))
    held = elements_at_once(engine, model.meta_module(), sizes)
    if adds_up:  # the products of its axes take the whole gradient of a weight
        held = max(held, *sizes.values())
    if engine == "tokens" and partition:
        held *= partition.size
    settings, spec = _torch_settings(dtype), model.spec()
    job = Job(
        model=model,
        projector=projector,
        row_map=row_map,
        proj_dim=columns[0] if columns else projector.width(row_map.n_rows),
        engine=engine,
        batch_size=_batch_size(batch_size, "hooks" if partition else engine, held),
        elements_at_once=held,
        inputs=tuple(inputs),
        torch_settings=settings,
        device=device,
        on_error=on_error,
        partition=partition,
    )
    attrs = {
        **spec,
        "projector": projector.spec(),
        # Identified by what the model reads of them, so that metadata may change.
        "source": source_of(samples, inputs),
        "gradients": engine,
        "batch_size": job.batch_size,
        **settings,
        "device": device,
        "on_error": on_error,
        **({"parts": partition.spec()} if partition else {}),
        **{name: getattr(model.task, name) for name in DEFAULTS if hasattr(model.task, name)},
        "formula": _FORMULAS["second_moments" in spec, "curvature" in spec]
        + ("; then C^T feature, with principal components C" if model.components else ""),
        "trakdask_version": __version__,
        "torch_version": str(torch.__version__),
        "gradients_reason": reason,
    }
    names = [checkpoint.name for checkpoint in model.checkpoints]
    checkpoint = normalise_coord(CHECKPOINT, names, len(names))
    coords = {**samples.coords, CHECKPOINT: (CHECKPOINT, checkpoint)}
    return Prepared(job, inputs, attrs, coords)


def _projector(model: Model, projector: Projector | None) -> Projector:
    """Return the projector that was asked for, or that of the model's principal components."""
    for components in model.components.values():
        fitted = from_spec(components.projector)
        if projector not in (None, fitted):
            raise ValueError(
                f"expected the projector of the model's principal components, {fitted!r}, got "
                f"{projector!r}; try leaving it out, or td.principal_components(..., projector=)"
            )
        return fitted
    return _DEFAULT if projector is None else projector


def _torch_settings(dtype: str | None) -> dict[str, str]:
    """Return the settings of torch that affect gradients, as they are active in the caller.

    ``dtype`` is that to which weights and inputs are cast, ``"as given"`` if they are not.
    ``autocast`` is the dtype of ``torch.autocast`` for GPUs or else for the CPU, which applies on
    any device that tasks run on. ``float32_matmul_precision`` is ``"highest"``, or one that allows
    TF32 or bfloat16 inside float32 products.
    """
    active = [device for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)]
    autocast = str(torch.get_autocast_dtype(active[0])).removeprefix("torch.") if active else "off"
    return {
        "dtype": dtype or "as given",
        "autocast": autocast,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def _largest_memory() -> float:
    """Return the memory limit of the largest worker of the active client, or of this machine.

    Infinite if the active client has no workers yet, or a worker without a limit.
    """
    client = active_client()
    if client is None:
        return float(MEMORY_LIMIT)
    workers = workers_of(client)
    limits = [worker["memory_limit"] for worker in workers.values()]
    return float(max(limits)) if limits and all(limits) else math.inf


def _engine(gradients: Gradients, model: Model, partition: Partition | None) -> tuple[str, str]:
    if partition is not None and partition.groups is None:
        return "tokens", "the only engine that sees the terms of single tokens"
    if gradients == "auto":
        return choose_engine(model.meta_module(), model.task, tuple(model.shapes))
    return str(gradients), "as asked"


def _inputs(samples: xr.Dataset, model: Model) -> Arrays:
    """Return lazy arrays of the task's inputs, looked up among the variables, then the coords."""
    names = getattr(model.task, "variables", None) or tuple(map(str, samples.data_vars))
    if missing := [name for name in names if name not in samples]:
        raise ValueError(
            f"expected the variable {missing[0]!r}, which the task reads, got samples with the "
            f"variables {[str(name) for name in samples.variables]}; try samples.rename(...), or "
            f"passing its name to the task, {task_spec(model.task)}"
        )
    coords = {name: samples[name].values for name in names if name in samples.coords}
    lazy = lazy_variables(coords, samples.chunksizes[SAMPLE][0]) if coords else {}
    return {name: lazy[name] if name in coords else samples[name].data for name in names}


def _batch_size(batch_size: int | Literal["auto"], engine: str, held: int) -> int:
    if batch_size == "auto":
        fits = _MICRO_BATCH_BYTES // (4 * max(held, 1))
        if engine == "hooks":
            # Autograd also stores the activations, which usually take more memory than gradients.
            # Below 32 samples, drawing the random matrix costs more than multiplying with it.
            fits = max(fits // 4, min(32, 4 * fits))
        return max(1, min(_MICRO_BATCH_MOST, fits))
    return require_integer("batch_size", batch_size, 1, remedy="try batch_size='auto'")


def _require_options(model: object, projector: object, device: object) -> None:
    """Reject values that are none of those allowed."""
    if not isinstance(model, Model):
        raise TypeError(
            f"expected a td.Model as model, got {type(model).__name__}; try td.Model(build, "
            "checkpoints=[...], task=...)"
        )
    if not isinstance(projector, Projector | None):
        raise TypeError(
            f"expected a projector, got {shown(projector)}; try projector=td.SJLT(proj_dim=2048)"
        )
    if not (isinstance(device, str) and _DEVICE.fullmatch(device)):
        raise ValueError(
            "expected 'auto', 'cpu', 'cuda', or one GPU of each worker, such as 'cuda:1', as "
            f"device, got {shown(device)}; try device='auto'"
        )


# ---------------------------------------------------------------------------------------- graphs


def lazy_arrays(prepared: Prepared) -> Arrays:
    """Build the graph: a task per (sample block × checkpoint), and one per variable of it."""
    job, token = prepared.job, prepared.token
    tasks = block_tasks(featurize_block, "sc", prepared, token, name=f"featurize-{token}")
    new_axes = {"p": job.proj_dim}
    feature = variable_of(tasks, "sc", "spc", 0, f"feature-{token}", new_axes=new_axes)
    return {"feature": feature} | other_variables(job, tasks, "sc", token)


def lazy_curvature(prepared: Prepared, power: float | None) -> tuple[da.Array, da.Array]:
    """Return eigenvectors (entry, checkpoint) and mean eigenvalues (coordinate, checkpoint).

    Two passes over the samples, a task for every block of each; their sums are added up in a tree.
    """
    job, token = prepared.job, tokenize(prepared.token, power)
    shapes, n_coordinates = job.model.shapes, job.row_map.n_parameters
    n_entries = max((place.stop for *_, place in factors_of(shapes)), default=0)

    def summed(kind: Any, length: int, title: str, *eigenvectors: Any) -> da.Array:
        blocks = block_tasks(
            partial(add_up_block, kind, power, length), "sec", prepared, token, *eigenvectors,
            new_axes={"e": length}, adjust_chunks={"s": 1}, name=f"{title}-{token}",
            dtype=np.float64,
        )  # fmt: skip
        total: da.Array = blocks.sum(axis=0, split_every=4)
        return total

    sums = summed(AxisProducts, n_entries, "axis-products", None, None)
    vectors = da.map_blocks(eigenvectors_of, sums, shapes, dtype=np.float32)
    squares = summed(SquaredCoordinates, n_coordinates, "squares", vectors, "xc")
    return vectors, squares / sum(prepared.rows)


def block_tasks(
    run: Callable[..., Any], index: str, prepared: Prepared, token: str, *more: Any,
    dtype: Any = object, **options: Any,
) -> da.Array:  # fmt: skip
    """Return what ``run`` returns for each block of samples and checkpoint, mostly a tuple."""
    inputs = [
        (array, ("s", *(f"{name}.{axis}" for axis in range(1, array.ndim))))
        for name, array in prepared.inputs.items()
    ]
    tasks: da.Array = da.blockwise(
        run, index,
        shared_task(prepared.job, token), None,
        weights_of(prepared.job, token), "c",
        _starts(prepared.rows, token), "s",  # so that errors can name samples
        *more, *chain.from_iterable(inputs),
        dtype=dtype, meta=np.empty((0,) * len(index), dtype=dtype), concatenate=True,
        align_arrays=False,  # all chunks match; aligning would warn about the outer product
        **options,
    )  # fmt: skip
    return tasks


def shared_task(job: Job, token: str) -> Any:
    """Return what all blocks share as one task, so that a graph does not grow with their number."""
    shared = replace(job, model=job.model.without_checkpoints())
    return dask.delayed(shared, name=f"job-{token}", traverse=False)


def weights_of(job: Job, token: str) -> da.Array:
    """Return each checkpoint, with what was fitted to it, as one task.

    They may be in memory, and large.
    """
    weights = np.empty(len(job.model.checkpoints), object)
    for i, checkpoint in enumerate(job.model.checkpoints):
        fits = job.model.second_moments, job.model.curvature, job.model.components
        weights[i] = checkpoint, *(fit.get(checkpoint.name) for fit in fits)
    array: da.Array = da.from_array(weights, chunks=1, name=f"checkpoint-{token}")
    return array


def _starts(sizes: tuple[int, ...], token: str) -> da.Array:
    """Return the position of the first sample of each block; all but the last are equally large."""
    starts: da.Array = da.map_blocks(
        _start, sizes[0], chunks=(sizes,), name=f"start-{token}",
        dtype=np.int64, meta=np.empty(0, np.int64),
    )  # fmt: skip
    return starts


def _start(size: int, block_id: tuple[int, ...]) -> np.ndarray:
    return np.array([block_id[0] * size])


def other_variables(job: Job, tasks: da.Array, index: str, token: str) -> Arrays:
    """Return all variables but the first one of those that each task returns."""
    others: dict[str, Any] = {} if job.partition else {"feature_norm": np.dtype(np.float64)}
    others |= dict.fromkeys(("output", "out_to_loss"), np.dtype(np.float32))
    if job.on_error == "record":
        others["error"] = ERROR_DTYPE
    return {
        name: variable_of(tasks, index, "sc", item, f"{name}-{token}", dtype)
        for item, (name, dtype) in enumerate(others.items(), start=1)
    }


def variable_of(
    tasks: da.Array, index: str, out: str, item: int, name: str, dtype: Any = np.float32,
    **options: Any,
) -> da.Array:  # fmt: skip
    """Return one of the variables that each task returns."""
    # Of several passes over a block, which axis v counts, one is enough where v is left out.
    get = take if set(index) <= set(out) else _take_of_first
    variable: da.Array = da.blockwise(
        get, out, tasks, index, item, None,
        name=name, dtype=dtype, meta=np.empty((0,) * len(out), dtype), **options,
    )  # fmt: skip
    return variable


def _take_of_first(results: Any, key: Any) -> Any:
    return results[0][key]
