"""What is reduced from saved features and stored beside them: gram matrix and loss gradient."""

from __future__ import annotations

import functools
import time
from typing import Any
from uuid import uuid4

import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize

from trakdask import arrays
from trakdask.arrays.blocks import Blocks, flat
from trakdask.attribution.estimators import Weights
from trakdask.execution import scheduling
from trakdask.storage.blocks import Done, Tasks, about, answer, run, storing
from trakdask.storage.parts import GRAM, LOSS_GRADIENT, Part
from trakdask.storage.zarr_stores import Writable

__all__ = ["reduced", "save_reductions"]


def save_reductions(
    part: Part, features: xr.Dataset, weights: Weights, index: int, retries: int = 0
) -> Done:
    """Reduce features of a checkpoint as they are stored, and store the result."""
    topic = f"trakdask-{uuid4().hex}"
    missing = functools.partial(_missing, part, features, weights, index, topic)
    compute = functools.partial(run, topic=topic)
    return scheduling.run(missing, retries=retries, compute=compute) or Done()


def _missing(part: Part, features: xr.Dataset, weights: Weights, index: int, topic: str) -> Tasks:
    matrices = reduced(features, weights, index)
    name = f"save-gram-{tokenize(part.digest, part.folder.url, matrices)}"
    written = da.blockwise(
        functools.partial(_write, part, part.writable(weights.sums), index, topic), "c",
        *(item for matrix in matrices for item in (matrix, "pqc" if matrix.ndim == 3 else "pc")),
        dtype=object, meta=np.empty(0, object), concatenate=False, align_arrays=False, name=name,
    )  # fmt: skip
    return Tasks(written.dask, ((written.name, 0),))


def reduced(features: xr.Dataset, weights: Weights, index: int) -> tuple[da.Array, ...]:
    """Return ``weights.sums`` over features at one checkpoint, lazy."""
    feature = features.feature.data[:, :, index : index + 1]
    h = weights.gram_data(features)
    h = None if h is None else h[:, index : index + 1]
    if LOSS_GRADIENT not in weights.sums:
        return (arrays.gram.gram(feature, h),)
    g = arrays.gram.pooled(weights.loss_data(features))[:, None]
    return arrays.gram.gram_and_sum(feature, h, g)


def _write(
    part: Part, sums: Writable, index: int, topic: str, *matrices: Blocks
) -> np.ndarray[Any, Any]:
    started = time.time()
    with storing(part, f"the gram matrix of checkpoint {index}"):
        values = {n: m for n, each in zip(sums.known, matrices, strict=True) for m in flat(each)}
        files = sums.write(values, (..., slice(index, index + 1)))
        part.write_record(index, GRAM, files, about(started))
    return answer({}, topic)
