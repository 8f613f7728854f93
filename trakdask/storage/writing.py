"""Write features into a store: where they belong, their blocks and coords, and the commit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from trakdask.arrays.blocks import align_weights
from trakdask.arrays.weights import squared_norm
from trakdask.checks import require_choice
from trakdask.errors import IncompleteFeaturesError
from trakdask.files import Folder, naming
from trakdask.provenance import BY_CHECKPOINT, REQUIRED_SPEC, as_values
from trakdask.storage.blocks import as_stored, save_blocks, save_fit
from trakdask.storage.coords import joined_coords, portable_coords, require_names
from trakdask.storage.group import ERROR, SCALE, STORE_ATTRS, Group
from trakdask.storage.lock import lock
from trakdask.storage.placement import blockwise, by_sets, place
from trakdask.storage.unfinished import pack, unfinished_sets
from trakdask.variables import (
    CHECKPOINT,
    FITTED,
    NORM,
    SAMPLE,
    TRAINED_ON,
    VARIABLES,
    checkpoint_names,
    lazy_features,
    load_coords,
)


def write(
    features: xr.Dataset,
    store: str | os.PathLike[str],
    derive: Callable[[Group, Group], None],
    *,
    append_dim: str | None,
    dtype: str | None,
    storage_options: Mapping[str, Any] | None,
    progress: bool,
    retries: int,
) -> None:
    """Compute features into a store; go on where an earlier call stopped.

    Parameters
    ----------
    derive
        Is called when all blocks are stored, with the store as it counts, and as it is to be; adds
        the sums over all samples. Everything counts together.
    features, store, append_dim, dtype, storage_options, progress, retries
        As in :func:`trakdask.save`, which has the errors, too.
    """
    _require_options(features, dtype, append_dim)
    features = _storable(features)
    folder = Folder.at(store, storage_options)
    before = _read(folder)  # nothing is written into other folders than stores, not even a lock
    parts = by_sets(before, features, append_dim) if before else [features]
    for part in parts:
        lost = _write(part, folder, derive, append_dim, dtype, progress=progress, retries=retries)
    if lost:
        raise IncompleteFeaturesError(
            f"expected all blocks in the store {folder.url!r}, but the samples of {lost} still "
            "lack some; these features were saved, now try td.save with the others"
        )
    if any(name in features for name in FITTED):
        kept_beside(folder).remove()


def _write(
    features: xr.Dataset,
    folder: Folder,
    derive: Callable[[Group, Group], None],
    append_dim: str | None,
    dtype: str | None,
    *,
    progress: bool,
    retries: int,
) -> list[str]:
    """Write one set of samples; return the sets that lack blocks which were lost."""
    remedy = "stored blocks are safe: try the same td.save(...) again when the cause is gone"
    with naming(folder.url, remedy), lock(folder, "td.save") as require_held:
        before = _read(folder) or _new_group(folder, features, dtype)
        before.sweep_records()  # a killed writer may have left them
        if ERROR in features and ERROR not in before.arrays:
            sizes = {SAMPLE: before.n_samples, CHECKPOINT: len(before.checkpoints)}
            before.add(ERROR, sizes, np.dtypes.StringDType(), block=before.block)
        read = before
        before, group, rows = place(read, features, append_dim, dtype)
        coords = joined_coords(before, group, features, rows)
        if before is not read:
            # Before the first block of an append is written it is on record, so that whoever reads
            # the store, or goes on after a kill, knows what the further chunks are.
            before.commit()
            group = before.target()
        folder.sweep()
        save_fit(before.target(), features, retries)
        save_blocks(before, as_stored(before, features, rows), rows, retries, progress=progress)
        unfinished = [source for source, _ in unfinished_sets(before, group)]
        if not unfinished:
            states = [(each.n_samples, each.checkpoints) for each in (before, group)]
            if group.attrs.pop("lacking", None) or states[0] != states[1]:
                pack(before, group)
            group.write_variables(coords)
            derive(before, group)
            if (group.arrays, group.attrs) != (before.arrays, before.attrs):
                require_held()  # while this process slept, another one may have taken it for dead
                group.commit()
                group.sweep()
        return unfinished if "lacking" in group.attrs else []


def kept_beside(folder: Folder) -> Folder:
    """Return the folder where a fit is kept until the features that hold it are saved."""
    return replace(folder, url=f"{folder.url}.fit")


def _require_options(features: xr.Dataset, dtype: object, append_dim: object) -> None:
    if dtype is not None:
        require_choice("dtype", dtype, ("float16",), remedy="try dtype=None to keep theirs")
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
    names, checkpoints = checkpoint_names(features), as_values(features.attrs)["checkpoints"]
    if len(set(names)) < len(names) or not set(names) <= set(checkpoints):
        raise ValueError(
            f"expected checkpoints of {list(checkpoints)} (attrs), each once, "
            f"got {names}; try another selection of checkpoints"
        )


def _storable(features: xr.Dataset) -> xr.Dataset:
    """Return features with lazy arrays, and coords that a store can hold."""
    # Why samples failed, and which checkpoints know them, is stored block by block as numbers are.
    features = features.reset_coords([n for n in (ERROR, TRAINED_ON) if n in features.coords])
    features = load_coords(lazy_features(features))
    feature = features.feature.data
    norm = features[NORM].data if NORM in features else squared_norm(feature)
    norm = align_weights(norm, feature).astype(np.float64)
    features = features.assign({NORM: VARIABLES[NORM].holding(norm)})
    require_names(features.coords)
    return portable_coords(features)


def _read(folder: Folder) -> Group | None:
    """Return what counts in a store, None if there is none; raise if there is something else."""
    names = {*folder.names()} - {"lock"}
    if not names:
        return None
    try:
        return Group.read(folder)
    except FileNotFoundError as err:
        raise FileExistsError(
            f"expected a new path or a store of features, got {folder.url!r}, which holds "
            f"{sorted(names)[:3]}; try another path"
        ) from err


def _new_group(folder: Folder, features: xr.Dataset, dtype: str | None) -> Group:
    """Return the group of a new store: all arrays of features, without a sample."""
    block = max(features.feature.variable.chunksizes[SAMPLE])
    dropped = {*STORE_ATTRS, "saved"}
    attrs = {k: v for k, v in as_values(features.attrs).items() if k not in dropped}
    attrs |= {"source": "", "n_samples": 0, "sources": []}
    attrs |= {name: {} for name in BY_CHECKPOINT if name in attrs}
    group = Group(folder, attrs, {})
    sizes = {**features.sizes, SAMPLE: 0, CHECKPOINT: 0}
    stored = [*blockwise(features), *(name for name in FITTED if name in features)]
    dtypes = {name: features[name].dtype for name in stored}
    if dtype:
        dtypes |= {"feature": np.dtype(dtype), SCALE: np.dtype("f8")}
    for name, of_array in dtypes.items():
        group.add(name, sizes, of_array, block=block)
    return group
