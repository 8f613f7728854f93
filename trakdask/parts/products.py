"""The parts of samples, their tokens or groups of modules, whose features are multiplied."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import dask.array as da
import numpy as np
import torch
import xarray as xr
from dask.base import tokenize

from trakdask.checks import shown
from trakdask.featurization.block import run_samples, running
from trakdask.featurization.graphs import (
    GraphInputs,
    block_tasks,
    checkpoint_items,
    other_variables,
    shared_task,
    variable_of,
)
from trakdask.featurization.job import FeaturizeJob, Partition
from trakdask.featurization.preparation import prepare, projector_of
from trakdask.models.layers import require_layers_of_tokens
from trakdask.models.model import Model
from trakdask.models.modules import select_parameters
from trakdask.models.plans import has_pooled_layers
from trakdask.models.tasks import Batch, Forward
from trakdask.models.tasks.logits import MASK
from trakdask.projection.maps import Maps, Stream
from trakdask.provenance import as_text, require_comparable
from trakdask.samples.token_texts import Text, token_texts
from trakdask.variables import CHECKPOINT, MODULE, PROJ_DIM, SAMPLE, TOKEN

OTHERS = "others"
"""Name of the part with the parameters that no given part has."""
_VECTOR_BYTES = 2**28
_TEXT_DTYPE = np.dtypes.StringDType()


def divide(
    samples: xr.Dataset,
    model: Model,
    *,
    parts: Any,
    features: xr.Dataset,
    text: Text | None,
    on_error: str,
) -> tuple[GraphInputs, xr.Dataset]:
    """Divide samples into parts, whose features can be multiplied without being computed.

    They are to be multiplied with vectors of ``features``; ``text`` is a coord of tokens.

    Returns
    -------
    The inputs of a graph, and a Dataset with the coords and attrs of features of the parts,
    with zeros as ``feature``.
    """
    by_token = isinstance(parts, str) and parts == TOKEN
    if text is not None and not by_token:
        raise ValueError(
            f"expected text= with parts='token' only, got it with parts={shown(parts)}; try "
            "leaving text out"
        )
    projector_of(features).projector.require_back_projection()
    prepared = prepare(
        samples,
        model,
        like=features,
        on_error=on_error,
        divide=_tokens if by_token else functools.partial(_modules, parts),
    )
    job, rows = prepared.job, prepared.rows
    assert job.partition is not None
    shape = (sum(rows), job.partition.size, job.proj_dim, len(job.model.checkpoints))
    # Nobody computes these: they only give scores their dimensions and coords.
    zeros = da.zeros(shape, dtype=np.float32, chunks=(rows, -1, -1, 1))
    dims = (SAMPLE, job.partition.dim, PROJ_DIM, CHECKPOINT)
    like = xr.Dataset(
        {"feature": (dims, zeros)}, coords=prepared.coords, attrs=as_text(prepared.attrs)
    )
    require_comparable(features, like, name="parts'")
    names = {MODULE: (MODULE, np.array(job.partition.names, dtype=object))}
    return prepared, like.assign_coords(_token_coords(prepared, text) if by_token else names)


def _tokens(model: Model, inputs: dict[str, da.Array]) -> Partition:
    """Divide sequences into tokens."""
    name, first = next(iter(inputs.items()))
    if first.ndim < 2 or first.shape[1] < 1:
        raise ValueError(
            f"expected sequences (sample, token) as the first input, as parts='token' needs, got "
            f"{name!r} of shape {first.shape}; try parts= with names of modules"
        )
    module, names = model.meta_module(), tuple(model.shapes)
    require_layers_of_tokens(module, names)
    one = {name: torch.tensor(np.zeros((1, *a.shape[1:]), a.dtype)) for name, a in inputs.items()}
    has_others = has_pooled_layers(module, model.task, one, names)
    return Partition(TOKEN, int(first.shape[1]) + has_others, has_others=has_others)


def _token_coords(
    prepared: GraphInputs, text: Text | None
) -> dict[str, tuple[tuple[str, str], da.Array]]:
    """Return ids and texts of tokens, if the first input of the model holds ids."""
    name, ids = next(iter(prepared.inputs.items()))
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        if text is None:
            return {}
        raise ValueError(
            f"expected token ids (sample, token) for text=, got {name!r} of {ids.dtype} and shape "
            f"{ids.shape}; try leaving text out, and assign_coords(text=...)"
        )
    assert prepared.job.partition is not None
    n_others = prepared.job.partition.size - ids.shape[1]

    def coord(values: da.Array, other: Any) -> Any:
        if n_others:
            # One column more, for the layers that do not see tokens.
            chunks, meta = (values.chunks[0], values.shape[1] + 1), values._meta
            values = da.map_blocks(_with_other, values, other, chunks=chunks, meta=meta)
        return (SAMPLE, TOKEN), values

    coords = {name: coord(ids.astype(np.int64) if n_others else ids, -1)}
    if MASK in prepared.inputs:
        coords[MASK] = coord(prepared.inputs[MASK], 1)
    if text is None:
        return coords
    token_texts(text)  # which checks it, rather than the tasks
    texts: da.Array = da.map_blocks(
        _text_of, ids, text=text,
        dtype=_TEXT_DTYPE, meta=np.empty((0, 0), _TEXT_DTYPE),
        name=f"text-{tokenize(ids.name, text)}",
    )  # fmt: skip
    return coords | {"text": coord(texts, f"[{OTHERS}]")}


def _with_other(values: np.ndarray, other: Any) -> np.ndarray:
    return np.concatenate([values, np.full((len(values), 1), other, values.dtype)], 1)


def _text_of(ids: np.ndarray, text: Text) -> np.ndarray:
    return np.array([*map(token_texts(text), ids.tolist())], _TEXT_DTYPE).reshape(ids.shape)


def _modules(parts: Any, model: Model, inputs: dict[str, da.Array]) -> Partition:
    """Divide parameters among parts, by globs or words; a last part has the others."""
    # 1. The globs of each part by its name.
    patterns: dict[str, Any] = {}
    if isinstance(parts, Mapping):
        patterns = dict(parts)
    elif isinstance(parts, Sequence) and not isinstance(parts, str):
        patterns = {word: f"*{word}*" for word in parts}
    are_names = all(isinstance(name, str) and name for name in patterns)
    if not patterns or not are_names or OTHERS in patterns:
        raise ValueError(
            f"expected parts='token', a list of words, or globs by the names of parts, none of "
            f"which is {OTHERS!r}, got {shown(parts)}; try parts=['attn', 'mlp'], or "
            "parts={'mlp': '*.mlp.*'}"
        )
    # 2. The parameters of each part, and the parts of each parameter, of which there is one.
    names = tuple(model.shapes)
    chosen = {
        title: set(select_parameters(model.meta_module(), globs)) & set(names)
        for title, globs in patterns.items()
    }
    titles = {name: [t for t, inside in chosen.items() if name in inside] for name in names}
    for title, inside in chosen.items():
        if not inside:
            raise ValueError(
                f"expected parameters of the model in each part, got {title!r}: {patterns[title]}, "
                "which selects no parameter that is differentiated; try globs of "
                f"{list(names)[:4]}"
            )
    for name, owners in titles.items():
        if len(owners) > 1:
            raise ValueError(
                f"expected each parameter in one part, got {name!r} in {owners[0]!r} and in "
                f"{owners[1]!r}; try globs that exclude each other"
            )
    # 3. The last part, if a parameter is in no other one, and the number of each parameter's part.
    parts = [*patterns, *([OTHERS] if [] in titles.values() else [])]
    groups = {name: parts.index((owners or [OTHERS])[0]) for name, owners in titles.items()}
    return Partition(MODULE, len(parts), groups, tuple(parts))


# -------------------------------------------------------------------------------------- products


def lazy_products(prepared: GraphInputs, vectors: da.Array) -> dict[str, da.Array]:
    """Build the graph of products of features with vectors, without the features.

    Parameters
    ----------
    prepared
        Samples and settings, with a partition.
    vectors
        The factors of the features, (vector, proj_dim, checkpoint), chunks (rows, p, 1).

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
    # 1. Vectors in the coordinates of parameters, (vector, row, checkpoint), once for all blocks.
    job, token = prepared.job, tokenize(prepared.token, vectors.name)
    n_rows = job.row_map.n_rows
    # A task has one chunk of them in memory, beside the model.
    chunked = vectors.rechunk({0: max(1, _VECTOR_BYTES // (4 * n_rows))})
    back = da.blockwise(
        _back_project, "vrc",
        shared_task(job, token), None, checkpoint_items(prepared, token), "c", chunked, "vpc",
        new_axes={"r": n_rows}, name=f"back-project-{token}", concatenate=True,
        align_arrays=False, dtype=np.float32, meta=np.empty((0, 0, 0), np.float32),
    )  # fmt: skip
    # 2. Their products, of one pass of the model for each block and chunk of vectors.
    unfitted = replace(prepared, fit={})  # the vectors are back in the coordinates of parameters
    tasks = block_tasks(_multiply_block, "svc", unfitted, token, back, "vrc")
    assert job.partition is not None
    new_axes = {"t": job.partition.size}
    product = variable_of(tasks, "svc", "stvc", 0, f"product-{token}", new_axes=new_axes)
    # All passes of a block give the same outputs.
    return {"product": product} | other_variables(job, tasks.blocks[:, :1], "svc", token)


def _back_project(job: FeaturizeJob, item: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Return the vectors to multiply gradients with, (vector, row, 1)."""
    checkpoint, fit = item.item()
    maps = Maps(job.projector, job.row_map, checkpoint.id, fit, torch.device("cpu"))
    return maps.back(torch.tensor(vectors[..., 0])).numpy()[..., None]


def _multiply_block(
    job: FeaturizeJob,
    item: np.ndarray,
    rows: tuple[slice],
    vectors: np.ndarray,
    *arrays: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Return products of gradients with vectors (vector, row, 1), in the place of features.

    Otherwise as ``featurize_block``. Products with a vector that is not finite are NaN.
    """
    (checkpoint, *_), flat = item.item(), torch.tensor(vectors[..., 0])
    is_finite = flat.isfinite().all(1)
    flat[~is_finite] = 0  # so that samples, which share the pass, are not taken for the cause
    with running(job, checkpoint, rows, arrays) as samples:
        places, flat = job.row_map, flat.to(samples.device)
        # Views of the vectors by parameter, (vector, *shape); scalars have an axis of length 1.
        by_name = {
            name: flat[:, places.offset(name) : places.offset(name) + places.size(name)].unflatten(
                1, places.shape(name) or (1,)
            )
            for name in places.names
        }

        def open_stream(forward: Forward, batch: Batch) -> Stream:
            assert job.partition is not None
            return job.partition.of(batch).products(by_name, batch.size)

        products, *others = run_samples(samples, checkpoint, len(flat), open_stream)
    products[..., ~is_finite.numpy(), :] = np.nan
    return products, *others
