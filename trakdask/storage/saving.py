"""Compute features into a store, block by block; go on where an earlier call stopped."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import xarray as xr

from trakdask.arrays.weights import squared_norm
from trakdask.attribution.dampings import require_calibration
from trakdask.attribution.estimators import (
    DEFAULT_ESTIMATOR,
    DEFAULT_POWER,
    Estimator,
    Power,
    Weights,
    resolve_estimator,
)
from trakdask.attribution.grams import NORM
from trakdask.errors import StoreMismatchError
from trakdask.execution.progress import polled_bar
from trakdask.files import Folder, is_partial
from trakdask.provenance import STORE_SPEC, require_same
from trakdask.storage.appending import AppendDim, appended
from trakdask.storage.blocks import save_blocks, stored, storing
from trakdask.storage.coords import (
    portable_coords,
    require_names,
    require_same_coords,
    restore_coords,
)
from trakdask.storage.factors import MOST_DIM, calibrated_options, update_if_possible
from trakdask.storage.history import record_run
from trakdask.storage.lease import lease
from trakdask.storage.opening import open
from trakdask.storage.parts import ERROR, GRAM, Part, create, described
from trakdask.storage.reductions import save_reductions
from trakdask.storage.snapshot import Snapshot, require_ours, snapshot
from trakdask.storage.verification import completed_blocks, faults, withdraw
from trakdask.storage.zarr_stores import read_attributes
from trakdask.variables import (
    CHECKPOINT,
    PROJ_DIM,
    SAMPLE,
    VARIABLES,
    lazy_features,
    load_coords,
    validate,
)

__all__ = ["save"]

_log = logging.getLogger(__name__)


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
        that it has (those that it has already are left out), as xarray's ``append_dim`` does. They
        lie beside what is there, which nobody rewrites; the gram matrix is that of the first plus
        that of the new. Appending a checkpoint to several sets of samples takes one call for each:
        until the last, :func:`open` shows the store without it, with a warning. An append that was
        cut short has to be finished, by the same call, before another begins.
    dtype
        ``"float16"`` stores features in half the bytes, with an exact power of two for each sample
        and checkpoint: no element is off by more than 2^-11 of the largest of its row.
        :func:`open` gives float32 again.
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
        differing field or coord is named. :func:`assign_coords` changes coords of a store.
    StoreBusyError
        If another process writes the store.
    FileExistsError
        If the store holds something else.
    IncompleteFeaturesError
        If an append is asked for while the store lacks blocks of something else.
    ValueError
        If sample chunks are unequal, so that blocks would not be chunks of the store; if a coord
        has a name that cannot be that of a folder; if there are symbolic links in the store.
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

    Resuming lists the store once: a record counts if the files of its block have their full size;
    :func:`verify` compares their contents, too. Any workers, scheduler and micro-batch may resume
    a store, with the same blocks of samples. Chunks are not forced onto the disk: after a
    power failure, type ``td.verify(store, checksums=True)``.

    λ and the eigenvectors are computed once, after the gram matrices: one eigendecomposition per
    checkpoint, about 9 p³ flops and 32 p² bytes in a task, and 8 p² bytes in the store (above
    proj_dim 8192 :func:`calibrate` makes them). A query then costs two small products instead, and
    no λ is chosen anew. An append or a drop renews them, those of checkpoints that changed.

    A cluster blames a block for the death of its worker, and gives it up after
    ``distributed.scheduler.allowed-failures`` (3) of them. Where machines are taken away at any
    time, set it to 10 or more in the configuration of the scheduler, before that starts; setting it
    in a notebook does nothing for a scheduler that runs elsewhere.
    """
    validate(features, ["feature", "output", "out_to_loss"], what="features")
    _require_options(features, dtype, append_dim, retries, gram=gram, progress=progress)
    if calibrate is not None:
        _require_calibration(features, estimator, power, calibrate, gram=gram)
    weights = resolve_estimator(estimator, power, features).weights
    features = _storable(features)
    folder = Folder.at(store, storage_options)
    part = described(features, folder, dtype)
    is_there = require_ours(folder)  # nothing is written into what is no store, not even a lease
    with lease(folder, "td.save"):
        before = snapshot(folder) if is_there or require_ours(folder) else Snapshot(folder)
        if append_dim is not None and before.parts:
            part, features = appended(before, part, features, append_dim)
        if features.sizes[CHECKPOINT] > 0:
            done = _prepare(part, features, before, weights if gram else None)
            total = len(part.checkpoints) * (part.n_blocks + gram)
            title = f"save {folder.name}"
            with polled_bar(title, total, part.count_done, show=progress):
                _compute(part, features, before, weights if gram else None, done, retries)
        opened = open(store, storage_options=storage_options)
        if gram and GRAM in opened and features.sizes[PROJ_DIM] <= MOST_DIM:
            with storing(part, "the eigenvectors of the gram matrix"):
                opened = update_if_possible(folder, opened, calibrate=calibrate, retries=retries)
        folder.sweep()
    return opened


def _require_calibration(
    features: xr.Dataset, estimator: Estimator, power: Power, calibrate: xr.Dataset, *, gram: bool
) -> None:
    """Reject held-out samples that could not choose λ, before anything is computed."""
    if not gram:
        raise ValueError(
            "expected gram=True with calibrate, which chooses the λ of the gram matrix, got "
            "gram=False; try leaving calibrate out"
        )
    calibrated_options(features, estimator, power, calibrate)
    require_calibration(features, calibrate)


