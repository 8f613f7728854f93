"""Metadata of the samples in a store: as they are saved, compared, and assigned anew."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from trakdask.errors import StoreMismatchError
from trakdask.samples import normalise_coord
from trakdask.storage.group import DROPPED, ERROR, METADATA, SCALE, Group
from trakdask.storage.reading import read_coords
from trakdask.variables import CHECKPOINT, SAMPLE, VARIABLES

_TAKEN = {METADATA, "lock", DROPPED, SCALE, *VARIABLES} - {ERROR}


def require_names(names: Iterable[object]) -> None:
    """Reject names of coords that cannot be the name of their folder in a store.

    Raises
    ------
    ValueError
        If a name is that of another folder, or of none.
    """
    for name in names:
        is_folder = isinstance(name, str) and re.fullmatch(r"(?!__)\w[\w.:+=@#%()-]{0,59}", name)
        if not is_folder or name in _TAKEN:
            raise ValueError(
                f"expected a name for the coord {name!r:.60} that can be that of a folder in a "
                f"store, such as 'my_coord', and is not one of {sorted(_TAKEN)}; try renaming it"
            )


def portable_coords(features: xr.Dataset) -> xr.Dataset:
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


def joined(before: Group, features: xr.Dataset, rows: range) -> dict[str, xr.Variable]:
    """Return the coords that a store gets with these features.

    Parameters
    ----------
    before
        The store as it counts, with what is unfinished.
    features, rows
        What is saved, and where.

    Raises
    ------
    StoreMismatchError
        If the features have other coords than the store, or of another kind.
    """
    ours = {str(n): c.variable for n, c in features.coords.items() if n != ERROR}
    names = features[CHECKPOINT].values.tolist()
    ours[CHECKPOINT] = xr.Variable(CHECKPOINT, np.array(names, np.dtypes.StringDType()))
    stored, changed = read_coords(before, before.coords), {}
    checkpoints = before.target().checkpoints
    if rows.stop > before.n_samples:
        if DROPPED in stored:
            ours[DROPPED] = xr.Variable(SAMPLE, np.zeros(len(rows), bool))
        new, old = (
            {name: coord for name, coord in coords.items() if SAMPLE in coord.dims}
            for coords in (ours, stored)
        )
        if before.n_samples:
            _require_same_kinds(new, old, before.folder.url)
        changed = {name: _appended(old.get(name), coord) for name, coord in new.items()}
    if checkpoints != before.checkpoints:
        columns = [names.index(name) for name in checkpoints[len(before.checkpoints) :]]
        for name, coord in ours.items():
            if coord.dims == (CHECKPOINT,):
                changed[name] = _appended(stored.get(name), coord[columns])
    if not before.n_samples:
        changed |= {n: c for n, c in ours.items() if not {SAMPLE, CHECKPOINT} & set(c.dims)}
    return changed


def _appended(stored: xr.Variable | None, new: xr.Variable) -> xr.Variable:
    if stored is None:
        return new
    return xr.Variable(new.dims, np.concatenate([stored.values, new.values]), stored.attrs)


def require_same_coords(group: Group, features: xr.Dataset, rows: range) -> None:
    """Reject coords that are not those of the store: they would not be written.

    Raises
    ------
    StoreMismatchError
        If a coord of the features is not in the store, or has other values there.
    """
    ours = {str(n): c.variable for n, c in features.coords.items() if SAMPLE in c.dims}
    ours.pop(ERROR, None)
    stored = read_coords(group, set(ours))
    for name, coord in ours.items():
        there = stored[name][rows.start : rows.stop] if name in stored else None
        if there is None or not coord.equals(there):
            raise StoreMismatchError(
                f"expected the coord {name!r} of these features as it is in the store "
                f"{group.folder.url!r}, {_difference(coord, there)}; try td.assign_coords("
                f"{group.folder.url!r}, {{{name!r}: values}}) to change the store without "
                f"computing anything, or features.drop_vars({name!r}) to go on with what it has"
            )


def _difference(ours: xr.Variable, stored: xr.Variable | None) -> str:
    if stored is None:
        return "which has none of this name"
    if kind(ours.dtype) != kind(stored.dtype) or ours.shape != stored.shape:
        return f"got {ours.dtype} {dict(ours.sizes)} instead of {stored.dtype} {dict(stored.sizes)}"
    differs = (ours != stored) & (ours.notnull() | stored.notnull())
    sample = int(differs.values.reshape(len(ours), -1).any(axis=1).argmax())
    values = (f"{variable.values[sample]!s:.60}" for variable in (ours, stored))
    return f"got {' instead of '.join(values)} at sample {sample}"


def _require_same_kinds(
    ours: Mapping[str, xr.Variable], stored: Mapping[str, xr.Variable], url: str
) -> None:
    """Reject coords that cannot be appended to those of a store."""
    kinds, expected = (
        {name: (coord.dims, kind(coord.dtype)) for name, coord in coords.items()}
        for coords in (ours, stored)
    )
    if kinds != expected:
        more, fewer = sorted(kinds.keys() - expected), sorted(expected.keys() - kinds)
        remedies = [f"features.drop_vars({more})"] if more else []
        remedies += [f"features.assign_coords({name}=...)" for name in fewer]
        raise StoreMismatchError(
            f"expected features with the coords {expected} of the store {url!r}, got {kinds}; try "
            f"{', '.join(remedies) or 'values of the same kinds'}"
        )


def kind(dtype: np.dtype[Any]) -> str:
    """Return what values of a dtype are, whatever their width."""
    kinds = {"b": "booleans", "M": "times", "m": "durations"}
    kinds |= dict.fromkeys("iuf", "numbers") | dict.fromkeys("OTU", "text")
    return kinds.get(dtype.kind, str(dtype))
