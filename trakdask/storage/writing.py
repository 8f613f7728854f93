"""Write features into a store: where they belong, their blocks and coords, and the commit."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr

from trakdask.arrays.blocks import align_weights
from trakdask.arrays.weights import squared_norm, with_digest
from trakdask.checks import require_choice
from trakdask.errors import IncompleteFeaturesError, StoreMismatchError
from trakdask.files import Folder, naming
from trakdask.provenance import (
    BY_CHECKPOINT,
    REQUIRED_SPEC,
    STORE_SPEC,
    as_values,
    require_same,
    spec,
)
from trakdask.samples import normalise_coord
from trakdask.storage.blocks import (
    difference_of_block,
    save_blocks,
    save_fit,
    sources_that_lack_blocks,
    with_errors,
    with_trained_on,
)
from trakdask.storage.group import (
    DROPPED,
    ERROR,
    METADATA,
    SCALE,
    STORE_ATTRS,
    Group,
    kind,
)
from trakdask.storage.lock import lock
from trakdask.storage.places import writable
from trakdask.storage.reading import read_coords
from trakdask.storage.records import pack
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
    load_coords,
)

AppendDim = Literal["sample", "checkpoint"]

_TAKEN = {METADATA, "lock", DROPPED, SCALE, *VARIABLES} - {ERROR}
_SAME = tuple(name for name in STORE_SPEC if name not in (*BY_CHECKPOINT, "source"))


def write(
    features: xr.Dataset,
    store: str | os.PathLike[str],
    derive: Callable[[Group, Group], None],
    *,
    append_dim: AppendDim | None,
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
        what is kept of all samples. Everything counts together.
    features, store, append_dim, dtype, storage_options, progress, retries
        As in :func:`trakdask.save`, which has the errors, too.
    """
    _require_options(features, dtype, append_dim)
    features = _storable(features)
    folder = writable(store, storage_options)
    _read(folder)  # nothing is written into what is no store, not even a lock
    remedy = "stored blocks are safe: try the same td.save(...) again when the cause is gone"
    with naming(folder.url, remedy), lock(folder, "td.save") as require_held:
        before = _read(folder) or _new_group(folder, features, dtype)
        before.sweep_records()  # a killed writer may have left them
        begun = before.attrs.get("unfinished")
        features = with_errors(before, features)
        group, rows = _place(before, features, append_dim, dtype)
        coords = _coords(before, group, features, rows)
        if before.attrs.get("unfinished") != begun:
            # Before the first block of an append is written it is on record, so that whoever reads
            # the store, or goes on after a kill, knows what the further chunks are.
            before.commit()
            group = before.target()
        folder.sweep()
        save_fit(before.target(), features, retries)
        features = with_trained_on(before, features)
        save_blocks(before, features, rows, retries, progress=progress)
        lacking = sources_that_lack_blocks(before, group)
        if lacking and "lacking" in group.attrs:
            raise IncompleteFeaturesError(
                f"expected all blocks in the store {folder.url!r}, but the samples of {lacking} "
                "still lack some; these features were saved, now try td.save with the others"
            )
        if not lacking:
            sizes = [(g.n_samples, g.checkpoints) for g in (before, group)]
            if group.attrs.pop("lacking", None) or sizes[0] != sizes[1]:
                pack(before, group)
            group.write_small(coords)
            derive(before, group)
            if (group.arrays, group.attrs) != (before.arrays, before.attrs):
                require_held()  # while this process slept, another one may have taken it for dead
                group.commit()
                group.sweep()
    if any(name in features for name in FITTED):
        kept_beside(folder).remove()


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
    small = (align_weights(array, feature) for array in (norm, features.out_to_loss.data))
    marked = da.map_blocks(with_digest, *small, dtype=np.float64)
    features = features.assign({NORM: VARIABLES[NORM].holding(marked)})
    require_names(features.coords)
    return _portable_coords(features)


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
    stored = [*_blockwise(features), *(name for name in FITTED if name in features)]
    dtypes = {name: features[name].dtype for name in stored}
    if dtype:
        dtypes |= {"feature": np.dtype(dtype), SCALE: np.dtype("f8")}
    for name, of_array in dtypes.items():
        group.add(name, sizes, of_array, block=block)
    return group


def _blockwise(features: xr.Dataset) -> list[str]:
    """Return the names of what is stored block by block: all numbers of samples and checkpoints."""
    variables = {str(n): v for n, v in features.data_vars.items() if v.dims == (SAMPLE, CHECKPOINT)}
    return ["feature", *(n for n, v in variables.items() if v.dtype.kind == "f" or n == TRAINED_ON)]


