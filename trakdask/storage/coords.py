"""Coords of a store: which names and kinds they may have, and how they are joined to others."""

from __future__ import annotations

import re
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
import xarray as xr

from trakdask.errors import StoreMismatchError
from trakdask.storage.group import DROPPED, ERROR, METADATA, SCALE, Group, kind
from trakdask.storage.reading import read_coords
from trakdask.variables import CHECKPOINT, SAMPLE, VARIABLES

# Opened features have `error` as a coord.
_TAKEN = {METADATA, "lock", DROPPED, SCALE, *VARIABLES} - {ERROR}


def require_names(names: Iterable[object]) -> None:
    """Reject names of coords that their folder in a store cannot have.

    Raises
    ------
    ValueError
        If another folder of the store has such a name, or no folder can have it.
    """
    for name in names:
        # zarr keeps names that begin with two underscores for itself. 60 characters of up to four
        # bytes are less than the 255 bytes of a file's name.
        is_folder = isinstance(name, str) and re.fullmatch(r"(?!__)\w[\w.:+=@#%()-]{0,59}", name)
        if not is_folder or name in _TAKEN:
            raise ValueError(
                f"expected a name for the coord {name!r:.60} that a folder in a store can have, "
                f"such as 'my_coord', and not one of {sorted(_TAKEN)}; try renaming it"
            )


def joined_coords(
    before: Group, group: Group, coords: Mapping[Hashable, xr.Variable], rows: range
) -> dict[str, xr.Variable]:
    """Return the coords that a store gets with features.

    Parameters
    ----------
    before, group
        The store as it counts, and as it is to be.
    coords, rows
        All coords of the features to save, in memory, and their rows in the store.

    Raises
    ------
    StoreMismatchError
        If the features have other coords than the store, or of another kind; or, of samples that
        count, other values, which would not be written.
    """
    ours = {str(n): coord for n, coord in coords.items() if n not in (ERROR, CHECKPOINT)}
    # 1. Coords of samples: those that count must be the same, and those that come must be of the
    # same names and kinds.
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
    # 2. Coords of checkpoints, of those that come: these are the last ones of the store.
    if new := group.checkpoints[len(before.checkpoints) :]:
        names = [str(name) for name in coords[CHECKPOINT].values]
        columns = [names.index(name) for name in new]
        of_checkpoints = {name: c for name, c in ours.items() if c.dims == (CHECKPOINT,)}
        text = xr.Variable(CHECKPOINT, np.array(names, np.dtypes.StringDType()))
        of_checkpoints[CHECKPOINT] = text
        added[CHECKPOINT] = {name: c[columns] for name, c in of_checkpoints.items()}
    # 3. Values so far, and then those that come.
    changed = {
        name: _joined(name, stored.get(name), coord, dim, url)
        for dim, coords in added.items()
        for name, coord in coords.items()
    }
    if before.n_samples and added[SAMPLE]:
        _warn_of_overlap(changed, before.n_samples, [n for n in ours if n in changed], url)
    # 4. Others, such as one number for all, come with the first samples and stay.
    if not before.n_samples:
        changed |= {n: c for n, c in ours.items() if not {SAMPLE, CHECKPOINT} & {*c.dims}}
    return changed


def _joined(
    name: str, old: xr.Variable | None, new: xr.Variable, dim: str, url: str
) -> xr.Variable:
    if old is None:
        return new
    if (joint := joined_exactly(old, new, dim)) is not None:
        return joint
    raise StoreMismatchError(
        f"expected values of {name!r} that one dtype can hold beside the {old.dtype} of the store "
        f"{url!r}, got {new.dtype}, which would change some; try one dtype for both, in the "
        f"store by td.assign_coords({url!r}, {{{name!r}: values}})"
    )


def joined_exactly(old: xr.Variable, new: xr.Variable, dim: Hashable) -> xr.Variable | None:
    """Return values of one kind after others, None where one dtype cannot hold both as they are.

    Large integers beside decimals would be rounded, and far dates beside nanoseconds overflow.
    """
    if kind(old.dtype) != kind(new.dtype):
        return None
    joint, n = xr.Variable.concat([old, new], dim), old.sizes[dim]
    with np.errstate(invalid="ignore"):  # what overflows is no longer equal
        is_same = all(
            joint.isel({dim: rows}).astype(part.dtype).equals(part)
            for part, rows in ((old, slice(n)), (new, slice(n, None)))
        )
    return joint if is_same else None


def _warn_of_overlap(
    joint: Mapping[str, xr.Variable], n_before: int, names: Sequence[str], url: str
) -> None:
    """Warn if new samples are like some of the store in all coords, where these tell all apart."""
    # A hash of a row takes 8 bytes, whatever coords it has.
    columns = {name: joint[name].values for name in names if joint[name].dims == (SAMPLE,)}
    rows = pd.util.hash_pandas_object(pd.DataFrame(columns), index=False).to_numpy()
    old, new = rows[:n_before], rows[n_before:]
    if DROPPED in joint:  # they may come back with other values
        old = old[~joint[DROPPED].values[:n_before]]
    known = np.isin(new, old)
    # Coords such as a label tell no samples apart, so that equal ones say nothing.
    if columns and known.any() and all(len(np.unique(x)) == len(x) for x in (old, new)):
        warnings.warn(
            f"expected samples that the store {url!r} does not have, got {known.sum()} of "
            f"{len(new)} (the first at {known.argmax()}) with the same coords {[*columns]} as "
            "samples that it has, which would count twice; try features.isel(sample=...) without "
            "them, or td.drop(store, where=...) once they are saved",
            stacklevel=2,
        )


def _require_same_values(
    ours: Mapping[str, xr.Variable], stored: Mapping[str, xr.Variable], rows: range, url: str
) -> None:
    """Reject coords that differ from the store's, but for dropped samples: they may be erased."""
    counts = ~stored[DROPPED].values[rows.start : rows.stop] if DROPPED in stored else slice(None)
    for name, coord in ours.items():
        difference = "which has none of this name"
        if name in stored:
            there = stored[name][rows.start : rows.stop]
            if coord[counts].equals(there[counts]):
                continue
            new, old = (variable.values.astype(object) for variable in (coord, there))
            # NaN differs from NaN, and NaT from NaT.
            differs = (new != old) & ~(pd.isna(new) & pd.isna(old))
            sample = np.arange(len(rows))[counts][np.argwhere(differs[counts])[0, 0]]
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
