"""Compute features into a store, block by block; go on where an earlier call stopped."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import xarray as xr
import zarr

from trakdask.attribution.estimators import (
    DEFAULT_ESTIMATOR,
    Estimator,
    Weights,
    resolve_estimator,
)
from trakdask.attribution.options import gather_options
from trakdask.attribution.regularization import require_calibration
from trakdask.errors import StoreMismatchError
from trakdask.execution.progress import polled_bar
from trakdask.files import Folder
from trakdask.provenance import EARLIER_SOURCE, STORE_SPEC, require_same
from trakdask.storage.blocks import save_checkpoint, storing
from trakdask.storage.coords import (
    portable_coords,
    require_names,
    require_same_coords,
    restore_coords,
)
from trakdask.storage.factors import MOST_DIM, update_if_possible
from trakdask.storage.failures import as_variable
from trakdask.storage.lease import PREFIX, lease
from trakdask.storage.opening import open
from trakdask.storage.parts import AppendDim, appended, coords_of, dropped_rows, pieces
from trakdask.storage.piece import FEATURE_NAMES, RECORDS, Piece, describe
from trakdask.storage.runs import recorded_run
from trakdask.storage.sums import save_sums
from trakdask.storage.template import UNFINISHED, create, require_place
from trakdask.storage.verification import faults, withdraw
from trakdask.storage.zarr_stores import zarr_store
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, lazy_features, validate

__all__ = ["save"]

_log = logging.getLogger(__name__)


def save(
    features: xr.Dataset,
    store: str | os.PathLike[str],
    *,
    gram: bool = True,
    estimator: Estimator = DEFAULT_ESTIMATOR,
    power: float = 0.5,
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
    validate(features, FEATURE_NAMES, what="features")
    _require_options(features, dtype, append_dim, retries, gram=gram, progress=progress)
    if calibrate is not None:
        _require_calibration(features, estimator, power, calibrate, gram=gram)
    weights = resolve_estimator(estimator, power, features).weights
    features = lazy_features(as_variable(features))
    require_names(features.coords)
    features = portable_coords(features)
    place = Folder.at(store, storage_options)
    piece = Piece(place, *describe(features, dtype))
    if _require_ours(place):
        piece = _as_known(piece, features)
    with lease(place, "td.save"):
        if append_dim is not None and _require_ours(place):
            piece, features = appended(place, piece, features, append_dim)
        if features.sizes[CHECKPOINT] > 0:
            kept = weights if gram else None
            _create_or_check(place, piece, features, kept)
            _save(place, piece, features, kept, progress=progress, retries=retries)
        opened = open(store, storage_options=storage_options)
        if gram and "gram" in opened and features.sizes[PROJ_DIM] <= MOST_DIM:
            with storing(piece, "the eigenvectors of the gram matrix"):
                update_if_possible(place, opened, calibrate=calibrate, retries=retries)
        place.sweep()
    return open(store, storage_options=storage_options)


def _require_calibration(
    features: xr.Dataset, estimator: Estimator, power: float, calibrate: xr.Dataset, *, gram: bool
) -> None:
    """Reject held-out samples that could not choose λ, before anything is computed."""
    if not gram:
        raise ValueError(
            "expected gram=True with calibrate, which chooses the λ of the gram matrix, got "
            "gram=False; try leaving calibrate out"
        )
    gather_options(features, estimator, power, "auto", calibrate, None)
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


def _save(
    place: Folder,
    piece: Piece,
    features: xr.Dataset,
    kept: Weights | None,
    *,
    progress: bool,
    retries: int,
) -> None:
    place.sweep()
    sizes = piece.place.sizes()
    for fault in faults(piece, sizes):
        _log.warning("%s: %s; its block is computed again", fault.path, fault.found)
        withdraw(piece, fault)
    total = len(piece.checkpoints) * (piece.n_blocks + (kept is not None))
    title = f"save {piece.place.url.rpartition('/')[2]}"
    bar = polled_bar(title, total, piece.count_done, show=progress)
    with recorded_run(piece) as hosts, bar:
        for index in range(len(piece.checkpoints)):
            hosts |= save_checkpoint(piece, features, index, retries)
        if kept is not None:  # after all features: score weights are means over checkpoints
            dropped = dropped_rows(place, piece)
            for index in range(len(piece.checkpoints)):
                hosts |= save_sums(piece, kept, index, dropped, retries)


def _as_known(piece: Piece, features: xr.Dataset) -> Piece:
    """Return the piece with the source by which the store has known its samples so far."""
    known = {each.spec.get("source") for each in pieces(piece.place)}
    source, earlier = piece.spec.get("source"), features.attrs.get(EARLIER_SOURCE)
    if source == features.attrs.get("source") and source not in known and earlier in known:
        return Piece(piece.place, {**piece.spec, "source": earlier}, piece.layout)
    return piece


def _require_source(piece: Piece, known: object, what: str) -> None:
    source = piece.spec.get("source")
    if source != known:
        raise StoreMismatchError(
            f"expected the samples of the store, but {what} differ in source: got {source!r}, the "
            f"store has {known!r}; try another store, append_dim='sample' if these are more "
            "samples of it, or, if the model reads the same data (before, numeric coords that it "
            f"does not read were part of the source), samples.attrs['source'] = {known!r}"
        )


def _require_ours(place: Folder) -> bool:
    """Refuse a folder with something else in it; return whether a store is there."""
    names, control = place.names(), (place / RECORDS).names()
    is_new = names in ([], [RECORDS]) and all(name.startswith(PREFIX) for name in control)
    if is_new or UNFINISHED in control:
        return False
    try:
        group = zarr.open_group(zarr_store(place, read_only=True), mode="r", zarr_format=3)
    except (FileNotFoundError, KeyError, ValueError) as err:
        raise FileExistsError(_not_ours(place, names)) from err
    if "layout" not in group.attrs:
        raise FileExistsError(
            f"expected a new path, or a feature store to resume, got the zarr store {place.url!r} "
            "without features; try another path"
        )
    if all(name.startswith(PREFIX) for name in control):
        raise FileExistsError(
            f"expected the records of the store {place.url!r}, which say what blocks are complete, "
            "but it has lost them; try restoring its folder 'records', or another path"
        )
    return True


def _not_ours(place: Folder, names: list[str]) -> str:
    if RECORDS in names:
        return (
            f"expected metadata that can be read, but those of the store {place.url!r} are "
            "damaged; try td.verify(store, repair=True)"
        )
    older = " in the older zarr format 2" if ".zgroup" in names else ""
    return (
        f"expected a new path, or a feature store to resume, got {place.url!r}, which holds "
        f"{names[:3]}{older}; try another path"
    )


def _create_or_check(
    place: Folder, piece: Piece, features: xr.Dataset, kept: Weights | None
) -> None:
    """Make the store once, or check that the one there is ours and was made in the same way."""
    is_there = _require_ours(piece.place)
    if is_there:
        group = piece.group()
        ours = {**piece.spec, "layout": piece.layout}
        what = f"these features and the store {piece.place.url!r}"
        _require_source(piece, group.attrs.get("source"), what)
        require_same(ours, dict(group.attrs), what=what, names=(*STORE_SPEC, "layout"))
        if kept:
            require_place(piece, group, kept)
        for path in restore_coords(piece, features):
            _log.warning("%s was damaged or lost: it was written again", path)
    names = list(map(str, features.coords))
    if _require_ours(place) and (known := coords_of(place, piece, names)) is not None:
        require_same_coords(features, known, place.url)
    if not is_there:
        with storing(piece, "metadata"):
            create(piece, features, kept)