# ------------------------------------------------------------------------- where features belong


def _place(
    before: Group, features: xr.Dataset, append_dim: AppendDim | None, dtype: str | None
) -> tuple[Group, range]:
    """Return a store as it is to be, and the rows of features; note what they add as unfinished.

    Features are at home in a store if they were made in the same way as what is there. Their
    samples are either a set that was saved before, completely or not, or are appended. What an
    unfinished append adds counts only for calls that bring it, because no other has its coords.

    Raises
    ------
    StoreMismatchError
        If the store holds something else, or if ``append_dim`` adds something else than is new.
    IncompleteFeaturesError
        If they begin an append while another is unfinished.
    """
    target, names = before.target(), checkpoint_names(features)
    what = f"these features and the store {before.folder.url!r}"
    checkpoints = _joined_checkpoints(target, features, dtype, what)
    ours = spec(features)
    rows, added = _known_rows(before, features, append_dim), {*names} - {*target.checkpoints}
    if rows is not None and not added:
        if rows.stop <= before.n_samples and {*names} <= {*before.checkpoints}:
            return copy.deepcopy(before), rows
        if {*target.checkpoints} - {*before.checkpoints} <= {*names}:
            return target, rows
    if append_dim and "unfinished" in before.attrs:
        raise IncompleteFeaturesError(
            f"expected no unfinished append in the store {before.folder.url!r}: "
            f"{before.about_unfinished()}"
        )
    # More samples come with all checkpoints; more checkpoints of samples are to be asked for.
    may_differ, sources = append_dim == CHECKPOINT, [*target.attrs["sources"]]
    if rows is None:
        rows = range(target.n_samples, target.n_samples + features.sizes[SAMPLE])
        source = [str(ours.get("source", "")), len(rows)]
        if len(sources) > 1 and append_dim == CHECKPOINT:
            raise StoreMismatchError(
                f"expected one of the sets of samples {sources} that the store has, got {source}; "
                f"try one td.save(..., append_dim={CHECKPOINT!r}) per set"
            )
        if rows.start and append_dim != SAMPLE:
            require_same({"source": source}, {"source": sources}, what=what, names=("source",))
        sources.append(source)
        may_differ = not rows.start or {*names} == {*target.checkpoints}
    if not may_differ:
        require_same(ours, target.attrs, what=what, names=BY_CHECKPOINT)
    joined = " + ".join(name for name, _ in sources)
    before.attrs["unfinished"] = {"source": joined, "sources": sources, **checkpoints}
    return before.target(), rows


def _joined_checkpoints(
    target: Group, features: xr.Dataset, dtype: str | None, what: str
) -> dict[str, dict[str, Any]]:
    """Return attrs of checkpoints of a store and of features that were made in the same way."""
    ours, array = spec(features), target.arrays["feature"]
    joined = {
        name: {**target.attrs.get(name, {}), **ours[name]} for name in BY_CHECKPOINT if name in ours
    }
    common = {
        name: {key: value for key, value in values.items() if key in target.checkpoints}
        for name, values in joined.items()
    }
    layout = {
        "proj_dim": features.sizes[PROJ_DIM],
        "stored_dtype": dtype or str(features.feature.dtype),
        "variables": sorted({*_blockwise(features), *({TRAINED_ON} & {*target.features})}),
    }
    stored_layout = {
        "proj_dim": array["shape"][1],
        "stored_dtype": array["data_type"],
        "variables": sorted({*target.features} - {ERROR, SCALE}),
    }
    require_same(
        {**ours, **layout, **common}, {**target.attrs, **stored_layout}, what=what,
        names=(*BY_CHECKPOINT, *_SAME, *layout),
    )  # fmt: skip
    return joined


def _known_rows(before: Group, features: xr.Dataset, append_dim: AppendDim | None) -> range | None:
    """Return where samples are that were begun before, None if these are others.

    Sets of as many samples of the same source, as two selections may be, are told apart by their
    features.
    """
    source = features.attrs.get("source", ""), features.sizes[SAMPLE]
    difference = None
    for name, rows in before.target().rows_of_sources():
        if (name, len(rows)) == source:
            difference = difference_of_block(before, features, rows)
            if difference is None:
                return rows
    if difference is not None and append_dim != SAMPLE:
        raise StoreMismatchError(difference)
    return None


# ------------------------------------------------------------------------------------------ coords


