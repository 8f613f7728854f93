"""Check the arguments of featurize, and gather the inputs of its graph."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import dask.array as da
import torch
import xarray as xr

from trakdask._version import __version__
from trakdask.checks import nearest, require_choice, require_integer, shown
from trakdask.featurization.devices import ACCELERATORS, is_here
from trakdask.featurization.graphs import GraphInputs
from trakdask.featurization.job import FeaturizeJob, Partition
from trakdask.models.gradients import ENGINES
from trakdask.models.layers import choose_engine, elements_at_once
from trakdask.models.model import Model
from trakdask.models.tasks.protocol import task_facts, task_spec
from trakdask.projection import SJLT, Projector, RowMap
from trakdask.projection.fitted import Components, Fitted
from trakdask.provenance import BY_CHECKPOINT, REQUIRED_SPEC, as_values, digest, require_same
from trakdask.samples.array_source import lazy_variable, validate_samples
from trakdask.samples.coords import normalise_coord
from trakdask.samples.datasets import source_of
from trakdask.variables import (
    CHECKPOINT,
    COLUMN,
    PROJ_DIM,
    SAMPLE,
    WRONG_CLASSES,
    checkpoint_names,
    ordered,
    validate,
)

_log = logging.getLogger(__name__)
_DEFAULT = SJLT(proj_dim=2048, seed=0)
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_MICRO_BATCH_BYTES = 2**28
_MICRO_BATCH_MOST = 256


def prepare(
    samples: xr.Dataset,
    model: Model,
    *,
    projector: Projector | Fitted | None = None,
    like: xr.Dataset | None = None,
    gradients: str = "auto",
    batch_size: int | Literal["auto"] = "auto",
    dtype: str | None = None,
    device: str = "auto",
    on_error: str = "raise",
    divide: Callable[[Model, dict[str, da.Array]], Partition] | None = None,
    adds_up: bool = False,
) -> GraphInputs:
    """Check the arguments of :func:`featurize`, and gather the inputs of its graph.

    ``divide`` says how to divide samples into parts, whose gradients are multiplied with vectors
    and not projected; ``adds_up``, that gradients are only added up.
    """
    # 1. The options are among those allowed.
    _require_options(model, projector, device)
    require_choice("gradients", gradients, ["auto", *ENGINES], remedy="try gradients='auto'")
    require_choice("on_error", on_error, ["raise", "record"], remedy="try on_error='record'")
    if dtype is not None:
        require_choice("dtype", dtype, _DTYPES, remedy="try dtype='float32', or None")
    # 2. Features that these are to be like decide on projector, checkpoints and precision.
    if like is not None:
        validate(like, ("feature",), what="like")
        if projector is not None:
            raise ValueError(
                f"expected like= without a projector, since its features have one, got "
                f"{projector!r}; try leaving it out"
            )
        projector, model = projector_of(like), model.at_checkpoints(checkpoint_names(like))
        if dtype is None and (stored := like.attrs.get("dtype")) in _DTYPES:
            dtype = stored
        stored = like.attrs.get("device", device)
        device = stored if device == "auto" and is_here(stored) else device
    # 3. The task reads the variables that there are, and the projector was fitted to this model.
    samples = validate_samples(samples)
    model = model.for_variables({str(n): array.ndim for n, array in samples.variables.items()})
    fitted = Fitted.of(projector or _DEFAULT)
    model = model.differentiating(fitted.differentiated(model.shapes))
    spec, names = model.spec(), [checkpoint.name for checkpoint in model.checkpoints]
    _require_fitted_to(fitted, spec)
    # 4. Each gradient element has a row of the random matrix.
    fitted = fitted.at_checkpoints(names)
    row_map = RowMap.from_shapes(model.shapes, alignment=fitted.projector.row_alignment)
    bound = fitted.bind(row_map)
    # 5. The engine, and how many elements of a gradient it holds at once, decide on micro-batches.
    inputs = inputs_of(samples, model)
    partition = divide(model, inputs) if divide else None
    engines, reason = _engines(gradients, model, partition, like)
    _log.info("gradients by %s: %s", " or ".join(engines), reason)
    sizes = {name: math.prod(shape) for name, shape in model.shapes.items()}
    held = elements_at_once(engines[0], model.meta_module(), sizes)
    if adds_up:  # the products of its axes take the whole gradient of a weight, and turn a copy
        held += max(sizes.values())
    if partition and engines == ("tokens",):
        held *= partition.size
    # 6. What all tasks share, and what features say of how they were made.
    job = FeaturizeJob(
        model=model,
        projector=Fitted(bound.steps, digests=bound.digests),
        row_map=row_map,
        proj_dim=bound.width(row_map.n_rows),
        engines=engines,
        batch_size=_batch_size(batch_size, "hooks" if partition else engines[0], held),
        elements_at_once=held,
        inputs=tuple(inputs),
        torch_settings=_torch_settings(dtype, device),
        device=device,
        on_error=on_error,
        partition=partition,
    )
    checkpoint = normalise_coord(CHECKPOINT, names, len(names))
    coords = {**samples.coords, CHECKPOINT: (CHECKPOINT, checkpoint)}
    attrs = {**spec, **_attrs(job, bound, source_of(samples, inputs)), "gradients_reason": reason}
    # 7. What a fit has computed of some of just these samples, in just this way.
    known = {n: rows for n, (of, *rows) in fitted.rows.items() if of == made_like(attrs, n)}
    by_checkpoint = {
        name: da.asarray(array).rechunk((*[-1] * (array.ndim - 1), 1))
        for name, array in bound.arrays.items()
    }
    return GraphInputs(job, inputs, attrs, coords, by_checkpoint, known)


def made_like(attrs: Mapping[str, Any], name: str) -> str:
    """Hash what attrs of features say of the gradients at a checkpoint, but for the projector."""
    others = {"projector", "fit", "fitted_to", "formula", "damping_prior"}
    here = {n: value for n, value in attrs.items() if n not in others}
    return digest(here | {n: here[n][name] for n in BY_CHECKPOINT if n in here})


def _require_fitted_to(fitted: Fitted, spec: Mapping[str, Any]) -> None:
    """Reject a projector that was fitted to another model.

    A random projector is of no checkpoint: others may be appended to the features of these.
    """
    if not fitted.model:
        return
    known, ours = fitted.model["checkpoints"], spec["checkpoints"]
    kept = [name for name in ours if fitted.arrays or name in known]
    of_fit, of_model = (
        {**each, "checkpoints": {name: digests[name] for name in kept if name in digests}}
        for each, digests in ((fitted.model, known), (spec, ours))
    )
    what = "the projector and the model that it was fitted to"
    require_same(of_fit, of_model, what=what, names=tuple(of_fit))


def _attrs(job: FeaturizeJob, bound: Fitted, source: Any) -> dict[str, Any]:
    """Return the attrs of features that say how a job makes them."""
    return {
        "projector": bound.spec(),
        **({"fit": dict(bound.digests)} if bound.digests else {}),
        **({"fitted_to": bound.origin} if bound.origin else {}),
        # Identified by what the model reads of them, so that metadata may change.
        "source": source,
        "inputs": json.dumps([*job.inputs]),  # netCDF stores no list of texts
        "gradients": job.engines[0],
        "batch_size": job.batch_size,
        **job.torch_settings,
        "device": job.device,
        "on_error": job.on_error,
        **({"parts": job.partition.spec()} if job.partition else {}),
        **task_facts(job.model.task),
        **({"reads_tokens": 1} if job.model.reads_tokens else {}),
        "formula": bound.formula,
        **({"damping_prior": bound.damping_prior} if bound.damping_prior != 1 else {}),
        "trakdask_version": __version__,
        "torch_version": str(torch.__version__),
    }


def projector_of(features: xr.Dataset) -> Fitted:
    """Return the projector that features were made with, and its fitted values."""
    features = ordered(features)
    attrs, names = as_values(features.attrs), checkpoint_names(features)
    if missing := [name for name in REQUIRED_SPEC if name not in attrs]:
        raise ValueError(
            f"expected features with the attrs of td.featurize, got none named {missing}; try "
            "features.assign_attrs(original.attrs)"
        )
    fitted = Fitted.from_spec(attrs["projector"])
    wanted, columns = fitted.variables.values(), features.get(COLUMN, features[PROJ_DIM]).values
    last = fitted.steps[-1]
    if isinstance(last, Components) and columns.tolist() != [*range(last.proj_dim)]:
        raise ValueError(
            f"expected features with all {last.proj_dim} columns of the fitted projector, in their "
            f"order, got {len(columns)} of them, {shown(columns.tolist())}; try like= the "
            "features before isel(proj_dim=...), and then the same isel(proj_dim=...) on both"
        )
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


def _torch_settings(dtype: str | None, device: str) -> dict[str, str]:
    """Return the settings of torch that affect gradients, as they are active in the caller.

    Weights and inputs are cast to ``dtype``, unless it is ``"as given"``.
    ``autocast`` is the dtype of ``torch.autocast`` for accelerators or else for the CPU, which
    applies on any device that tasks run on. ``float32_matmul_precision`` is ``"highest"``, or one
    that allows TF32 or bfloat16 inside float32 products, and ``cudnn_allow_tf32`` the same for
    convolutions.
    """
    asked = [] if device == "auto" else [torch.device(device).type]
    kinds = dict.fromkeys((*asked, *ACCELERATORS, "cpu"))
    active = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    autocast = str(torch.get_autocast_dtype(active[0])).removeprefix("torch.") if active else "off"
    return {
        "dtype": dtype or "as given",
        "autocast": autocast,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_allow_tf32": str(torch.backends.cudnn.allow_tf32),
    }


def _engines(
    gradients: str, model: Model, partition: Partition | None, like: xr.Dataset | None
) -> tuple[tuple[str, ...], str]:
    """Return the engines to try, in this order, and the reason for the first one."""
    if partition is not None and partition.groups is None:
        return ("tokens",), "the only engine that sees the terms of single tokens"
    if gradients != "auto":
        return (gradients,), "as asked"
    first, reason = choose_engine(model.meta_module(), model.task, tuple(model.shapes))
    order, before = list(ENGINES), None if like is None else like.attrs.get("gradients")
    # Who asked for a later engine then may know that the model does not run by earlier ones.
    if before in order and order.index(before) > order.index(first):
        first, reason = before, "as the features that these are like"
    return tuple(order[order.index(first) :]), reason


def inputs_of(samples: xr.Dataset, model: Model) -> dict[str, da.Array]:
    """Return lazy arrays of the task's inputs, looked up among the variables, then the coords."""
    names = getattr(model.task, "variables", None) or tuple(map(str, samples.data_vars))
    if missing := [name for name in names if name not in samples]:
        present = [str(name) for name in samples.variables]
        close = nearest(missing[0], present)
        new = f"{{{close!r}: {missing[0]!r}}}" if close else "..."
        raise ValueError(
            f"expected the variable {missing[0]!r}, which the task reads, got samples with the "
            f"variables {present}; try samples.rename({new}), or passing its name to the task, "
            f"{task_spec(model.task)}"
        )
    coords = {name: samples[name].values for name in names if name in samples.coords}
    lazy = {n: lazy_variable(n, c, samples.chunksizes[SAMPLE][0]) for n, c in coords.items()}
    return {name: lazy.get(name, samples.variables[name]).data for name in names}


def _batch_size(batch_size: int | Literal["auto"], engine: str, held: int) -> int:
    if batch_size == "auto":
        # In float32. Nothing is held as a whole where all gradients come in slices.
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
    try:
        is_device = device == "auto" or (
            isinstance(device, str) and torch.device(device).type != "meta"  # which has no values
        )
    except RuntimeError:
        is_device = False
    if not is_device:
        raise ValueError(
            "expected 'auto', 'cpu', 'cuda', 'xpu', 'mps', or one GPU of each worker, such as "
            f"'cuda:1', as device, got {shown(device)}; try device='auto'"
        )
