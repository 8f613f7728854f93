"""Metadata of the samples of a store: as saved, or as assigned since."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from trakdask.arrays.blocks import block_starts
from trakdask.errors import IncompleteFeaturesError, StoreMismatchError
from trakdask.samples import normalise_coord
from trakdask.storage.blocks import opened
from trakdask.storage.history import Edit
from trakdask.storage.parts import (
    BESIDE,
    ERROR,
    FEATURE_NAMES,
    REDUCTIONS,
    SCALE,
    Part,
    write_coords,
)
from trakdask.storage.zarr_stores import METADATA, checksum
from trakdask.variables import SAMPLE

__all__ = [
    "DROPPED",
    "StoredCoord",
    "by_source",
    "kind_of",
    "lazy_coord",
    "opened_rows",
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


def opened_rows(
    parts: Sequence[Part],
    assigned: Edit | None,
    *,
    only: Collection[str] | None = None,
    complete: bool = True,
) -> list[xr.Dataset]:
    """Return the first part of each row as it is on disk, without coords that were assigned since.

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

    Raises
    ------
    IncompleteFeaturesError
        If files of a coord were lost.
    ValueError
        If they were changed.
    """
    covered, given = 0, set[str]()
    if assigned is not None:
        covered, given = len(by_source(parts[: assigned.n_parts])), set(assigned.attrs["coords"])
    return [
        _own(row[0], given if number < covered else set(), only, complete=complete)
        for number, row in enumerate(by_source(parts))
    ]


def sample_coords(
    parts: Sequence[Part],
    assigned: Edit | None,
    opened_parts: Sequence[xr.Dataset],
    *,
    only: Collection[str] | None = None,
    load: bool = True,
) -> dict[str, xr.Variable]:
    """Return the coords of all samples: what was assigned, else what was saved.

    Parameters
    ----------
    parts, assigned, only
        As those of :func:`opened_rows`.
    opened_parts
        What that returns.
    load
        Whether their values are in memory; else they are lazy, in the blocks of the features.
    """
    given, covered = dict[str, xr.Variable](), list[list[Part]]()
    if assigned is not None:
        given = _variables(_opened(assigned), only)
        covered = by_source(parts[: assigned.n_parts])
    own, rows = [_variables(each, only) for each in opened_parts], by_source(parts)
    sizes = tuple(size for row in rows for size in _block_sizes(row[0]))
    token = tokenize([row[0].token for row in rows], assigned and str(assigned.files))
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
) -> xr.Dataset:
    """Return a part as it is on disk, without the coords that were assigned since."""
    names = superseded
    if complete:
        names = part.arrays - {*FEATURE_NAMES, *REDUCTIONS, SCALE, ERROR}
        unwanted = set() if only is None else names - set(only)
        superseded = superseded | unwanted
    ds = opened(part, complete=complete, without=superseded)
    if complete and (lost := sorted(names - superseded - set(map(str, ds.variables)))):
        raise IncompleteFeaturesError(
            f"expected the coords {sorted(names)} in the store {part.folder.url!r}, but {lost} "
            "were lost; try td.verify(store, repair=True), then td.save(features, store) with the "
            f"features that have them, or td.assign_coords(store, {{{lost[0]!r}: values}})"
        )
    return ds


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
    known = {path: each for path, each in part.files.items() if not path.endswith(METADATA)}
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


# ---------------------------------------------------------- coords that stay in the store


def lazy_coord(
    variables: Sequence[xr.Variable], sizes: tuple[int, ...], name: str, token: str
) -> xr.Variable:
    """Return a coord of all samples whose values are read block by block, when they are asked for.

    Parameters
    ----------
    variables
        What xarray opened, one part of the samples after the other; not read yet.
    sizes
        Numbers of samples in the blocks of the features.
    name, token
        The name of the coord, and a hash that identifies its values.
    """
    stored = StoredCoord(variables)
    label = "".join(each if each.isalnum() else "-" for each in name)
    full_name = f"open-coord-{label}-{tokenize(name, token)}"
    data = da.from_array(stored, chunks=(sizes,), name=full_name, meta=np.empty(0, stored.dtype))
    return xr.Variable(variables[0].dims, data, variables[0].attrs)


class StoredCoord:
    """Looks like an array, but reads the rows that an index selects, decoded by xarray."""

    ndim = 1

    def __init__(self, variables: Sequence[xr.Variable]) -> None:
        self._variables = tuple(variables)
        self.shape = (sum(len(each) for each in variables),)
        self.dtype = np.result_type(*(each.dtype for each in variables))

    def __getitem__(self, key: Any) -> np.ndarray:
        (index,) = key if isinstance(key, tuple) else (key,)
        if isinstance(index, slice):
            rows = range(self.shape[0])[index]
            if not rows:
                return np.empty(0, self.dtype)
            return self._read(min(rows[0], rows[-1]), max(rows[0], rows[-1]) + 1)[:: rows.step]
        positions = np.asarray(index)
        first = positions.min(initial=self.shape[0])
        found: np.ndarray = self._read(first, positions.max(initial=-1) + 1)[positions - first]
        return found

    def _read(self, start: int, stop: int) -> np.ndarray:
        variables = self._variables
        starts = block_starts(tuple(map(len, variables))).tolist()
        found = []
        for variable, (first, last) in zip(variables, itertools.pairwise(starts), strict=True):
            rows = slice(max(start, first) - first, max(min(stop, last) - first, 0))
            if rows.start < rows.stop:
                found.append(np.asarray(variable[rows].values, self.dtype))
        return np.concatenate(found) if found else np.empty(0, self.dtype)