def require_names(names: Iterable[object]) -> None:
    """Reject names of coords that their folder in a store cannot have.

    Raises
    ------
    ValueError
        If another folder of the store has such a name, or no folder can have it.
    """
    for name in names:
        is_folder = isinstance(name, str) and re.fullmatch(r"(?!__)\w[\w.:+=@#%()-]{0,59}", name)
        if not is_folder or name in _TAKEN:
            raise ValueError(
                f"expected a name for the coord {name!r:.60} that a folder in a store can have, "
                f"such as 'my_coord', and not one of {sorted(_TAKEN)}; try renaming it"
            )


def _portable_coords(features: xr.Dataset) -> xr.Dataset:
    """Return features with coords that every reader of zarr knows, or say which is of no such kind.

    Text of a fixed width has no specification in zarr v3; objects may be anything.
    """
    n = features.sizes[SAMPLE]
    text = {
        name: coord.copy(data=normalise_coord(str(name), coord.values, n))
        for name, coord in features.coords.items()
        if coord.dims == (SAMPLE,) and coord.dtype.kind in "OSUV"
    }
    return features.assign_coords(text)


def _coords(
    before: Group, group: Group, features: xr.Dataset, rows: range
) -> dict[str, xr.Variable]:
    """Return the coords that a store gets with these features.

    Parameters
    ----------
    before, group
        The store as it counts, and as it is to be.
    features, rows
        What is saved, and where.

    Raises
    ------
    StoreMismatchError
        If the features have other coords than the store, or of another kind; or, of samples that
        count, other values, which would not be written.
    """
    ours = {str(n): c.variable for n, c in features.coords.items() if n not in (ERROR, CHECKPOINT)}
    stored, url = read_coords(before, before.coords), before.folder.url
    of_samples, old = (
        {name: coord for name, coord in coords.items() if SAMPLE in coord.dims}
        for coords in (ours, stored)
    )
    added: dict[str, dict[str, xr.Variable]] = {SAMPLE: {}, CHECKPOINT: {}}
    if rows.stop <= before.n_samples:
        _require_same_values(of_samples, old, rows, url)
    else:
        added[SAMPLE] = of_samples
        if DROPPED in stored:
            of_samples[DROPPED] = xr.Variable(SAMPLE, np.zeros(len(rows), bool))
        if before.n_samples:
            _require_same_kinds(of_samples, old, url)
    if new := group.checkpoints[len(before.checkpoints) :]:
        names = checkpoint_names(features)
        columns = [names.index(name) for name in new]
        of_checkpoints = {name: c for name, c in ours.items() if c.dims == (CHECKPOINT,)}
        text = xr.Variable(CHECKPOINT, np.array(names, np.dtypes.StringDType()))
        of_checkpoints[CHECKPOINT] = text
        added[CHECKPOINT] = {name: c[columns] for name, c in of_checkpoints.items()}
    changed = {
        name: xr.Variable.concat([c[name] for c in (stored, coords) if name in c], dim)
        for dim, coords in added.items()
        for name in coords
    }
    if not before.n_samples:
        changed |= {n: c for n, c in ours.items() if not {SAMPLE, CHECKPOINT} & {*c.dims}}
    return changed


def _require_same_values(
    ours: Mapping[str, xr.Variable], stored: Mapping[str, xr.Variable], rows: range, url: str
) -> None:
    """Reject coords that differ from the store's."""
    for name, coord in ours.items():
        difference = "which has none of this name"
        if name in stored:
            there = stored[name][rows.start : rows.stop]
            if coord.equals(there):
                continue
            new, old = (variable.values.astype(object) for variable in (coord, there))
            sample = np.argwhere((new != old) & ~(pd.isna(new) & pd.isna(old)))[0, 0]
            values = (f"{variable.values[sample]!s:.60}" for variable in (coord, there))
            difference = f"got {' instead of '.join(values)} at sample {sample}"
        raise StoreMismatchError(
            f"expected the coord {name!r} of these features as it is in the store {url!r}, "
            f"{difference}; try td.assign_coords({url!r}, {{{name!r}: values}}) to change the "
            f"store without computing anything, or features.drop_vars({name!r}) to go on with "
            "what it has"
        )


def _require_same_kinds(
    ours: Mapping[str, xr.Variable], stored: Mapping[str, xr.Variable], url: str
) -> None:
    """Reject coords that cannot be appended to the store's."""
    kinds, expected = (
        {name: (coord.dims, kind(coord.dtype)) for name, coord in coords.items()}
        for coords in (ours, stored)
    )
    if kinds != expected:
        raise StoreMismatchError(
            f"expected features with the coords {expected} of the store {url!r}, got {kinds}; try "
            "features.drop_vars(...) or features.assign_coords(...), so that they are the same"
        )
