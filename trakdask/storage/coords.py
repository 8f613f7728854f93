"""Metadata of the samples in a store: as they are saved, compared, and assigned anew."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from trakdask.errors import StoreMismatchError
from trakdask.files import Folder
from trakdask.samples import normalise_coord, normalise_coords
from trakdask.storage.group import DERIVED, DROPPED, ERROR, METADATA, SCALE, Group
from trakdask.storage.lock import lock
from trakdask.storage.opening import open, read_coords
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE

__all__ = ["assign_coords", "joined", "portable_coords", "require_names", "require_same_coords"]

_TAKEN = {METADATA, "lock", "feature", "output", "out_to_loss", DROPPED, SCALE, PROJ_DIM, *DERIVED}
_LONGEST = 200


def assign_coords(
    store: str | os.PathLike[str],
    coords: Mapping[str, Any],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Change the metadata of the samples in a store, or add some; features stay as they are.

    Parameters
    ----------
    store
        Folder or fsspec URL that :func:`save` wrote.
    coords
        Name -> values (sample,), as of :func:`from_arrays`: numbers, booleans, text or times, along
        what :func:`open` returns; or along ``td.open(store, dropped=True)``, with the samples that
        :func:`drop` left out. Coords of other names stay as they are.
    storage_options
        Given to fsspec with a URL, as xarray does.

    Returns
    -------
    What :func:`open` returns from now on.

    Raises
    ------
    TypeError, ValueError
        If a name cannot be used, or values are not one per sample; also if a coord is new, or of
        another kind, and values of dropped samples are not given.
    IncompleteFeaturesError
        If the store is not complete.
    StoreBusyError
        If another process writes the store.

    Notes
    -----
    The values count all at once or not at all, whatever is killed. Nothing is computed, so a coord
    that the model read (such as the label) changes in the metadata only: its gradients are those of
    the old values. Cost: the named coords are written.

    Examples
    --------
    >>> import tempfile
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=4, proj_dim=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = td.save(features, f"{folder}/f.zarr", progress=False)
    ...     opened = td.assign_coords(f"{folder}/f.zarr", {"animal": ["cat", "dog", "dog", "cat"]})
    ...     opened.animal.values.tolist()
    ['cat', 'dog', 'dog', 'cat']
    """
    folder = Folder.at(store, storage_options)
    if not isinstance(coords, Mapping) or not coords:
        raise TypeError(
            f"expected coords as a mapping from names to values, got {coords!r:.60} "
            f"({type(coords).__name__}); try td.assign_coords(store, {{'label': labels}})"
        )
    require_names(coords)
    Group.read(folder)  # nothing is written where there is no store
    with lock(folder, "td.assign_coords") as require_held:
        group = Group.read(folder)
        group.require_complete()
        none = xr.Variable(SAMPLE, np.zeros(group.n_samples, bool))
        dropped = read_coords(group, {DROPPED}).get(DROPPED, none).values
        group.write_small(
            {name: _whole(name, given, dropped, group) for name, given in coords.items()}
        )
        require_held()
        group.commit()
        group.sweep()
    return open(store, storage_options=storage_options)


def _whole(name: str, given: Any, dropped: np.ndarray, group: Group) -> xr.Variable:
    """Return values of all samples: dropped ones keep theirs where none are given."""
    if isinstance(given, xr.DataArray) and given.dims != (SAMPLE,):
        raise ValueError(
            f"expected the coord {name!r} along ({SAMPLE!r},), got the dimensions {given.dims}; "
            "try .values if it has one value per sample"
        )
    n_all, n_shown = len(dropped), int((~dropped).sum())
    is_whole = not dropped.any() or (hasattr(given, "__len__") and len(given) == n_all)
    new = normalise_coords({name: given}, (), n_all if is_whole else n_shown)[name]
    if is_whole:
        return xr.Variable((SAMPLE,), new)
    before = read_coords(group, {name}).get(name)  # only here: what is damaged can be assigned anew
    if before is None or _kind(before.dtype) != _kind(new.dtype):
        was = "new" if before is None else f"{_kind(before.dtype)} so far"
        raise ValueError(
            f"expected values of all {n_all} samples for the coord {name!r}, which is {was}, since "
            f"{n_all - n_shown} of them were dropped, got {n_shown}; try values along "
            "td.open(store, dropped=True)"
        )
    values = before.values.astype(np.result_type(before.dtype, new.dtype))
    values[~dropped] = new
    return xr.Variable((SAMPLE,), values, before.attrs)


