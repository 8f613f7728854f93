"""Featurize: check the arguments, and return a lazy Dataset of projected gradients."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import dask.array as da
import numpy as np
import torch
import xarray as xr
from distributed.system import MEMORY_LIMIT

from trakdask._version import __version__
from trakdask.arrays.graphs import plain
from trakdask.checks import require_choice, require_integer, shown
from trakdask.execution import active_client, workers_of
from trakdask.featurization.graphs import Arrays, GraphInputs, lazy_arrays
from trakdask.featurization.job import DType, FeaturizeJob, OnError, Partition
from trakdask.models.gradients import ENGINES
from trakdask.models.layers import choose_engine, elements_at_once
from trakdask.models.model import Model
from trakdask.models.tasks import task_spec
from trakdask.projection import SJLT, Projector, RowMap
from trakdask.projection.fitted import Fitted
from trakdask.projection.protocol import require_block_fits
from trakdask.provenance import (
    DEFAULTS,
    REQUIRED_SPEC,
    as_text,
    as_values,
    require_comparable,
    require_same,
)
from trakdask.samples import (
    ROWS,
    joined_rows,
    lazy_variables,
    normalise_coord,
    source_of,
    validate_samples,
)
from trakdask.variables import (
    CHECKPOINT,
    COLUMN,
    PROJ_DIM,
    SAMPLE,
    TRAINED_ON,
    VARIABLES,
    WRONG_CLASSES,
    aligned,
    checkpoint_names,
)

Gradients = Literal["auto", "hooks", "vmap", "loop"]
Divide = Callable[[Model, Arrays], Partition]

_log = logging.getLogger(__name__)

_DEFAULT = SJLT(proj_dim=2048, seed=0)
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")

_MICRO_BATCH_BYTES = 2**28
_MICRO_BATCH_MOST = 256


def featurize(
    samples: xr.Dataset,
    model: Model,
    projector: Projector | Fitted | None = None,
    *,
    like: xr.Dataset | None = None,
    gradients: Gradients = "auto",
    batch_size: int | Literal["auto"] = "auto",
    dtype: DType | None = None,
    device: str = "auto",
    on_error: OnError = "raise",
) -> xr.Dataset:
    """Compute the projected gradient of the model output for every sample and checkpoint.

    φ_c(z) = p^-1/2 · P_cᵀ ∇_θ f(z; θ_c): the features of TRAK. Targets are made ``like`` the
    features of the training samples.

    Parameters
    ----------
    samples
        Dataset with a ``sample`` dimension, from :func:`from_arrays`, :func:`from_torch`,
        :func:`from_dataframe`, or any other. Its variables are model inputs and its coords are
        metadata (a coord that the task names is an input, too). A coord ``trained_on`` (sample,
        checkpoint), bool, says which checkpoints were trained on which samples, where they were not
        trained on all; :func:`trakdask.evaluate.cross_validate` grades scores by it.
    model
        The model whose outputs are attributed.
    projector
        What :func:`fit` returned; or a random one, ``SJLT(proj_dim=2048, seed=0)`` by default: four
        random signs per gradient element. For another size, ``td.SJLT(proj_dim=4096)``.
    like
        Features that these are to be multiplied with, as :func:`open` returns them, in the place of
        a projector: the same one, with its fitted values, is taken from them, and so are their
        checkpoints, ``gradients`` and ``dtype``.
    gradients
        Engine of the per-sample gradients: ``"hooks"``, one batched backward pass in the memory of
        one layer; ``"vmap"``, ``torch.func`` on single samples; ``"loop"``, one backward pass per
        sample, for models that the others cannot run. ``"auto"`` chooses hooks if they can handle
        a selected parameter; the choice and the reason for it are in ``attrs``. A thread whose
        first micro-batch fails by hooks and not by vmap goes on by vmap, and logs a warning; the
        gradients are the same but for rounding. Each thread checks the gradients of its first (and
        of any larger) micro-batch by a random weighted sum, which one plain backward pass gives,
        too. In every later block, it compares f, Q and the gradient of one sample with what the
        sample alone gives, which costs a backward pass of one sample.
    batch_size
        Most samples per micro-batch inside a task. With ``"auto"`` the gradients of a micro-batch
        fit in 256 MB, and it has at most 256 samples. With hooks, the gradients of the largest
        parameter fit in 64 MB, or it has 32 samples if that takes at most 1 GB; gradients of linear
        and embedding layers are computed in slices.
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
    - ``trained_on`` (sample, checkpoint), bool, if the samples have it;
    - with ``on_error="record"``, ``error`` (sample, checkpoint): text, "" for samples that
      did not fail. :func:`open` returns it as a coord;
    - the values of a fitted projector, (..., checkpoint), which ``like=`` takes from here, and
      ``wrong_classes`` (proj_dim, proj_dim_1, checkpoint), if :func:`fit` made it.

    Its ``attrs`` record how it was computed.

    Raises
    ------
    TypeError, ValueError
        If the samples lack a variable that the task needs, the features of one block cannot fit in
        the memory of a worker, or an option is invalid.
    StoreMismatchError
        If the projector was fitted to another model, or the model is not the one of ``like``.
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
    >>> import numpy as np, torch, trakdask as td
    >>> x = np.ones((4, 2), "f4")
    >>> samples = td.from_arrays({"image": x, "label": np.zeros(4, int)})
    >>> model = td.Model(torch.nn.Linear(2, 3), task="image_classification")
    >>> features = td.featurize(samples, model, td.SJLT(16))  # lazy
    >>> targets = td.featurize(samples.isel(sample=[0]), model, like=features)
    >>> targets.feature.sizes["proj_dim"]
    16

    What failed, and why:

    >>> x[2] = np.inf
    >>> samples = td.from_arrays({"image": x, "label": np.zeros(4, int)})
    >>> features = td.featurize(samples, model, projector=td.Identity(), on_error="record")
    >>> error = features.error.isel(checkpoint=0).compute()
    >>> error[error != ""].values.tolist()
    ['the output is NaN or infinite']
    """
    prepared = prepare(
        samples,
        model,
        projector=projector,
        like=like,
        gradients=gradients,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        on_error=on_error,
    )
    if samples.attrs.get("chunks") == "auto" and max(prepared.rows) == ROWS:
        prepared = _joined(prepared)
    job, n_samples = prepared.job, max(prepared.rows)
    limit = _largest_memory()
    require_block_fits(job.projector.projector, job.row_map.n_rows, n_samples, limit)
    arrays = lazy_arrays(prepared) | prepared.fit
    data = {name: VARIABLES[name].holding(array) for name, array in arrays.items()}
    coords = {**prepared.coords, COLUMN: (PROJ_DIM, np.arange(job.proj_dim))}
    features = xr.Dataset(data, coords=coords, attrs=as_text(prepared.attrs))
    if TRAINED_ON in samples.coords:
        features[TRAINED_ON] = _trained_on(samples, features)
    if like is not None:
        require_comparable(like, features, "these")
    return features


def _joined(prepared: GraphInputs) -> GraphInputs:
    """Return the inputs of a graph in larger blocks, if features of a block have few bytes."""
    n, inputs = sum(prepared.rows), prepared.inputs
    n_bytes = int(sum(array.nbytes for array in inputs.values())) // n
    rows = joined_rows(n, 4 * prepared.job.proj_dim, n_bytes)
    # A cluster would shuffle all samples by default, where neighbours are to be joined.
    joined = {name: a.rechunk({0: rows}, method="tasks") for name, a in inputs.items()}
    return replace(prepared, inputs=joined)


def prepare(
    samples: xr.Dataset,
    model: Model,
    *,
    projector: Projector | Fitted | None = None,
    like: xr.Dataset | None = None,
    gradients: Gradients = "auto",
    batch_size: int | Literal["auto"] = "auto",
    dtype: DType | None = None,
    device: str = "auto",
    on_error: OnError = "raise",
    divide: Divide | None = None,
    adds_up: bool = False,
) -> GraphInputs:
    """Check the arguments of :func:`featurize`, and gather the inputs of its graph.

    ``divide`` says how to divide samples into parts, whose gradients are multiplied with vectors
    and not projected; ``adds_up``, that gradients are only added up.
    """
    _require_options(model, projector, device)
    require_choice("gradients", gradients, ["auto", *ENGINES], remedy="try gradients='auto'")
    require_choice("on_error", on_error, get_args(OnError), remedy="try on_error='record'")
    if dtype is not None:
        require_choice("dtype", dtype, get_args(DType), remedy="try dtype='float32', or None")
    if like is not None:
        if projector is not None:
            raise ValueError(
                f"expected like= without a projector, since its features have one, got "
                f"{projector!r}; try leaving it out"
            )
        projector, model = projector_of(like), model.at_checkpoints(checkpoint_names(like))
        # "auto" chooses hooks again, and may leave them again where they fail.
        if gradients == "auto" and (engine := like.attrs.get("gradients")) in ("vmap", "loop"):
            gradients = engine
        if dtype is None and (stored := like.attrs.get("dtype")) in get_args(DType):
            dtype = stored
    samples = validate_samples(samples)
    model = model.for_variables({str(n): array.ndim for n, array in samples.variables.items()})
    spec, names = model.spec(), [checkpoint.name for checkpoint in model.checkpoints]
    fitted = Fitted.of(projector or _DEFAULT)
    if fitted.model:
        digests = {name: fitted.model["checkpoints"].get(name) for name in names}
        what = "the projector and the model that it was fitted to"
        of_fit = {**fitted.model, "checkpoints": digests}
        require_same(of_fit, spec, what=what, names=tuple(of_fit))
    fitted = fitted.at_checkpoints(names)
    row_map = RowMap.from_shapes(model.shapes, alignment=fitted.projector.row_alignment)
    bound = fitted.bind(row_map)
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
    settings = _torch_settings(dtype)
    job = FeaturizeJob(
        model=model,
        projector=Fitted(bound.steps),
        row_map=row_map,
        proj_dim=bound.width(row_map.n_rows),
        engine=engine,
        batch_size=_batch_size(batch_size, "hooks" if partition else engine, held),
        elements_at_once=held,
        inputs=tuple(inputs),
        torch_settings=settings,
        device=device,
        on_error=on_error,
        partition=partition,
        falls_back=gradients == "auto" and engine == "hooks",
    )
    attrs = {
        **spec,
        "projector": bound.spec(),
        **({"fit": dict(bound.digests)} if bound.digests else {}),
        **({"fitted_to": bound.origin} if bound.origin else {}),
        # Identified by what the model reads of them, so that metadata may change.
        "source": source_of(samples, inputs),
        "gradients": engine,
        "batch_size": job.batch_size,
        **settings,
        "device": device,
        "on_error": on_error,
        **({"parts": partition.spec()} if partition else {}),
        **{name: getattr(model.task, name) for name in DEFAULTS if hasattr(model.task, name)},
        "formula": bound.formula,
        **({"damping_prior": bound.damping_prior} if bound.damping_prior != 1 else {}),
        "trakdask_version": __version__,
        "torch_version": str(torch.__version__),
        "gradients_reason": reason,
    }
    checkpoint = normalise_coord(CHECKPOINT, names, len(names))
    coords = {**samples.coords, CHECKPOINT: (CHECKPOINT, checkpoint)}
    return GraphInputs(job, inputs, attrs, coords, _lazy_fit(bound))


def _trained_on(samples: xr.Dataset, features: xr.Dataset) -> xr.Variable:
    """Return which checkpoints were trained on the samples, in the chunks of the features."""
    given, sizes = samples[TRAINED_ON], {dim: features.sizes[dim] for dim in (SAMPLE, CHECKPOINT)}
    if CHECKPOINT in given.indexes:
        given = aligned(given, features, what=TRAINED_ON)
    if given.dtype != bool or given.sizes != sizes:
        raise ValueError(
            f"expected {TRAINED_ON!r} as bool {sizes}, got {given.dtype} {dict(given.sizes)}; try "
            "samples.assign_coords(trained_on=masks.rename(subset='checkpoint')), with masks of "
            "td.evaluate.subsets"
        )
    chunks: dict[Any, Any] = {SAMPLE: features.chunksizes[SAMPLE], CHECKPOINT: 1}
    variable = given.variable.transpose(SAMPLE, CHECKPOINT).chunk(chunks)
    return xr.Variable(variable.dims, plain(variable.data), VARIABLES[TRAINED_ON].attrs)


def projector_of(features: xr.Dataset) -> Fitted:
    """Return the projector that features were made with, and its fitted values."""
    attrs, names = as_values(features.attrs), checkpoint_names(features)
    if missing := [name for name in REQUIRED_SPEC if name not in attrs]:
        raise ValueError(
            f"expected features with the attrs of td.featurize, got none named {missing}; try "
            "features.assign_attrs(original.attrs)"
        )
    fitted = Fitted.from_spec(attrs["projector"])
    wanted = fitted.variables.values()
    if missing := [name for name in wanted if name not in features]:
        raise ValueError(
            f"expected the values of the fitted projector in the features, got none of {missing}; "
            "try td.open(store), which has all of it"
        )
    return replace(
        fitted,
        # Wrong classes belong to no step, and need not be there.
        arrays={n: features[n].data for n in (*wanted, WRONG_CLASSES) if n in features},
        digests={name: attrs["fit"][name] for name in names} if wanted else {},
        model=model_of(attrs | {"checkpoints": {n: attrs["checkpoints"][n] for n in names}}),
        origin=features.attrs.get("fitted_to", ""),
    )


def model_of(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attrs of features that identify the model to which something is fitted."""
    return {name: attrs[name] for name in ("parameters", "checkpoints")}


