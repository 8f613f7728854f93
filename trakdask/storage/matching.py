"""Where features belong in a store: what they and the store must share, and what they add."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import xarray as xr

from trakdask.errors import IncompleteFeaturesError, StoreMismatchError
from trakdask.provenance import BY_CHECKPOINT, STORE_SPEC, require_same, spec
from trakdask.samples import normalise_coord
from trakdask.storage.blocks import names_of, require_same_rows
from trakdask.storage.group import DROPPED, ERROR, METADATA, SCALE, Group
from trakdask.storage.reading import read_coords
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, VARIABLES

AppendDim = Literal["sample", "checkpoint"]

_TAKEN = {METADATA, "lock", DROPPED, SCALE, *VARIABLES} - {ERROR}
_SAME = tuple(name for name in STORE_SPEC if name not in (*BY_CHECKPOINT, "source"))


def blockwise(features: xr.Dataset) -> list[str]:
    """Return the names of what is stored block by block: all numbers of samples and checkpoints."""
    variables = {str(n): v for n, v in features.data_vars.items() if v.dims == (SAMPLE, CHECKPOINT)}
    return ["feature", *(n for n, v in variables.items() if v.dtype.kind == "f")]


def place(
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
    target, attrs, names = before.target(), spec(features), names_of(features)
    what = f"these features and the store {before.folder.url!r}"
    require_same(attrs, target.attrs, what=what, names=_SAME)
    _require_arrays(target, features, dtype)
    common = [name for name in names if name in target.checkpoints]
    if common:
        ours, theirs = (_of_checkpoints(each, common) for each in (attrs, target.attrs))
        require_same(ours, theirs, what=what, names=BY_CHECKPOINT)
    rows, sources = _known_rows(target, features, append_dim), [*target.attrs["sources"]]
    if rows is not None and names == common:
        return rows
    if append_dim and "unfinished" in before.attrs:
        raise IncompleteFeaturesError(
            f"expected no unfinished append in the store {before.folder.url!r}: "
            f"{before.about_unfinished()}"
        )
    # More samples come with all checkpoints; more checkpoints of samples are to be asked for.
    may_differ = append_dim == CHECKPOINT
    if rows is None:
        rows = range(target.n_samples, target.n_samples + features.sizes[SAMPLE])
        sources.append([str(attrs.get("source", "")), len(rows)])
        may_differ = {*names} == {*target.checkpoints} or not target.n_samples
        if rows.start and append_dim != SAMPLE:
            raise StoreMismatchError(
                f"{what} differ in source: expected {target.attrs['sources']} (source, samples), "
                f"got {attrs.get('source')!r}, {len(rows)}; try another store, or "
                "append_dim='sample' if these are more samples of it"
            )
    if not may_differ:
        require_same(attrs, target.attrs, what=what, names=BY_CHECKPOINT)
    added = _of_checkpoints(attrs, [name for name in names if name not in common])
    before.attrs["unfinished"] = {
        "source": " + ".join(source for source, _ in sources),
        "sources": sources,
        **{name: {**target.attrs.get(name, {}), **added[name]} for name in added},
    }
    return rows


def _of_checkpoints(attrs: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    fields = [field for field in BY_CHECKPOINT if field in attrs]
    return {field: {name: attrs[field][name] for name in names} for field in fields}


def _require_arrays(group: Group, features: xr.Dataset, dtype: str | None) -> None:
    """Reject features of another width, dtype, or with other variables."""
    feature = group.arrays["feature"]
    for name, ours, theirs in (
        ("proj_dim", features.sizes[PROJ_DIM], feature["shape"][1]),
        ("dtype", str(dtype or features.feature.dtype), feature["data_type"]),
        ("variables", sorted(blockwise(features)), sorted({*group.features} - {ERROR, SCALE})),
    ):
        if ours != theirs:
            raise StoreMismatchError(
                f"expected features with the {name} {theirs} of the store {group.folder.url!r}, "
                f"got {ours}; try featurizing as for the store, or another store"
            )


def _known_rows(group: Group, features: xr.Dataset, append_dim: AppendDim | None) -> range | None:
    """Return where samples are that were begun before, None if these are others.

    Sets of as many samples of the same source, as two selections may be, are told apart by their
    features.
    """
    source = features.attrs.get("source", ""), features.sizes[SAMPLE]
    error = None
    for name, rows in group.rows_of_sources():
        if (name, len(rows)) == source:
            try:
                require_same_rows(group, features, rows)
                return rows
            except StoreMismatchError as err:
                error = err
    if error is not None and append_dim != SAMPLE:
        raise error
    return None


# ------------------------------------------------------------------------------------------ coords


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
    ours = {str(n): c.variable for n, c in features.coords.items() if n not in (ERROR, CHECKPOINT)}
    stored, names = read_coords(before, before.coords), features[CHECKPOINT].values.tolist()
    checkpoints, changed = before.target().checkpoints, {}
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
        text = np.array(checkpoints, np.dtypes.StringDType())
        changed[CHECKPOINT] = xr.Variable(CHECKPOINT, text)
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
    sample = int(np.argwhere(differs.values)[0, 0])
    values = (f"{coord.values[sample]!s:.60}" for coord in (ours, stored))
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
        raise StoreMismatchError(
            f"expected features with the coords {expected} of the store {url!r}, got {kinds}; try "
            "features.drop_vars(...) or features.assign_coords(...), so that they are the same"
        )


def kind(dtype: np.dtype[Any]) -> str:
    """Return what values of a dtype are, whatever their width."""
    kinds = {"b": "booleans", "M": "times", "m": "durations"}
    kinds |= dict.fromkeys("iuf", "numbers") | dict.fromkeys("OTU", "text")
    return kinds.get(dtype.kind, str(dtype))
