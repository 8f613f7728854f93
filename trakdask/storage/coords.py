"""Metadata of the samples of a store: as saved, or as assigned since."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from dask.base import tokenize
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from trakdask.errors import IncompleteFeaturesError, StoreMismatchError
from trakdask.samples import normalise_coord
from trakdask.storage.blocks import opened, part_token
from trakdask.storage.history import Edit
from trakdask.storage.lazy_coords import lazy_coord
from trakdask.storage.parts import (
    BESIDE,
    FEATURE_NAMES,
    METADATA,
    REDUCTIONS,
    SCALE,
    Part,
    listed,
    listed_coords,
    write_coords,
)
from trakdask.storage.zarr_stores import checksum
from trakdask.variables import SAMPLE

__all__ = [
    "DROPPED",
    "by_source",
    "kind_of",
    "portable_coords",
    "require_kinds",
    "require_names",
    "require_same_coords",
    "restore_coords",
    "sample_coords",
    "without_sample_coords",
]

DROPPED = "dropped"
_TAKEN = BESIDE | {DROPPED, METADATA, SCALE, *FEATURE_NAMES, *REDUCTIONS}
_LONGEST = 200


def by_source(parts: Sequence[Part]) -> list[list[Part]]:
    """Return the parts of the same samples together, in the order of the first of each."""
    rows: dict[Any, list[Part]] = {}
    for part in parts:
        rows.setdefault(part.source, []).append(part)
    return list(rows.values())


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
        bad = bad or any(each in "/\\" or not each.isprintable() for each in name)
        if bad or len(name.encode(errors="replace")) > _LONGEST:
            raise ValueError(
                f"expected a name for the coord {name!r:.60} that can be the name of a folder in a "
                f"store, printable and without slashes, and not one of {sorted(_TAKEN)}; try "
                f"features.rename({{{name!r:.60}: 'my_coord'}})"
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


def without_sample_coords(ds: xr.Dataset) -> xr.Dataset:
    """Return a Dataset without the coords along samples."""
    return ds.drop_vars([name for name, coord in ds.coords.items() if SAMPLE in coord.dims])


def sample_coords(
    parts: Sequence[Part],
    assigned: Edit | None,
    *,
    only: Collection[str] | None = None,
    complete: bool = True,
    load: bool = True,
) -> dict[str, xr.Variable]:
    """Return the coords of all samples: what was assigned, else what was saved.

    Parameters
    ----------
    parts
        Those of the store.
    assigned
        The last assignment of coords, if there was one.
    only
        Names of the coords that are wanted; all by default.
    complete
        Whether files that were lost or changed raise an error.
    load
        Whether their values are in memory; else they are lazy, in the blocks of the features.

    Raises
    ------
    IncompleteFeaturesError
        If files of a coord were lost.
    ValueError
        If they were changed.
    """
    if only is not None and not only:
        return {}
    given, covered = dict[str, xr.Variable](), list[list[Part]]()
    if assigned is not None:
        given = _variables(_opened(assigned), only)
        covered = by_source(parts[: assigned.n_parts])
    own, rows = [], by_source(parts)
    for number, row in enumerate(rows):
        superseded = set(given) if number < len(covered) else set()
        own.append(_own(row[0], superseded, only, complete=complete))
    sizes = tuple(size for row in rows for size in _block_sizes(row[0]))
    token = tokenize([part_token(row[0]) for row in rows], assigned and str(assigned.files))
    coords = {}
    for name in [*given, *(name for name in own[0] if name not in given)]:
        first, start = ([given[name]], len(covered)) if name in given else ([], 0)
        variables = [*first, *(each[name] for each in own[start:])]
        is_lazy = not load and variables[0].dims == (SAMPLE,)
        coords[name] = lazy_coord(variables, sizes, name, token) if is_lazy else _joined(variables)
    return coords


def _block_sizes(part: Part) -> list[int]:
    n, block = part.layout["samples"], part.layout["block"]
    return [min(block, n - start) for start in range(0, n, block)]


def _opened(assigned: Edit) -> xr.Dataset:
    ds: xr.Dataset = xr.open_zarr(assigned.store(), consolidated=False, chunks=None, zarr_format=3)
    return ds


def _own(
    part: Part, superseded: set[str], only: Collection[str] | None, *, complete: bool
) -> dict[str, xr.Variable]:
    """Return the coords that a part was saved with, but those that were assigned since."""
    names = superseded
    if complete:
        names = set(listed_coords(listed(part)))
        unwanted = set() if only is None else names - set(only)
        superseded = superseded | unwanted
    ds = opened(part, complete=complete, without=superseded)
    if complete and (lost := sorted(names - superseded - set(map(str, ds.variables)))):
        raise IncompleteFeaturesError(
            f"expected the coords {sorted(names)} in the store {part.folder.url!r}, but {lost} "
            "were lost; try td.verify(store, repair=True), then td.save(features, store) with the "
            f"features that have them, or td.assign_coords(store, {{{lost[0]!r}: values}})"
        )
    return _variables(ds, only)


def _variables(ds: xr.Dataset, only: Collection[str] | None) -> dict[str, xr.Variable]:
    along = {str(name): coord for name, coord in ds.coords.items() if SAMPLE in coord.dims}
    return {name: coord.variable for name, coord in along.items() if only is None or name in only}


def _joined(parts: Sequence[xr.Variable]) -> xr.Variable:
    if len(parts) == 1:
        return parts[0].load()
    values = np.concatenate([part.values for part in parts])
    return xr.Variable(parts[0].dims, values, parts[0].attrs)


def require_same_coords(features: xr.Dataset, known: Mapping[str, xr.Variable], url: str) -> None:
    """Reject coords that are not those of the store: they would not be written.

    Raises
    ------
    StoreMismatchError
        If a coord of the features is not in the store, or has other values there.
    """
    for name, coord in features.coords.items():
        if SAMPLE not in coord.dims or (
            name in known and _are_same(coord.variable, known[str(name)])
        ):
            continue
        raise StoreMismatchError(
            f"expected the coord {name!r} of these features as it is in the store {url!r}, "
            f"{_difference(coord.variable, known.get(str(name)))}; try td.assign_coords("
            f"{url!r}, {{{name!r}: values}}) to change the store without computing anything, or "
            f"features.drop_vars({name!r}) to go on with what it has"
        )


def require_kinds(features: xr.Dataset, known: Mapping[str, xr.Variable], url: str) -> None:
    """Reject coords to be appended that are of another kind than those of the store."""
    for name, variable in known.items():
        ours = features[name].variable
        if ours.dims != variable.dims or kind_of(ours.dtype) != kind_of(variable.dtype):
            raise StoreMismatchError(
                f"expected the coord {name!r} of these features as {kind_of(variable.dtype)} "
                f"{variable.dims}, as it is in the store {url!r}, got {ours.dtype} {ours.dims}; "
                f"try features.assign_coords({name}=...)"
            )


def kind_of(dtype: np.dtype[Any]) -> str:
    """Return what values of a dtype are, whatever their width."""
    kinds = {"b": "booleans", "M": "times", "m": "durations"}
    kinds |= dict.fromkeys("iuf", "numbers") | dict.fromkeys("OTU", "text")
    return kinds.get(dtype.kind, str(dtype))


def _are_same(ours: xr.Variable, known: xr.Variable) -> bool:
    return _are_alike(ours, known) and not _differing(ours, known).any()


def _are_alike(ours: xr.Variable, known: xr.Variable) -> bool:
    same_kind = kind_of(ours.dtype) == kind_of(known.dtype)
    return same_kind and (ours.dims, ours.shape) == (known.dims, known.shape)


def _differing(ours: xr.Variable, known: xr.Variable) -> np.ndarray:
    values, expected = np.asarray(ours.values), np.asarray(known.values)
    different = np.asarray(values != expected, bool)
    if values.dtype.kind in "fMm":
        different &= ~(np.isnan(values) & np.isnan(expected))
    return different


def _difference(ours: xr.Variable, known: xr.Variable | None) -> str:
    if known is None:
        return "got one that the store does not have"
    if not _are_alike(ours, known):
        return f"got {ours.dtype} {dict(ours.sizes)} instead of {known.dtype} {dict(known.sizes)}"
    different = _differing(ours, known)
    sample = int(np.flatnonzero(different.reshape(len(different), -1).any(axis=1))[0])
    return (
        f"got {_shown(ours.values[sample])} instead of {_shown(known.values[sample])} at sample "
        f"{sample}, where the first of {int(different.sum()):,} values differs"
    )


def _shown(value: object) -> str:
    return f"{value!r:.60}" if isinstance(value, str) else f"{value!s:.60}"


def restore_coords(part: Part, features: xr.Dataset, sizes: Mapping[str, int]) -> list[str]:
    """Write files of coords again that are lost or changed, where features still have them.

    Parameters
    ----------
    part
        Part of the store.
    features
        Its features, with coords.
    sizes
        A listing of its folder.

    Returns
    -------
    The paths of the files. Only what has the checksum of the file that was lost is written.
    """
    known = {path: each for path, each in listed(part).items() if not path.endswith(METADATA)}
    lost = [path for path in known if not _is_there(part, path, known[path], sizes)]
    if not lost:
        return []
    again = _encoded(features)
    restored = []
    for path in lost:
        data = again.get(path)
        if data is not None and [len(data), checksum(data)] == known[path]:
            part.folder.write(path, data)
            restored.append(path)
    return restored


def _is_there(part: Part, path: str, about: Sequence[int], sizes: Mapping[str, int]) -> bool:
    size, known = about
    return sizes.get(path) == size and checksum(part.folder.read(path)) == known


def _encoded(features: xr.Dataset) -> dict[str, bytes]:
    """Return the files of the coords, as they would be written."""
    files: dict[str, Buffer] = {}
    write_coords(MemoryStore(files), features.coords.to_dataset())
    return {path: buffer.to_bytes() for path, buffer in files.items()}
