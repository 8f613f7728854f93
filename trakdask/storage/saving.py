"""Compute features into a store, block by block; go on where an earlier call stopped."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import dask.array as da
import numpy as np
import xarray as xr

from trakdask.arrays.weights import squared_norm
from trakdask.attribution.estimators import (
    DEFAULT_ESTIMATOR,
    DEFAULT_POWER,
    Estimator,
    Power,
    gather_options,
)
from trakdask.attribution.grams import NORM, require_calibration
from trakdask.checks import require_choice
from trakdask.execution.progress import polled_bar
from trakdask.files import Folder
from trakdask.provenance import BY_CHECKPOINT, REQUIRED_SPEC
from trakdask.storage.blocks import missing_blocks, names_of, save_blocks
from trakdask.storage.group import ERROR, SCALE, STORE_ATTRS, Group
from trakdask.storage.lock import lock
from trakdask.storage.matching import (
    AppendDim,
    blockwise,
    joined,
    place,
    portable_coords,
    require_names,
    require_same_coords,
)
from trakdask.storage.reading import open
from trakdask.storage.sums import update_derived, weights_of
from trakdask.variables import (
    CHECKPOINT,
    PROJ_DIM,
    SAMPLE,
    VARIABLES,
    lazy_features,
    load_coords,
    validate,
)


def save(
    features: xr.Dataset,
    store: str | os.PathLike[str],
    *,
    gram: bool = True,
    estimator: Estimator = DEFAULT_ESTIMATOR,
    power: Power = DEFAULT_POWER,
    calibrate: xr.Dataset | None = None,
    append_dim: AppendDim | None = None,
    dtype: Literal["float16"] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = True,
    retries: int = 0,
) -> xr.Dataset:
    """Compute features into a zarr store, block by block; go on where an earlier call stopped.

    Runs on the active Dask client, or on threads. Each checkpoint is one submission, and each task
    stores its block, so that killing anything loses the blocks in flight and nothing else, and
    calling again computes only what is missing.

    Parameters
    ----------
    features
        Lazy Dataset of :func:`featurize`.
    store
        Folder or fsspec URL; all workers must reach it.
    gram
        Also store what every score of these (training) samples needs: the gram matrix of each
        checkpoint, its eigenvectors, and the damping λ. Targets need none of these.
    estimator, power
        Which :func:`score` the gram matrix is for; for ``"soft"`` the sum of the weighted features,
        ``loss_gradient``, is stored beside it. Other estimators can still be scored: they reduce
        theirs from the features.
    calibrate
        Features of 50 or more held-out samples whose outputs choose λ, as in :func:`damping`, for
        all scores of this store from now on. :func:`calibrate` does it afterwards.
    append_dim
        ``"sample"`` adds these samples to a store, ``"checkpoint"`` these checkpoints of samples
        that it has (those that it has already are left out), as xarray's ``append_dim`` does. The
        gram matrix is that of the first plus that of the new. Appending a checkpoint to several
        sets of samples takes one call for each: until the last, :func:`open` shows the store
        without it, with a warning. An append that was cut short has to be finished, by the same
        call, before another begins.
    dtype
        ``"float16"`` stores features in half the bytes, each row scaled by a power of two: no
        element is off by more than 2^-11 of the largest of its row. :func:`open` gives float32
        again.
    storage_options
        Given to fsspec with a URL, as xarray does.
    progress
        Show a bar of completed blocks.
    retries
        Further attempts at a block or a sum after an error, such as one of a network file system.

    Returns
    -------
    What :func:`open` returns: the saved features, lazy.

    Raises
    ------
    StoreMismatchError
        If the store holds features that were made differently, or coords with other values; the
        differing field or coord is named. :func:`assign_coords` changes coords of a store. Also if
        a block that is stored comes out differently when it is computed again.
    StoreBusyError
        If another process writes the store.
    FileExistsError
        If the store holds something else.
    IncompleteFeaturesError
        If an append is asked for while another is unfinished.
    ValueError
        If a coord has a name that cannot be that of a folder.
    TypeError
        If ``features`` is no Dataset, or a coord is of a kind that cannot be stored.
    BlockError
        If a block fails, or ends every worker process that it comes to; completed blocks stay.
    OSError
        If a block cannot be stored, with the reason; completed blocks stay.

    Notes
    -----
    zarr v3, uncompressed (features do not compress), one chunk per block with a CRC-32C that every
    reader checks, NaN fill.

    Resuming lists the store once. Any workers, scheduler, blocks and micro-batch may resume it. One
    block that is stored is computed again, the last, and compared: within 1 % of the length of its
    rows (10 % in 16 bits), because gradients may differ in their last digits between machines and
    batches. Chunks are not forced onto the disk: after a power failure, type
    ``td.verify(store, checksums=True)``.

    λ and the eigenvectors are computed once, after the gram matrices: one eigendecomposition per
    checkpoint, about 9 p³ flops and 32 p² bytes in a task, and 8 p² bytes in the store (above
    proj_dim 8192 :func:`calibrate` makes them). A query then costs two small products instead, and
    no λ is chosen anew. An append or a drop renews them, those of checkpoints that changed.

    Dask counts a worker's death against the task it was running, and gives the task up after
    ``distributed.scheduler.allowed-failures`` (3) of them. Where machines are taken away at any
    time, set it to 10 or more in the configuration of the scheduler, before that starts; setting it
    in a notebook does nothing for a scheduler that runs elsewhere.
    """
    validate(features, ("feature", "output", "out_to_loss"), what="features")
    _require_options(features, dtype, append_dim)
    if calibrate is not None:
        if not gram:
            raise ValueError(
                "expected gram=True with calibrate, which chooses the λ of the gram matrix, got "
                "gram=False; try leaving calibrate out"
            )
        gather_options(features, estimator, power, "auto", calibrate)
        require_calibration(features, calibrate)
    weights = gather_options(features, estimator, power).weights if gram else None
    features = _storable(features)
    folder = Folder.at(store, storage_options)
    _is_store(folder)  # nothing is written into what is no store, not even a lock
    with lock(folder, "td.save") as require_held:
        before = Group.read(folder) if _is_store(folder) else _new_group(folder, features, dtype)
        begun = before.attrs.get("unfinished")
        features = _with_errors(before, features)
        rows = place(before, features, append_dim, dtype)
        if rows.stop <= before.n_samples:
            require_same_coords(before, features, rows)
        coords = joined(before, features, rows)
        if before.attrs.get("unfinished") != begun:
            # Before the first block of an append is written it is on record, so that whoever reads
            # the store, or goes on after a kill, knows what the further chunks are.
            before.commit()
        folder.sweep()
        group = before.target()
        columns = {n: i for i, n in enumerate(group.checkpoints) if n in names_of(features)}
        first, last = rows.start // group.block, (rows.stop - 1) // group.block

        def count() -> int:
            stored = group.stored_chunks("out_to_loss")
            return sum(c in columns.values() and first <= b <= last for b, c in stored)

        total = (last - first + 1) * len(columns)
        with polled_bar(f"save {folder.name}", total, count, show=progress):
            save_blocks(group, features, rows, columns, retries)
        if not _lacks_blocks(group):
            group.attrs.pop("lacking", None)
            group.write_small(coords)
            is_same = (group.n_samples, group.checkpoints) == (before.n_samples, before.checkpoints)
            weights = weights or (weights_of(before) if is_same else None)
            update_derived(before, group, weights, calibrate, retries=retries)
            if (group.arrays, group.attrs) != (before.arrays, before.attrs):
                require_held()  # while this process slept, another one may have taken it for dead
                group.commit()
                group.sweep()
        return open(store, storage_options=storage_options)


def _require_options(features: xr.Dataset, dtype: object, append_dim: object) -> None:
    if dtype is not None:
        require_choice("dtype", dtype, ("float16",), remedy="try dtype=None for that of features")
        if features.feature.dtype != np.float32:
            raise ValueError(
                f"expected float32 features for dtype='float16', got {features.feature.dtype}; try "
                "features.assign(feature=features.feature.astype('float32'))"
            )
    if append_dim is not None:
        remedy = "try append_dim=None for a new store"
        require_choice("append_dim", append_dim, (SAMPLE, CHECKPOINT), remedy=remedy)
    if not all(features.sizes.values()):
        raise ValueError(
            f"expected features with samples and checkpoints, got {dict(features.sizes)}; try "
            "another selection"
        )
    if missing := [name for name in REQUIRED_SPEC if name not in features.attrs]:
        raise ValueError(
            f"expected attrs as td.featurize writes them, by which a store is known, got none of "
            f"{missing}; try features.assign_attrs(original.attrs)"
        )
    names = names_of(features)
    if len(set(names)) < len(names) or not set(names) <= set(features.attrs["checkpoints"]):
        raise ValueError(
            f"expected checkpoints of {list(features.attrs['checkpoints'])} (attrs), each once, "
            f"got {names}; try another selection of checkpoints"
        )


def _storable(features: xr.Dataset) -> xr.Dataset:
    """Return features with lazy arrays, and coords that a store can hold."""
    # Why samples failed is among the variables, as featurize has it.
    features = features.reset_coords(ERROR) if ERROR in features.coords else features
    features = load_coords(lazy_features(features))
    if NORM not in features:
        norm = squared_norm(features.feature.data)
        features = features.assign({NORM: (VARIABLES[NORM].dims, norm)})
    require_names(features.coords)
    return portable_coords(features)


def _is_store(folder: Folder) -> bool:
    """Return whether there is a store; raise if there is something else."""
    names = {*folder.names()} - {"lock"}
    if names:
        try:
            Group.read(folder)
        except FileNotFoundError as err:
            raise FileExistsError(
                f"expected a new path or a store of features, got {folder.url!r}, which holds "
                f"{sorted(names)[:3]}; try another path"
            ) from err
    return bool(names)


def _new_group(folder: Folder, features: xr.Dataset, dtype: str | None) -> Group:
    """Return the group of a new store: all arrays of features, without a sample."""
    block = max(features.feature.variable.chunksizes[SAMPLE])
    dropped = {*STORE_ATTRS, "saved", *BY_CHECKPOINT, "source"}
    attrs = {k: v for k, v in features.attrs.items() if k not in dropped}
    attrs |= {"source": "", "n_samples": 0, "sources": [], "checkpoints": {}, "checkpoint_ids": {}}
    group = Group(folder, attrs, {})
    sizes = {SAMPLE: 0, CHECKPOINT: 0, PROJ_DIM: features.sizes[PROJ_DIM]}
    dtypes = {name: features[name].dtype for name in blockwise(features)}
    if dtype:
        dtypes |= {"feature": np.dtype(dtype), SCALE: np.dtype("f8")}
    for name, of_array in dtypes.items():
        group.add(name, sizes, of_array, block=block)
    return group


def _with_errors(group: Group, features: xr.Dataset) -> xr.Dataset:
    """Return features that say where samples failed if the store does, and let it if they do."""
    if ERROR not in group.arrays and ERROR in features:
        sizes = {SAMPLE: group.n_samples, CHECKPOINT: len(group.checkpoints)}
        group.add(ERROR, sizes, np.dtypes.StringDType(), block=group.block)
    if ERROR in features or ERROR not in group.arrays:
        return features
    none = da.full_like(features.output.data, "", dtype=np.dtypes.StringDType())
    return features.assign({ERROR: (VARIABLES[ERROR].dims, none)})


def _lacks_blocks(group: Group) -> bool:
    """Return whether blocks are missing of what a store is to have."""
    stored, columns = group.stored_chunks("out_to_loss"), range(len(group.checkpoints))
    return any(
        missing_blocks(group, rows, index, stored)
        for _, rows in group.rows_of_sources()
        for index in columns
    )