def _lazy_fit(fitted: Fitted) -> Arrays:
    """Return the fitted values as Dask arrays, in a chunk per checkpoint."""
    return {
        name: da.asarray(array).rechunk((*[-1] * (array.ndim - 1), 1))
        for name, array in fitted.arrays.items()
    }


def _torch_settings(dtype: str | None) -> dict[str, str]:
    """Return the settings of torch that affect gradients, as they are active in the caller.

    Weights and inputs are cast to ``dtype``, unless it is ``"as given"``.
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


def require_model(model: object) -> None:
    """Reject an object that is no :class:`Model`, such as the module itself."""
    if not isinstance(model, Model):
        raise TypeError(
            f"expected a td.Model as model, got {type(model).__name__}; try td.Model(build, "
            "checkpoints=[...], task=...)"
        )


def _require_options(model: object, projector: object, device: object) -> None:
    """Reject values that are none of those allowed."""
    require_model(model)
    if not isinstance(projector, Projector | Fitted | None):
        raise TypeError(
            f"expected a projector, got {shown(projector)}; try projector=td.SJLT(proj_dim=2048)"
        )
    if not (isinstance(device, str) and _DEVICE.fullmatch(device)):
        raise ValueError(
            "expected 'auto', 'cpu', 'cuda', or one GPU of each worker, such as 'cuda:1', as "
            f"device, got {shown(device)}; try device='auto'"
        )
