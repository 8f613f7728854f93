"""Write features into a store: what of them, where they belong, their blocks, and the commit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from trakdask.arrays.blocks import align_weights
from trakdask.arrays.weights import squared_norm
from trakdask.errors import IncompleteFeaturesError, StoreMismatchError
from trakdask.files import Folder, naming
from trakdask.provenance import BY_CHECKPOINT, STORE_SPEC, as_values, require_same, spec
from trakdask.samples.coords import normalise_coord
from trakdask.storage.blocks import difference_of_block, save_blocks, save_fit
from trakdask.storage.coords import joined_coords, require_names
from trakdask.storage.group import DROPPED, ERROR, SCALE, STORE_ATTRS, Group
from trakdask.storage.lock import lock
from trakdask.storage.unfinished import about_unfinished, pack, unfinished_sets
from trakdask.variables import (
    CHECKPOINT,
    FITTED,
    NORM,
    PROJ_DIM,
    SAMPLE,
    TRAINED_ON,
    VARIABLES,
    checkpoint_names,
    lazy_features,
)

_SAME = tuple(name for name in STORE_SPEC if name not in (*BY_CHECKPOINT, "source"))


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
    # The last chunk may be smaller, and the first one, of a selection.
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


# --------------------------------------------------------------------------- where they belong


def by_sets(before: Group, features: xr.Dataset, append_dim: str | None) -> list[xr.Dataset]:
    """Return features of all samples of a store as features of its sets; others as they are.

    So each set goes on, is compared and is named as if it were saved alone. That these are its
    samples, in its order, is known from their coords.

    Raises
    ------
    StoreMismatchError
        If coords differ, or there is none that could.
    """
    sets = [*before.rows_of_sources()]
    n = features.sizes[SAMPLE]
    if append_dim == SAMPLE or len(sets) < 2 or n != before.n_samples:
        return [features]
    # Raises if coords are of other samples, or in another order.
    joined_coords(before, before, features.coords.variables, range(n))
    known = {name for name in before.coords if name not in (CHECKPOINT, DROPPED)}
    if known and not known & {*map(str, features.coords)}:
        raise StoreMismatchError(
            f"expected one of the coords {sorted(known)} of the store {before.folder.url!r}, which "
            f"tell whether these are its {n} samples in its order, got none; try "
            "features.assign_coords(...), or samples with them"
        )
    return [
        features.isel({SAMPLE: slice(rows.start, rows.stop)}).assign_attrs(source=source)
        for source, rows in sets
    ]


def place(
    before: Group, features: xr.Dataset, append_dim: str | None, dtype: str | None
) -> tuple[Group, Group, range]:
    """Find the place of features in a store; ``before`` stays as it is.

    Features are at home in a store if they were made in the same way as its content. Their
    samples are either a set that was saved before, completely or not, or are appended. What an
    unfinished append adds counts only for calls that bring it, because no other has its coords.

    Returns
    -------
    The store as it counts, in which the append that they begin or go on with is noted; as it is to
    be with them; and their rows.

    Raises
    ------
    StoreMismatchError
        If the store holds something else, or if ``append_dim`` adds something else than is new.
    IncompleteFeaturesError
        If they begin an append while another is unfinished.
    """
    target, names, ours = before.target(), checkpoint_names(features), spec(features)
    what = f"these features and the store {before.folder.url!r}"
    numbers = {*map(str, features.data_vars)} - {ERROR, *FITTED}
    layout = {
        "proj_dim": features.sizes[PROJ_DIM],
        "stored_dtype": dtype or str(features.feature.dtype),
        "variables": sorted(numbers | ({TRAINED_ON} & {*target.features})),
    }
    checkpoints = _joined_checkpoints(target, {**ours, **layout}, what)
    rows, added = _known_rows(before, features, append_dim), {*names} - {*target.checkpoints}
    if rows is not None and not added:
        if rows.stop <= before.n_samples and {*names} <= {*before.checkpoints}:
            return before, copy.deepcopy(before), rows
        if {*target.checkpoints} - {*before.checkpoints} <= {*names}:
            return before, target, rows
    if append_dim and "unfinished" in before.attrs:
        raise IncompleteFeaturesError(
            f"expected no unfinished append in the store {before.folder.url!r}: "
            f"{about_unfinished(before)}"
        )
    # More samples come with all checkpoints; more checkpoints of samples are to be asked for.
    may_differ, sources = append_dim == CHECKPOINT, [*target.attrs["sources"]]
    if rows is None:
        rows = range(target.n_samples, target.n_samples + features.sizes[SAMPLE])
        source = [str(ours.get("source", "")), len(rows)]
        if len(sources) > 1 and append_dim == CHECKPOINT:
            raise StoreMismatchError(
                f"expected all {before.n_samples} samples of the store, dropped ones among them, "
                f"or one of its sets {sources}, got {source}; try the features of all samples in "
                f"the order of the store, or one td.save(..., append_dim={CHECKPOINT!r}) per set"
            )
        if rows.start and append_dim != SAMPLE:
            require_same({"source": source}, {"source": sources}, what=what, names=("source",))
        sources.append(source)
        may_differ = not rows.start or {*names} == {*target.checkpoints}
    if not may_differ:
        require_same(ours, target.attrs, what=what, names=BY_CHECKPOINT)
    joined = " + ".join(name for name, _ in sources)
    unfinished = {"source": joined, "sources": sources, **checkpoints}
    noted = replace(before, attrs={**before.attrs, "unfinished": unfinished})
    return noted, noted.target(), rows


def _joined_checkpoints(
    target: Group, ours: Mapping[str, Any], what: str
) -> dict[str, dict[str, Any]]:
    """Return attrs of checkpoints of a store and of features that were made in the same way.

    ``ours`` says how, and which arrays a store of these features has.
    """
    array = target.arrays["feature"]
    joined = {
        name: {**target.attrs.get(name, {}), **ours[name]} for name in BY_CHECKPOINT if name in ours
    }
    common = {
        name: {key: value for key, value in values.items() if key in target.checkpoints}
        for name, values in joined.items()
    }
    layout = {
        "proj_dim": array["shape"][1],
        "stored_dtype": array["data_type"],
        "variables": sorted({*target.features} - {ERROR, SCALE}),
    }
    require_same(
        {**ours, **common}, {**target.attrs, **layout}, what=what,
        names=(*BY_CHECKPOINT, *_SAME, *layout),
    )  # fmt: skip
    return joined


def _known_rows(before: Group, features: xr.Dataset, append_dim: str | None) -> range | None:
    """Return where samples are that were begun before, None if these are others.

    Sets of as many samples of the same source, as two selections may be, are told apart by their
    features.
    """
    source, difference = features.attrs.get("source", ""), None
    for name, rows in before.target().rows_of_sources():
        if (name, len(rows)) == (source, features.sizes[SAMPLE]):
            difference = difference_of_block(before, features, rows)
            if difference is None:
                return rows
    if difference is not None and append_dim != SAMPLE:
        raise StoreMismatchError(difference)
    return None