def _require_options(
    features: xr.Dataset, dtype: object, append_dim: object, retries: object, **flags: object
) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"expected {name}=True or False, got {value!r:.60}; try {name}=True")
    if not (dtype is None or (isinstance(dtype, str) and dtype == "float16")):
        raise ValueError(
            f"expected dtype='float16', or None for that of the features, got {dtype!r:.60}; try "
            "dtype=None"
        )
    if dtype == "float16" and features.feature.dtype != np.float32:
        raise ValueError(
            f"expected float32 features for dtype='float16', got {features.feature.dtype}; try "
            "features.assign(feature=features.feature.astype('float32'))"
        )
    if append_dim not in (None, SAMPLE, CHECKPOINT):
        raise ValueError(
            f"expected append_dim='sample', 'checkpoint' or None, got {append_dim!r:.60}; try "
            "append_dim=None for a new store"
        )
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise ValueError(f"expected retries as 0, 1, 2, ..., got {retries!r:.60}; try retries=2")
    for dim in (SAMPLE, PROJ_DIM, CHECKPOINT):
        if not features.sizes[dim]:
            raise ValueError(
                f"expected features with at least one {dim}, got {dict(features.sizes)}; try "
                "another selection"
            )


def _storable(features: xr.Dataset) -> xr.Dataset:
    """Return features with lazy arrays, and coords that a store can hold."""
    # Why samples failed is among the variables, as featurize has it.
    features = features.reset_coords(ERROR) if ERROR in features.coords else features
    features = load_coords(lazy_features(features))
    if NORM not in features:  # features that featurize did not make
        norm = squared_norm(features.feature.data)
        features = features.assign({NORM: (VARIABLES[NORM].dims, norm)})
    require_names(features.coords)
    return portable_coords(features)


def _prepare(
    part: Part, features: xr.Dataset, before: Snapshot, weights: Weights | None
) -> list[set[str]]:
    """Make the part; or check that it was made in the same way, and withdraw damaged blocks.

    Returns
    -------
    Names of the blocks that are done, for each checkpoint.
    """
    is_there = part.folder in [each.folder for each in before.parts]
    if not is_there and part.folder != before.folder:
        is_there = require_ours(part.folder)
    sizes = part.folder.sizes() if is_there else {}
    if is_there:
        _require_same(part, weights)
        for path in restore_coords(part, features, sizes):
            _log.warning("%s was damaged or lost: it was written again", path)
    coords = before.coords_of(part, list(map(str, features.coords)))
    if coords is not None:
        require_same_coords(features, coords, before.folder.url)
    if not is_there:
        with storing(part, "metadata"):
            create(part, features, weights)
        return [set() for _ in part.checkpoints]
    for path in filter(is_partial, sizes):
        part.folder.remove(path)
    done = completed_blocks(part, sizes)
    for fault in faults(part, sizes, done):
        _log.warning("%s: %s; its block is computed again", fault.path, fault.found)
        withdraw(part, fault)
        done[fault.checkpoint].discard(fault.block)
    return done


def _compute(
    part: Part,
    features: xr.Dataset,
    before: Snapshot,
    weights: Weights | None,
    done: Sequence[set[str]],
    retries: int,
) -> None:
    """Compute and store what is missing of a part: all blocks, then what is reduced from them."""
    with record_run(part) as steps:
        for index, known in enumerate(done):
            steps.append(save_blocks(part, features, index, known, retries))
        missing = [index for index, known in enumerate(done) if GRAM not in known]
        if weights is None or not missing:
            return
        saved = xr.Dataset(stored(part))
        if (dropped := before.dropped_of(part)).any():
            saved = saved.isel({SAMPLE: np.flatnonzero(~dropped)})
        for index in missing:  # after all blocks: score weights are means over checkpoints
            steps.append(save_reductions(part, saved, weights, index, retries))


def _require_same(part: Part, weights: Weights | None) -> None:
    """Reject features that were made in another way than those of the store."""
    ours, theirs = {**part.spec, "layout": part.layout}, read_attributes(part.folder)
    what = f"these features and the store {part.folder.url!r}"
    _require_source(part, theirs.get("source"), what)
    require_same(ours, theirs, what=what, names=(*STORE_SPEC, "layout"))
    if weights is None:
        return
    if GRAM not in part.arrays:
        made, needed = "gram=False", "arrays for gram matrices"
    else:
        arrays = [name for name in weights.sums if name in part.arrays]
        stored_weights = part.store().array(GRAM).attrs.get("gram_weights", "1")
        if stored_weights == weights.gram and arrays == list(weights.sums):
            return
        made = f"gram weights {stored_weights!r} and stores {arrays}"
        needed = f"{weights.gram!r} and {list(weights.sums)}"
    raise StoreMismatchError(
        f"expected a store with {needed}, got {part.folder.url!r}, which was made with {made}; try "
        "td.save(features, store, gram=False), and td.score will reduce them when computed"
    )


def _require_source(part: Part, known: object, what: str) -> None:
    if part.source != known:
        raise StoreMismatchError(
            f"expected the samples of the store, but {what} differ in source: got {part.source!r}, "
            f"the store has {known!r}; try another store, append_dim='sample' if these are more "
            f"samples of it, or, if the data are the same, samples.attrs['source'] = {known!r}"
        )
