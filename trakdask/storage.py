"""Stores of features, written block by block and resumed by their completion records.

A store is a zarr v3 group with the features, the coords and the gram matrices, and a sub-group
``records`` with one small JSON file per completed (sample block × checkpoint). The file is written
after the block's chunks and renamed into place: presence of a record means a complete block;
presence of a chunk means nothing.
"""

from __future__ import annotations

import functools
import json
import os
import re
from dataclasses import dataclass
from typing import Any

import dask
import dask.array as da
import fsspec
import numpy as np
import xarray as xr
import zarr
from dask.base import tokenize

from trakdask import arrays
from trakdask.arrays.blocks import Blocks, flat
from trakdask.errors import IncompleteFeaturesError, StoreMismatchError
from trakdask.estimators import (
    DEFAULT_ESTIMATOR,
    Estimator,
    Weights,
    estimator_weights,
    require_estimator,
)
from trakdask.locations import location
from trakdask.progress import polled_bar
from trakdask.provenance import FEATURE_SPEC, digest, require_same, spec
from trakdask.variables import (
    CHECKPOINT,
    PROJ_DIM,
    SAMPLE,
    VARIABLES,
    lazy_features,
    load_coords,
    validate,
)

__all__ = ["open", "save"]

FEATURE_NAMES = ("feature", "output", "out_to_loss")
_RECORDS = "records"
_GRAM = "gram"
_LOSS_GRADIENT = "loss_gradient"


def save(
    features: xr.Dataset,
    store: str | os.PathLike[str],
    *,
    gram: bool = True,
    estimator: Estimator = DEFAULT_ESTIMATOR,
    power: float = 0.5,
    progress: bool = True,
) -> xr.Dataset:
    """Compute features into a zarr store, block by block; go on where an earlier call stopped.

    Runs on the active Dask client, or on threads. Each checkpoint is one submission; each task
    stores its block and then a completion record, so that killing anything loses the blocks in
    flight and nothing else, and calling again computes only what is missing.

    Parameters
    ----------
    features
        Lazy Dataset of :func:`featurize`.
    store
        Folder or fsspec URL; all workers must reach it.
    gram
        Also reduce and keep the gram matrix of each checkpoint, which every score of these
        (training) samples needs. Targets need none.
    estimator, power
        Which :func:`score` the gram matrix is for; for ``"soft"`` the sum of the weighted features,
        ``loss_gradient``, is kept beside it. Other estimators can still be scored: they reduce
        theirs from the features.
    progress
        Show a bar of completed blocks.

    Returns
    -------
    What :func:`open` returns: the saved features, lazy.

    Raises
    ------
    StoreMismatchError
        If the store holds features that were made differently; the differing field is named.
    FileExistsError
        If the store holds something else.
    ValueError
        If sample chunks are unequal, so that blocks would not be chunks of the store.
    BlockError
        If a block fails; completed blocks stay.

    Notes
    -----
    zarr v3, uncompressed (features do not compress), one chunk per block, NaN fill.
    """
    validate(features, FEATURE_NAMES, what="features")
    features = lazy_features(features)
    plan = _plan(features, location(store))
    require_estimator(estimator)
    kept = estimator_weights(features, estimator, power) if gram else None
    _create_or_check(plan, features, kept)
    total = len(plan.checkpoints) * (plan.n_blocks + gram)
    title = f"save {plan.store.rpartition('/')[2]}"
    with polled_bar(title, total, plan.count_done, show=progress):
        for index in range(len(plan.checkpoints)):
            _save_checkpoint(plan, features, index)
        if kept is not None:  # after all features: score weights are means over checkpoints
            for index in range(len(plan.checkpoints)):
                _save_gram(plan, kept, index)
    return open(store)


