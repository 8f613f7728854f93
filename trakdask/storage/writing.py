"""Write features into a store: what of them, where they belong, their blocks, and the commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import xarray as xr

from trakdask.arrays.blocks import align_weights
from trakdask.arrays.weights import squared_norm
from trakdask.files import Folder, naming
from trakdask.provenance import BY_CHECKPOINT, as_values
from trakdask.samples.coords import normalise_coord
from trakdask.storage.blocks import save_blocks, save_fit
from trakdask.storage.coords import joined_coords, require_names
from trakdask.storage.group import ERROR, SCALE, STORE_ATTRS, Group
from trakdask.storage.lock import lock
from trakdask.storage.placement import place
from trakdask.storage.unfinished import pack, unfinished_sets
from trakdask.variables import (
    CHECKPOINT,
    FITTED,
    NORM,
    SAMPLE,
    TRAINED_ON,
    VARIABLES,
    lazy_features,
)


def storable(features: xr.Dataset) -> xr.Dataset:
    """Return features with all that a store holds of them, and nothing else.

    That are lazy numbers of each sample and checkpoint, with norms, the values of a fit, and coords
    in memory.

    Raises
    ------
    TypeError, ValueError
        If a coord has a name that a folder cannot have, or is of a kind that cannot be stored.
    """
    # 1. Why samples failed, and which checkpoints know them, is stored block by block as numbers
    # are.
    features = features.reset_coords([n for n in (ERROR, TRAINED_ON) if n in features.coords])
    features = lazy_features(features)
    # 2. Norms, by which queries see that features were changed.
    feature = features.feature.data
    norm = features[NORM].data if NORM in features else squared_norm(feature)
    norm = align_weights(norm, feature).astype(np.float64)
    features = features.assign({NORM: VARIABLES[NORM].holding(norm)})
    # 3. No sums over these samples, and nothing else that is not a number of each.
    kept = {"feature", ERROR, *FITTED} | {
        name
        for name, variable in features.data_vars.items()
        if variable.dims == (SAMPLE, CHECKPOINT)
        and (variable.dtype.kind == "f" or name == TRAINED_ON)
    }
    features = features.drop_vars({*features.data_vars} - kept)
    # 4. Coords in memory that every reader of zarr knows: text of a fixed width has no
    # specification in zarr v3, and objects may be anything.
    coords = features.coords.variables
    require_names(coords)
    changed = {name: coord.compute() for name, coord in coords.items() if coord.chunks is not None}
    for name, coord in {**coords, **changed}.items():
        # Those of pandas have no char.
        if coord.dims == (SAMPLE,) and getattr(coord.dtype, "char", "O") in "OSUV":
            text = normalise_coord(str(name), np.asarray(coord.data), coord.size)
            changed[name] = coord.copy(data=text)
    return features.assign_coords(changed)


def write(
    features: xr.Dataset,
    folder: Folder,
    derive: Callable[[Group, Group], None],
    append_dim: str | None,
    dtype: str | None,
    *,
    progress: bool,
    retries: int,
) -> list[str]:
    """Write one set of samples; go on where an earlier call stopped.

    Parameters
    ----------
    features
        What :func:`storable` returns.
    derive
        Is called when all blocks are stored, with the store as it counts, and as it is to be; adds
        the sums over all samples. Everything counts together.
    folder, append_dim, dtype, progress, retries
        As in :func:`trakdask.save`, which has the errors, too.

    Returns
    -------
    The sets that lack blocks which were lost.
    """
    remedy = "stored blocks are safe: try the same td.save(...) again when the cause is gone"
    with naming(folder.url, remedy), lock(folder, "td.save") as require_held:
        before = existing(folder) or _new_group(folder, features, dtype)
        before.sweep_records()  # a killed writer may have left them
        if ERROR in features and ERROR not in before.arrays:
            sizes = {SAMPLE: before.n_samples, CHECKPOINT: len(before.checkpoints)}
            before.add(ERROR, sizes, np.dtypes.StringDType(), block=before.block)
        read = before
        before, group, rows = place(read, features, append_dim, dtype)
        coords = joined_coords(before, group, features.coords.variables, rows)
        if before is not read:
            # Before the first block of an append is written it is on record, so that whoever reads
            # the store, or goes on after a kill, knows what the further chunks are.
            before.commit()
            group = before.target()
        folder.sweep()
        save_fit(before.target(), features, retries)
        save_blocks(before, features, rows, retries, progress=progress)
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


def existing(folder: Folder) -> Group | None:
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
    """Return the group of a new store: all arrays of storable features, without a sample."""
    block = max(features.feature.variable.chunksizes[SAMPLE])
    dropped = {*STORE_ATTRS, "saved"}
    attrs = {k: v for k, v in as_values(features.attrs).items() if k not in dropped}
    attrs |= {"source": "", "n_samples": 0, "sources": []}
    attrs |= {name: {} for name in BY_CHECKPOINT if name in attrs}
    group = Group(folder, attrs, {})
    sizes = {**features.sizes, SAMPLE: 0, CHECKPOINT: 0}
    names = dict.fromkeys(["feature", *map(str, features.data_vars)])
    stored = [name for name in names if name not in (ERROR, *FITTED)]
    stored += [name for name in FITTED if name in features]
    dtypes = {name: features[name].dtype for name in stored}
    if dtype:
        dtypes |= {"feature": np.dtype(dtype), SCALE: np.dtype("f8")}
    for name, of_array in dtypes.items():
        group.add(name, sizes, of_array, block=block)
    return group