def require_names(coords: Iterable[object]) -> None:
    """Reject names of coords that cannot be the name of their folder in a store.

    Raises
    ------
    TypeError
        If a name is no text.
    ValueError
        If it is that of another folder, or of none.
    """
    for name in coords:
        if not isinstance(name, str):
            raise TypeError(
                f"expected text as the name of a coord, got {name!r} ({type(name).__name__}); try "
                f"renaming it to {str(name)!r}"
            )
        bad = not name.strip(". ") or name in _TAKEN or name.startswith("__")
        bad = bad or any(each in "/\\ " or not each.isprintable() for each in name)
        if bad or len(name.encode(errors="replace")) > _LONGEST:
            raise ValueError(
                f"expected a name for the coord {name!r:.60} that can be the name of a folder in a "
                "store, printable, without spaces and slashes, and not one of "
                f"{sorted(_TAKEN)}; try features.rename({{{name!r:.60}: 'my_coord'}})"
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


def joined(
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
        If the features have other coords than the store, or of another kind.
    """
    ours = {str(n): c.variable for n, c in features.coords.items() if n not in (ERROR, CHECKPOINT)}
    known, changed = read_coords(before), {}
    if rows.stop > before.n_samples:
        mask = known.pop(DROPPED, None)
        old = {name: coord for name, coord in known.items() if SAMPLE in coord.dims}
        new = {name: coord for name, coord in ours.items() if SAMPLE in coord.dims}
        if before.n_samples:
            _require_coords(new, old, before.folder.url)
        changed = {
            name: _concatenated([old[name], coord] if name in old else [coord])
            for name, coord in new.items()
        }
        if mask is not None:
            changed[DROPPED] = _concatenated([mask, xr.Variable(SAMPLE, np.zeros(len(rows), bool))])
    if group.checkpoints != before.checkpoints:
        names = np.array(group.checkpoints, np.dtypes.StringDType())
        changed[CHECKPOINT] = xr.Variable(CHECKPOINT, names)
        here = features[CHECKPOINT].values.tolist()
        new_columns = [here.index(n) for n in group.checkpoints[len(before.checkpoints) :]]
        for name, coord in ours.items():
            if coord.dims == (CHECKPOINT,):
                parts = [known[name]] if name in known else []
                changed[name] = _concatenated([*parts, coord[new_columns]])
    if not before.n_samples:
        changed |= {n: c for n, c in ours.items() if not {SAMPLE, CHECKPOINT} & set(c.dims)}
    return changed


def _concatenated(parts: list[xr.Variable]) -> xr.Variable:
    data = np.concatenate([part.values for part in parts])
    return xr.Variable(parts[0].dims, data, parts[0].attrs)


def require_same_coords(group: Group, features: xr.Dataset, rows: range) -> None:
    """Reject coords that are not those of the store: they would not be written.

    Raises
    ------
    StoreMismatchError
        If a coord of the features is not in the store, or has other values there.
    """
    ours = {str(n): c.variable for n, c in features.coords.items() if SAMPLE in c.dims}
    known = read_coords(group, set(ours))
    for name, coord in ours.items():
        if name == ERROR:
            continue
        there = known.get(name)
        here = None if there is None else there[rows.start : rows.stop]
        if here is not None and _kind(here.dtype) == _kind(coord.dtype) == "text":
            here = here.astype(coord.dtype)  # xarray takes text of two dtypes for different
        if here is None or not coord.equals(here):
            raise StoreMismatchError(
                f"expected the coord {name!r} of these features as it is in the store "
                f"{group.folder.url!r}, {_difference(coord, here)}; try td.assign_coords("
                f"{group.folder.url!r}, {{{name!r}: values}}) to change the store without "
                f"computing anything, or features.drop_vars({name!r}) to go on with what it has"
            )


def _require_coords(
    ours: Mapping[str, xr.Variable], known: Mapping[str, xr.Variable], url: str
) -> None:
    if set(ours) != set(known):
        remedies = [f"features.drop_vars({sorted(set(ours) - set(known))})"] * (
            not set(ours) <= set(known)
        )
        remedies += [f"features.assign_coords({name}=...)" for name in set(known) - set(ours)]
        raise StoreMismatchError(
            f"expected features with the coords {sorted(known)} of the store {url!r}, got "
            f"{sorted(ours)}; try {', '.join(remedies)}"
        )
    for name, coord in known.items():
        if ours[name].dims != coord.dims or _kind(ours[name].dtype) != _kind(coord.dtype):
            raise StoreMismatchError(
                f"expected the coord {name!r} of these features as {_kind(coord.dtype)} "
                f"{coord.dims}, as it is in the store {url!r}, got {ours[name].dtype} "
                f"{ours[name].dims}; try features.assign_coords({name}=...)"
            )


def _kind(dtype: np.dtype[Any]) -> str:
    """Return what values of a dtype are, whatever their width."""
    kinds = {"b": "booleans", "M": "times", "m": "durations"}
    kinds |= dict.fromkeys("iuf", "numbers") | dict.fromkeys("OTU", "text")
    return kinds.get(dtype.kind, str(dtype))


def _difference(ours: xr.Variable, known: xr.Variable | None) -> str:
    if known is None:
        return "got one that the store does not have"
    if _kind(ours.dtype) != _kind(known.dtype) or ours.shape != known.shape:
        return f"got {ours.dtype} {dict(ours.sizes)} instead of {known.dtype} {dict(known.sizes)}"
    different = np.asarray(ours.values != known.values).reshape(len(ours), -1).any(axis=1)
    sample = int(np.flatnonzero(different)[0])
    values = (f"{each.values[sample]!s:.60}" for each in (ours, known))
    return (
        f"got {' instead of '.join(values)} at sample {sample}, where the first of "
        f"{int(different.sum()):,} values differs"
    )
