"""The graphs of featurize: one task per block of samples and checkpoint, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import dask
import dask.array as da
import numpy as np
import torch
from dask.base import tokenize

from trakdask.arrays.blocks import take
from trakdask.featurization.block import (
    add_up_block,
    featurize_block,
    multiply_block,
    scaling,
)
from trakdask.featurization.job import ERROR_DTYPE, Job
from trakdask.models.curvature import (
    AxisProducts,
    Shapes,
    SquaredCoordinates,
    eigenvectors_of,
    factors_of,
    rotated,
)
from trakdask.projection.back_projection import back_project
from trakdask.projection.leading import back_project_leading
from trakdask.provenance import digest

Arrays = dict[str, da.Array]

_VECTOR_BYTES = 2**28


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


def lazy_arrays(prepared: Prepared) -> Arrays:
    """Build the graph: a task per (sample block × checkpoint), and one per variable of it."""
    job, token = prepared.job, prepared.token
    tasks = _tasks(featurize_block, "sc", prepared, token, name=f"featurize-{token}")
    width = job.projector.width(job.row_map.n_rows)
    feature = _taken(tasks, "sc", "spc", 0, f"feature-{token}", new_axes={"p": width})
    return {"feature": feature} | _others(job, tasks, "sc", token)


def lazy_products(prepared: Prepared, vectors: da.Array) -> Arrays:
    """Build the graph of products of features with vectors, without the features.

    Parameters
    ----------
    prepared
        Samples and settings, with a partition.
    vectors
        What features are multiplied with, (vector, proj_dim, checkpoint), chunks (rows, p, 1).

    Returns
    -------
    ``product`` (sample, part, vector, checkpoint) and, as for features, ``output``,
    ``out_to_loss`` and, if failures are recorded, ``error``.

    Notes
    -----
    One task per checkpoint projects the vectors back to the parameters, and one per block of
    samples and checkpoint runs the model. Vectors take 4 bytes per parameter; of more than 256 MiB,
    the model runs once for each 256 MiB.
    """
    job, token = prepared.job, tokenize(prepared.token, vectors.name)
    n_rows = job.row_map.n_rows
    chunked = vectors.rechunk({0: max(1, _VECTOR_BYTES // (4 * n_rows))})
    back = da.blockwise(
        _back_project, "vrc",
        _shared(job, token), None, _weights(job, token), "c", chunked, "vpc",
        new_axes={"r": n_rows}, name=f"back-project-{token}", concatenate=True,
        align_arrays=False, dtype=np.float32, meta=np.empty((0, 0, 0), np.float32),
    )  # fmt: skip
    name = f"featurize-{token}"
    tasks = _tasks(multiply_block, "svc", prepared, token, back, "vrc", name=name)
    assert job.partition is not None
    new_axes = {"t": job.partition.size}
    product = _taken(tasks, "svc", "stvc", 0, f"product-{token}", new_axes=new_axes)
    # All passes of a block give the same outputs.
    return {"product": product} | _others(job, tasks.blocks[:, :1], "svc", token)


def lazy_curvature(prepared: Prepared, power: float | None) -> tuple[da.Array, da.Array]:
    """Return eigenvectors (entry, checkpoint) and mean eigenvalues (coordinate, checkpoint).

    Two passes over the samples, a task for every block of each; their sums are added up in a tree.
    """
    job, token = prepared.job, tokenize(prepared.token, power)
    shapes, n_coordinates = job.model.shapes, job.row_map.n_parameters
    n_entries = max((place.stop for *_, place in factors_of(shapes)), default=0)

    def summed(kind: Any, length: int, title: str, *eigenvectors: Any) -> da.Array:
        blocks = _tasks(
            partial(add_up_block, kind, power, length), "sec", prepared, token, *eigenvectors,
            new_axes={"e": length}, adjust_chunks={"s": 1}, name=f"{title}-{token}",
            dtype=np.float64,
        )  # fmt: skip
        total: da.Array = blocks.sum(axis=0, split_every=4)
        return total

    sums = summed(AxisProducts, n_entries, "axis-products", None, None)
    vectors = da.map_blocks(_eigenvectors, sums, shapes, dtype=np.float32)
    squares = summed(SquaredCoordinates, n_coordinates, "squares", vectors, "xc")
    return vectors, squares / sum(prepared.rows)


def _eigenvectors(sums: np.ndarray, shapes: Shapes) -> np.ndarray:
    return eigenvectors_of(sums[:, 0], shapes)[:, None]


def _back_project(job: Job, weights: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Return what gradients are to be multiplied with, (vector, row, 1)."""
    (checkpoint, moments, curvature), rows = weights.item(), job.row_map
    flat = torch.tensor(vectors[..., 0])
    if curvature:
        found = back_project_leading(job.projector, rows, checkpoint.id, flat, curvature.leading)
    else:
        found = back_project(job.projector.bind(rows), rows, checkpoint.id, flat)
    # For every gradient g and vector v, (s U'g)·v = g·(U s v), s being the factors.
    matrices, factors = scaling(job, moments, curvature, flat.device)
    for name, factor in factors.items():
        place = slice(rows.offset(name), rows.offset(name) + rows.size(name))
        back = {axis: matrix.T for axis, matrix in matrices[name].items()} if matrices else {}
        found[:, place] = rotated(found[:, place] * factor, rows.shape(name), back)
    return found.numpy()[..., None]


def _tasks(
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
        _shared(prepared.job, token), None,
        _weights(prepared.job, token), "c",
        _starts(prepared.rows, token), "s",  # so that errors can name samples
        *more, *chain.from_iterable(inputs),
        dtype=dtype, meta=np.empty((0,) * len(index), dtype=dtype), concatenate=True,
        align_arrays=False,  # all chunks match; aligning would warn about the outer product
        **options,
    )  # fmt: skip
    return tasks


def _shared(job: Job, token: str) -> Any:
    """Return what all blocks share as one task, so that a graph does not grow with their number."""
    shared = replace(job, model=job.model.without_checkpoints())
    return dask.delayed(shared, name=f"job-{token}", traverse=False)


def _weights(job: Job, token: str) -> da.Array:
    """Return each checkpoint, with its second moments and its curvature, as one task.

    They may be in memory, and large.
    """
    weights = np.empty(len(job.model.checkpoints), object)
    for i, checkpoint in enumerate(job.model.checkpoints):
        name = checkpoint.name
        weights[i] = checkpoint, job.model.second_moments.get(name), job.model.curvature.get(name)
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


def _others(job: Job, tasks: da.Array, index: str, token: str) -> Arrays:
    others: dict[str, Any] = {} if job.partition else {"feature_norm": np.dtype(np.float64)}
    others |= dict.fromkeys(("output", "out_to_loss"), np.dtype(np.float32))
    if job.on_error == "record":
        others["error"] = ERROR_DTYPE
    return {
        name: _taken(tasks, index, "sc", item, f"{name}-{token}", dtype)
        for item, (name, dtype) in enumerate(others.items(), start=1)
    }


def _taken(
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
