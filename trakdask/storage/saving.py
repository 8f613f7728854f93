"""Compute features into a store, block by block; go on where an earlier call stopped."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import dask.array as da
import numpy as np
import xarray as xr

from trakdask.arrays.weights import squared_norm
from trakdask.attribution.dampings import require_calibration
from trakdask.attribution.estimators import (
    DEFAULT_ESTIMATOR,
    DEFAULT_POWER,
    Estimator,
    Power,
    gather_options,
    resolve_estimator,
)
from trakdask.attribution.grams import NORM
from trakdask.checks import require_choice, require_integer
from trakdask.errors import IncompleteFeaturesError, StoreMismatchError
from trakdask.execution.progress import polled_bar
from trakdask.files import Folder
from trakdask.provenance import BY_CHECKPOINT, REQUIRED_SPEC, STORE_SPEC, require_same, spec
from trakdask.storage.blocks import missing_blocks, require_same_rows, save_blocks
from trakdask.storage.coords import joined, portable_coords, require_names, require_same_coords
from trakdask.storage.group import ERROR, METADATA, SCALE, STORE_ATTRS, Group
from trakdask.storage.lock import lock
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

AppendDim = Literal["sample", "checkpoint"]

_SAME = tuple(name for name in STORE_SPEC if name not in (*BY_CHECKPOINT, "source"))


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
    _require_options(features, dtype, append_dim, retries)
    if calibrate is not None:
        if not gram:
            raise ValueError(
                "expected gram=True with calibrate, which chooses the λ of the gram matrix, got "
                "gram=False; try leaving calibrate out"
            )
        gather_options(features, estimator, power, "auto", calibrate)
        require_calibration(features, calibrate)
    weights = resolve_estimator(estimator, power, features).weights if gram else None
    features = _storable(features)
    folder = Folder.at(store, storage_options)
    _is_store(folder)  # nothing is written into what is no store, not even a lock
    with lock(folder, "td.save") as require_held:
        before = Group.read(folder) if _is_store(folder) else _new_group(folder, features, dtype)
        begun = before.attrs.get("unfinished")
        _add_errors(before, features)
        rows = _placed(before, features, append_dim, dtype)
        if rows.stop <= before.n_samples:
            require_same_coords(before, features, rows)
        coords = joined(before, features, rows)
        if before.attrs.get("unfinished") != begun:
            # Before the first block of an append is written it is on record, so that whoever reads
            # the store, or goes on after a kill, knows what the further chunks are.
            before.commit()
        folder.sweep()
        group = before.target()
        columns = {n: i for i, n in enumerate(group.checkpoints) if n in _names(features)}
        first, last = rows.start // group.block, (rows.stop - 1) // group.block

        def count() -> int:
            stored = group.stored_chunks("out_to_loss")
            return sum(c in columns.values() and first <= b <= last for b, c in stored)

        total = (last - first + 1) * len(columns)
        with polled_bar(f"save {folder.name}", total, count, show=progress):
            save_blocks(group, _with_errors(group, features), rows, columns, retries)
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


def _require_options(
    features: xr.Dataset, dtype: object, append_dim: object, retries: object
) -> None:
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
    require_integer("retries", retries, 0, remedy="try retries=2")
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
    names = _names(features)
    if len(set(names)) < len(names) or not set(names) <= set(features.attrs["checkpoints"]):
        raise ValueError(
            f"expected checkpoints of {list(features.attrs['checkpoints'])} (attrs), each once, "
            f"got {names}; try another selection of checkpoints"
        )


def _names(features: xr.Dataset) -> list[str]:
    return [str(name) for name in features[CHECKPOINT].values]


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
    names = [name for name in folder.names() if name != "lock"]
    if METADATA in names:
        try:
            Group.read(folder)
        except FileNotFoundError as err:
            raise FileExistsError(str(err)) from err
    elif names:
        raise FileExistsError(
            f"expected a new path for the store, got {folder.url!r}, which holds {names[:3]}; try "
            "another path"
        )
    return bool(names)


# -------------------------------------------------------------------------- where features belong


def _new_group(folder: Folder, features: xr.Dataset, dtype: str | None) -> Group:
    """Return the group of a new store: all arrays of features, without a sample."""
    block = max(features.feature.variable.chunksizes[SAMPLE])
    dropped = {*STORE_ATTRS, "saved", *BY_CHECKPOINT, "source"}
    attrs = {k: v for k, v in features.attrs.items() if k not in dropped}
    attrs |= {"source": "", "n_samples": 0, "sources": [], "checkpoints": {}, "checkpoint_ids": {}}
    group = Group(folder, attrs, {})
    sizes = {SAMPLE: 0, CHECKPOINT: 0, PROJ_DIM: features.sizes[PROJ_DIM]}
    for name in _blockwise(features):
        of: Any = dtype if dtype and name == "feature" else features[name].dtype
        group.add(name, sizes, of, block=block)
    if dtype:
        group.add(SCALE, sizes, "f8", block=block)
    return group


def _blockwise(features: xr.Dataset) -> list[str]:
    """Return the names of what is stored block by block: all numbers of samples and checkpoints."""
    variables = {str(n): v for n, v in features.data_vars.items() if v.dims == (SAMPLE, CHECKPOINT)}
    return ["feature", *(n for n, v in variables.items() if v.dtype.kind == "f")]


def _add_errors(group: Group, features: xr.Dataset) -> None:
    """Let a store have reasons of failures, if the features do."""
    if ERROR in features and ERROR not in group.arrays:
        sizes = {SAMPLE: group.n_samples, CHECKPOINT: len(group.checkpoints)}
        group.add(ERROR, sizes, np.dtypes.StringDType(), block=group.block)


def _with_errors(group: Group, features: xr.Dataset) -> xr.Dataset:
    """Return features that say where samples failed, if the store does."""
    if ERROR not in group.arrays or ERROR in features:
        return features
    none = da.full_like(features.output.data, "", dtype=np.dtypes.StringDType())
    return features.assign({ERROR: (VARIABLES[ERROR].dims, none)})


def _placed(
    before: Group, features: xr.Dataset, append_dim: AppendDim | None, dtype: str | None
) -> range:
    """Return the rows of a store at which features belong; note what they add as unfinished.

    Features are at home in a store if they were made in the same way as what is there. Their
    samples are either a set that was saved before, completely or not, or are appended.

    Raises
    ------
    StoreMismatchError
        If the store holds something else, or what is new is not that which ``append_dim`` adds.
    IncompleteFeaturesError
        If they begin an append while another is unfinished.
    """
    target, made = before.target(), spec(features)
    what = f"these features and the store {before.folder.url!r}"
    names = _names(features)
    common = [name for name in names if name in target.checkpoints]
    require_same(made, target.attrs, what=what, names=_SAME)
    _require_arrays(target, features, dtype)
    if common:
        ours, theirs = (_of_checkpoints(attrs, common) for attrs in (made, target.attrs))
        require_same(ours, theirs, what=what, names=BY_CHECKPOINT)
    rows = _known_rows(target, features, append_dim)
    is_known, sources = rows is not None, [*target.attrs["sources"]]
    if rows is None:
        rows = range(target.n_samples, target.n_samples + features.sizes[SAMPLE])
        sources.append([str(made.get("source", "")), len(rows)])
    elif names == common:
        return rows
    if append_dim and "unfinished" in before.attrs:
        raise IncompleteFeaturesError(
            f"expected no unfinished append in the store {before.folder.url!r}: "
            f"{before.about_unfinished()}"
        )
    if rows.start and not is_known and append_dim != SAMPLE:
        raise StoreMismatchError(
            f"{what} differ in source: expected {target.attrs['sources']} (source, samples), "
            f"got {made.get('source')!r}, {len(rows)}; try another store, or "
            "append_dim='sample' if these are more samples of it"
        )
    # More samples come with all checkpoints; more checkpoints of samples are to be asked for.
    may_differ = append_dim == CHECKPOINT if is_known else {*names} == {*target.checkpoints}
    if target.n_samples and not may_differ:
        require_same(made, target.attrs, what=what, names=BY_CHECKPOINT)
    added = _of_checkpoints(made, [name for name in names if name not in common])
    before.attrs["unfinished"] = {
        "source": " + ".join(source for source, _ in sources),
        "sources": sources,
        **{name: {**target.attrs.get(name, {}), **added[name]} for name in added},
    }
    return rows


def _of_checkpoints(made: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    fields = [field for field in BY_CHECKPOINT if field in made]
    return {field: {name: made[field][name] for name in names} for field in fields}


def _known_rows(group: Group, features: xr.Dataset, append_dim: AppendDim | None) -> range | None:
    """Return where samples are that were begun before, None if these are others.

    Sets of as many samples of the same source, as two selections may be, are told apart by their
    features.
    """
    names = _names(features)
    columns = {n: group.checkpoints.index(n) for n in names if n in group.checkpoints}
    other = None
    for source, rows in group.rows_of_sources():
        if (source, len(rows)) == (features.attrs.get("source", ""), features.sizes[SAMPLE]):
            try:
                require_same_rows(group, features, rows, columns)
                return rows
            except StoreMismatchError as err:
                other = err
    if other is not None and append_dim != SAMPLE:
        raise other
    return None


def _require_arrays(group: Group, features: xr.Dataset, dtype: str | None) -> None:
    """Reject features of another width, dtype, or with other variables."""
    feature = group.arrays["feature"]
    for name, ours, theirs in (
        ("proj_dim", features.sizes[PROJ_DIM], feature["shape"][1]),
        ("dtype", str(dtype or features.feature.dtype), feature["data_type"]),
        ("variables", sorted(_blockwise(features)), sorted({*group.features} - {ERROR, SCALE})),
    ):
        if ours != theirs:
            raise StoreMismatchError(
                f"expected features with the {name} {theirs} of the store {group.folder.url!r}, "
                f"got {ours}; try featurizing as for the store, or another store"
            )


def _lacks_blocks(group: Group) -> bool:
    """Return whether blocks are missing of what a store is to have."""
    stored, columns = group.stored_chunks("out_to_loss"), range(len(group.checkpoints))
    return any(
        missing_blocks(group, rows, index, stored)
        for _, rows in group.rows_of_sources()
        for index in columns
    )