def open(store: str | os.PathLike[str], *, require_complete: bool = True) -> xr.Dataset:
    """Open saved features as a lazy Dataset; metadata coords are loaded, arrays are not.

    Parameters
    ----------
    store
        Folder or fsspec URL that :func:`save` wrote.
    require_complete
        Refuse a store that lacks blocks: they would read as NaN.

    Returns
    -------
    Dataset with ``feature`` (sample, proj_dim, checkpoint), ``output`` and ``out_to_loss`` (sample,
    checkpoint) and, if saved, ``gram`` (proj_dim, proj_dim_1, checkpoint) and ``loss_gradient``
    (proj_dim, checkpoint); ``sample`` has no index.

    Raises
    ------
    FileNotFoundError
        If there is no such store.
    IncompleteFeaturesError
        If blocks are missing.
    """
    path = location(store)
    try:
        ds = xr.open_zarr(path, consolidated=False, chunks={})
    except (FileNotFoundError, KeyError) as err:
        raise FileNotFoundError(
            f"there is no store {path!r}; needed a folder that td.save wrote. Check the path."
        ) from err
    if "layout" not in ds.attrs:
        raise FileNotFoundError(
            f"{path!r} is a zarr store without features; needed one that td.save wrote. "
            "Open other zarr stores with xarray.open_zarr."
        )
    if require_complete:
        plan = _Plan(path, spec(ds), ds.attrs["layout"])
        _require_complete(plan, has_gram=_GRAM in ds)
    names = [name for name in (*FEATURE_NAMES, _GRAM, _LOSS_GRADIENT) if name in ds]
    return load_coords(ds[names])


