"""The graph of featurize: a task for each block of samples and checkpoint, and its variables."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import dask
import dask.array as da
import numpy as np

from trakdask.arrays.blocks import take
from trakdask.arrays.graphs import bounds
from trakdask.bars import counted
from trakdask.execution import active_client
from trakdask.featurization.block import featurize_block
from trakdask.featurization.job import ERROR_DTYPE, FeaturizeJob
from trakdask.gpu_workers import GRADIENTS, ON_CPU
from trakdask.projection.companding import widened
from trakdask.projection.fitted import Fitted
from trakdask.projection.protocol import Projector
from trakdask.provenance import digest


@dataclass(frozen=True)
class GraphInputs:
    """The inputs of a graph: all that is known before anything runs.

    Parameters
    ----------
    job
        The settings that all tasks share.
    inputs
        Arrays that the model reads, in blocks of samples.
    attrs, coords
        Attrs and coords of the features.
    fit
        Fitted values, (..., checkpoint), in a chunk for each checkpoint.
    known
        By the name of the checkpoint, what a fit has computed already: the places of samples, and
        their features, output and Q, (sample, proj_dim + 2).
    """

    job: FeaturizeJob
    inputs: dict[str, da.Array]
    attrs: dict[str, Any]
    coords: dict[Hashable, Any]
    fit: dict[str, da.Array]
    known: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)

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
        return next(iter(self.inputs.values())).chunks[0]


def lazy_arrays(prepared: GraphInputs) -> dict[str, da.Array]:
    """Build the graph: a task per (sample block × checkpoint), and one per variable of it."""
    # 1. What is known of each block at each checkpoint, or None, as one item each.
    job, token, edges = prepared.job, prepared.token, np.cumsum([0, *prepared.rows])
    checkpoints = job.model.checkpoints
    blocks = np.full((len(edges) - 1, len(checkpoints)), None, object)
    for column, checkpoint in enumerate(checkpoints):
        if checkpoint.name in prepared.known:
            places, rows = prepared.known[checkpoint.name]
            starts = np.searchsorted(places, edges)
            for i in np.flatnonzero(np.diff(starts)):
                here = slice(starts[i], starts[i + 1])
                blocks[i, column] = places[here] - edges[i], rows[here]
    known = da.from_array(blocks, chunks=1, name=f"known-{token}")
    # 2. The tasks, and what they return.
    tasks = block_tasks(featurize_block, "sc", prepared, token, known, "sc")
    new_axes = {"p": job.proj_dim}
    feature = variable_of(tasks, "sc", "spc", 0, f"feature-{token}", new_axes=new_axes)
    return {"feature": feature} | other_variables(job, tasks, "sc", token)


def block_tasks(
    run: Callable[..., Any], index: str, prepared: GraphInputs, token: str, *more: Any,
    name: str | None = None, dtype: Any = object, **options: Any,
) -> da.Array:  # fmt: skip
    """Return what ``run`` returns for each block of samples and checkpoint, mostly a tuple.

    These are the tasks that take gradients, and the names of all of them say so.
    """
    active_client()  # whose scheduler gets to know where they are to run
    name = name or token
    inputs = [
        (array, ("s", *(f"{name}.{axis}" for axis in range(1, array.ndim))))
        for name, array in prepared.inputs.items()
    ]
    return da.blockwise(
        run, index,
        shared_task(prepared.job, name), None,
        checkpoint_items(prepared, token), "c",
        bounds(prepared.rows), "s",  # so that errors can name samples
        *more, *chain.from_iterable(inputs),
        name=f"{ON_CPU if prepared.job.device == 'cpu' else GRADIENTS}{name}",
        # With ``meta``, dask does not call ``run`` on empty arrays to see what it returns.
        dtype=dtype, meta=np.empty((0,) * len(index), dtype=dtype), concatenate=True,
        align_arrays=False,  # all chunks match; aligning would warn about the outer product
        **options,
    )  # fmt: skip


def shared_task(job: FeaturizeJob, name: str) -> Any:
    """Return what all blocks share as one task, so that a graph does not grow with their number."""
    # The weights of checkpoints come with ``checkpoint_items``, each to its own tasks. Without
    # ``traverse=False`` dask would search all fields of the job for lazy values.
    shared = replace(job, model=job.model.at_checkpoints(()), counted_as=counted(name))
    return dask.delayed(shared, name=f"job-{name}", traverse=False)


def checkpoint_items(prepared: GraphInputs, token: str) -> da.Array:
    """Return each checkpoint, with the values fitted to it, as one item: they may be large."""
    checkpoints, fit = prepared.job.model.checkpoints, prepared.fit
    items = np.empty(len(checkpoints), object)
    # Assigned to an array of objects: numpy would make two columns of a list of pairs.
    items[:] = [(checkpoint, {}) for checkpoint in checkpoints]
    array: da.Array = da.from_array(items, chunks=1, name=f"checkpoint-{token}")
    if not fit:
        return array
    fitted = [(a, (*(f"{n}.{axis}" for axis in range(a.ndim - 1)), "c")) for n, a in fit.items()]
    steps = (step for step in prepared.job.projector.steps if not isinstance(step, Projector))
    made_by = Fitted(tuple(steps), digests=prepared.attrs.get("fit", {}))
    return da.blockwise(
        _with_fit, "c", array, "c", made_by, None, tuple(fit), None, *chain.from_iterable(fitted),
        name=f"fit-{token}", dtype=object, meta=np.empty(0, object), concatenate=True,
        align_arrays=False,
    )  # fmt: skip


def _with_fit(
    items: np.ndarray, made_by: Fitted, names: tuple[str, ...], *arrays: np.ndarray
) -> np.ndarray:
    (checkpoint, _), with_fit = items.item(), np.empty(1, object)
    values = dict(zip(names, arrays, strict=True))
    digest_here = {name: text for name, text in made_by.digests.items() if name == checkpoint.name}
    replace(made_by, arrays=values, digests=digest_here).require_digests()
    # Codes, and half precision of older stores, become float32 here, once for all blocks.
    with_fit[0] = checkpoint, {name: widened(a[..., 0]) for name, a in values.items()}
    return with_fit


def other_variables(
    job: FeaturizeJob, tasks: da.Array, index: str, token: str
) -> dict[str, da.Array]:
    """Return all variables that each task returns, except the first one."""
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
    # Axis v counts the passes of a task over its block. Without v, the first of them is enough.
    get = take if set(index) <= set(out) else _take_of_first
    return da.blockwise(
        get, out, tasks, index, item, None,
        name=name, dtype=dtype, meta=np.empty((0,) * len(out), dtype), **options,
    )  # fmt: skip


def _take_of_first(results: Any, key: Any) -> Any:
    return results[0][key]