@dataclass(frozen=True)
class _Plan:
    """Where the blocks of one feature set go, and which are there."""

    store: str
    spec: dict[str, Any]
    layout: dict[str, int]

    @property
    def checkpoints(self) -> list[str]:
        return [f"{int(id):08x}" for id in self.spec["checkpoint_ids"].values()]

    @property
    def n_blocks(self) -> int:
        return -(-self.layout["samples"] // self.layout["block"])

    @property
    def digest(self) -> str:
        return digest({"spec": self.spec, "layout": self.layout})

    def folder(self, index: int) -> str:
        return f"{self.store}/{_RECORDS}/{self.digest[:16]}/{self.checkpoints[index]}"

    def done(self, index: int) -> set[str]:
        """Names of the completed blocks of a checkpoint: block numbers, and "gram"."""
        fs, path = fsspec.core.url_to_fs(self.folder(index))
        fs.invalidate_cache()
        names = fs.ls(path, detail=False) if fs.exists(path) else []
        return {n.rpartition("/")[2].removesuffix(".json") for n in names if n.endswith(".json")}

    def count_done(self) -> int:
        return sum(len(self.done(index)) for index in range(len(self.checkpoints)))


def _plan(features: xr.Dataset, store: str) -> _Plan:
    """Plan a store; a selection of samples is told apart from the whole.

    ``attrs`` follow a selection unchanged. But only what featurize itself named is the whole: dask
    names everything made of it.
    """
    if missing := [name for name in FEATURE_SPEC if name not in features.attrs]:
        raise ValueError(
            f"features have no attrs {missing}; needed what td.featurize writes there, since a "
            "store is known by it. Keep them: features.assign_attrs(original.attrs)."
        )
    described = spec(features)
    name = features.feature.data.name
    if not re.fullmatch(r"feature-[0-9a-f]{32}", name):
        described["source"] = f"{described.get('source', '')}/{name}"
    return _Plan(store, described, _layout(features))


def _layout(features: xr.Dataset) -> dict[str, int]:
    chunks = features.feature.variable.chunksizes.get(SAMPLE, (features.sizes[SAMPLE],))
    if len(set(chunks[:-1])) > 1 or chunks[-1] > chunks[0]:
        raise ValueError(
            f"features have the sample chunks {chunks[:4]}...; needed equal ones (the last may be "
            "smaller), since each is one chunk of the store. Use "
            f"features.chunk(sample={chunks[0]})."
        )
    return {"samples": sum(chunks), "block": chunks[0]}


def _create_or_check(plan: _Plan, features: xr.Dataset, kept: Weights | None) -> None:
    """Make the store once, or check that the one there is ours and was made in the same way."""
    fs, path = fsspec.core.url_to_fs(plan.store)
    if not fs.exists(path) or not fs.ls(path):
        _create(plan, features, kept)
        return
    try:
        group = zarr.open_group(plan.store, mode="r")
    except (FileNotFoundError, KeyError, ValueError) as err:
        raise FileExistsError(
            f"{plan.store!r} exists and is no feature store; needed a new path, or a store to "
            "resume. Choose another path."
        ) from err
    attrs = dict(group.attrs)
    if "layout" not in attrs:
        raise FileExistsError(
            f"{plan.store!r} is a zarr store without features; needed a new path, or a feature "
            "store to resume. Choose another path."
        )
    names = (*FEATURE_SPEC, "source", "layout")
    ours = {**plan.spec, "layout": plan.layout}
    require_same(ours, attrs, what=f"these features and the store {plan.store!r}", names=names)
    if _RECORDS not in group:  # killed while it was made: nothing can have been written
        _create(plan, features, kept)
    elif kept:
        _require_place(plan, group, kept)


def _require_place(plan: _Plan, group: zarr.Group, kept: Weights) -> None:
    if _GRAM not in group:
        made, needed = "gram=False", "a place for the gram matrices"
    else:
        weights = group[_GRAM].attrs.get("gram_weights", "1")
        if weights == kept.gram and all(name in group for name in kept.sums):
            return
        made = f"gram weights {weights!r} and keeps {[n for n in kept.sums if n in group]}"
        needed = f"{kept.gram!r} and {list(kept.sums)}"
    raise StoreMismatchError(
        f"the store {plan.store!r} was made with {made}; needed {needed}. Type "
        "td.save(features, store, gram=False), and td.score will reduce them when computed."
    )


def _create(plan: _Plan, features: xr.Dataset, kept: Weights | None) -> None:
    """Write metadata and coords of the whole store; the records group last: a mark of success."""
    template = features[list(FEATURE_NAMES)].drop_attrs(deep=False)
    template = template.assign_attrs({**features.attrs, **plan.spec, "layout": plan.layout})
    template = template.map(_empty_like, keep_attrs=True)
    if kept is not None:
        empty = {name: _empty_kept(name, template, kept) for name in kept.sums}
        template = template.assign(empty)
    encoding = {name: _encoding(template[name], plan) for name in template.data_vars}
    template.to_zarr(
        plan.store, mode="w", compute=False, consolidated=False, zarr_format=3, encoding=encoding
    )
    zarr.open_group(plan.store, mode="r+").create_group(_RECORDS)


def _empty_like(array: xr.DataArray) -> xr.DataArray:
    """One chunk that is never computed: the template's graph must not grow with the store."""
    return array.copy(data=da.empty(array.shape, chunks=array.shape, dtype=array.dtype))


def _empty_kept(name: str, template: xr.Dataset, weights: Weights) -> xr.DataArray:
    variable = VARIABLES[name]
    p, c = template.sizes[PROJ_DIM], template.sizes[CHECKPOINT]
    shape = (p,) * (len(variable.dims) - 1) + (c,)
    dtype = np.result_type(arrays.gram.accumulation_dtype(p), template.feature.dtype)
    data = da.empty(shape, chunks=shape, dtype=dtype)
    attrs = variable.attrs | weights.attrs(template)
    return xr.DataArray(data, dims=variable.dims, attrs=attrs)


def _encoding(array: xr.DataArray, plan: _Plan) -> dict[str, Any]:
    sizes = {SAMPLE: plan.layout["block"], CHECKPOINT: 1}
    chunks = tuple(sizes.get(str(dim), size) for dim, size in array.sizes.items())
    return {"chunks": chunks, "compressors": None, "_FillValue": np.nan}


def _save_checkpoint(plan: _Plan, features: xr.Dataset, index: int) -> None:
    done = plan.done(index)
    todo = [block for block in range(plan.n_blocks) if str(block) not in done]
    if not todo:
        return
    blocks = [features[name].data for name in FEATURE_NAMES]
    feature, output, out_to_loss = blocks
    token = digest({"store": plan.store, "of": feature.name, "checkpoint": index, "todo": todo})
    written = da.blockwise(
        functools.partial(_write_block, plan, index), "s",
        feature.blocks[todo, :, index], "spc",
        output.blocks[todo, index], "sc",
        out_to_loss.blocks[todo, index], "sc",
        da.from_array(np.array(todo), chunks=1), "s",
        name=f"save-{token[:32]}",
        concatenate=True, align_arrays=False, adjust_chunks={"s": 1},
        dtype=bool, meta=np.empty(0, bool),
    )  # fmt: skip
    dask.compute(written)


def _write_block(plan: _Plan, index: int, *blocks: np.ndarray) -> np.ndarray:
    *values, (block,) = blocks
    group = zarr.open_group(plan.store, mode="r+")
    start = int(block) * plan.layout["block"]
    rows = slice(start, start + len(values[0]))
    for name, value in zip(FEATURE_NAMES, values, strict=True):
        _array(group, name)[(rows, ..., slice(index, index + 1))] = value
    _write_record(plan, index, str(block))
    return np.ones(1, bool)


def _save_gram(plan: _Plan, kept: Weights, index: int) -> None:
    """Reduce what is kept from the stored features, not from the graph that made them."""
    if _GRAM in plan.done(index):
        return
    stored = xr.open_zarr(plan.store, consolidated=False, chunks={})
    feature = stored.feature.data[:, :, index : index + 1]
    h = kept.gram_data(stored)
    h = None if h is None else h[:, index : index + 1]
    if _LOSS_GRADIENT in kept.sums:
        g = arrays.gram.pooled(kept.loss_data(stored))[:, None]
        matrices: tuple[da.Array, ...] = arrays.gram.gram_and_sum(feature, h, g)
    else:
        matrices = (arrays.gram.gram(feature, h),)
    name = f"save-gram-{tokenize(plan.digest, plan.store, matrices)}"
    written = da.blockwise(
        functools.partial(_write_kept, plan, kept.sums, index), "c",
        *(item for matrix in matrices for item in (matrix, "pqc" if matrix.ndim == 3 else "pc")),
        dtype=bool, meta=np.empty(0, bool), concatenate=False, align_arrays=False, name=name,
    )  # fmt: skip
    dask.compute(written)


def _write_kept(plan: _Plan, names: tuple[str, ...], index: int, *matrices: Blocks) -> np.ndarray:
    group = zarr.open_group(plan.store, mode="r+")
    for name, matrix in zip(names, matrices, strict=True):
        (_array(group, name)[..., index : index + 1],) = flat(matrix)
    _write_record(plan, index, _GRAM)
    return np.ones(1, bool)


def _array(group: zarr.Group, name: str) -> zarr.Array[Any]:
    array = group[name]
    assert isinstance(array, zarr.Array)
    return array


def _write_record(plan: _Plan, index: int, name: str) -> None:
    fs, folder = fsspec.core.url_to_fs(plan.folder(index))
    fs.makedirs(folder, exist_ok=True)
    record = json.dumps({"spec": plan.digest, "block": name}).encode()
    # Renamed into place, so that a record is either absent or whole.
    partial = f"{folder}/{name}.{os.getpid()}.partial"
    fs.pipe_file(partial, record)
    fs.mv(partial, f"{folder}/{name}.json")


def _require_complete(plan: _Plan, *, has_gram: bool) -> None:
    total = len(plan.checkpoints) * (plan.n_blocks + has_gram)
    if (done := plan.count_done()) < total:
        raise IncompleteFeaturesError(
            f"the store {plan.store!r} has {done} of {total} blocks; needed all, since the rest "
            f"reads as NaN. Type td.save(features, {plan.store!r}) to compute what is missing, or "
            "td.open(store, require_complete=False) to look at it."
        )
