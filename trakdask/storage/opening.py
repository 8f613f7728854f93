"""Saved features as one lazy Dataset, whatever was appended, dropped or assigned since."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import add
from typing import Any

import dask.array as da
import numpy as np
import psutil
import xarray as xr
import zarr

from trakdask.errors import IncompleteFeaturesError, UnfinishedAppendWarning
from trakdask.files import Folder
from trakdask.provenance import digest
from trakdask.storage.blocks import opened, stored
from trakdask.storage.coords import (
    DROPPED,
    opened_rows,
    sample_coords,
    without_sample_coords,
)
from trakdask.storage.factors import with_factors
from trakdask.storage.history import Edit, runs
from trakdask.storage.parts import (
    BESIDE,
    ERROR,
    FEATURE_NAMES,
    GRAM,
    LOSS_GRADIENT,
    REDUCTIONS,
    SCALE,
    Part,
)
from trakdask.storage.snapshot import (
    BLOCKS_AT_MOST,
    BY_CHECKPOINT,
    Snapshot,
    completed,
    snapshot,
    with_all_checkpoints,
)
from trakdask.storage.zarr_stores import METADATA, Arrays
from trakdask.variables import CHECKPOINT, SAMPLE, VARIABLES

__all__ = ["open"]

_FORMULA = {GRAM: "gram_weights", LOSS_GRADIENT: "loss_weights"}
_POOLED = "pooled_checkpoints"


def open(
    store: str | os.PathLike[str],
    *,
    require_complete: bool = True,
    dropped: bool = False,
    load_coords: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Open saved features as a lazy Dataset; metadata coords are loaded, arrays are not.

    Parameters
    ----------
    store
        Folder or fsspec URL that :func:`save` wrote.
    require_complete
        Reject a store that lacks blocks: they would read as NaN.
    dropped
        Show the samples that :func:`drop` left out, too, marked by the coord ``dropped``; without
        the sums that do not cover them.
    load_coords
        ``False`` leaves the coords of samples in the store, as Dask arrays in the blocks of the
        features: at 10⁸ samples, five coords take some gigabytes. :func:`top_k` then reads, in its
        tasks, those of the samples that it has found, and for a function ``where=`` those of each
        tile. :func:`group_score`, and a mask such as ``scores.label == 3``, read that one coord
        when they are called. Results are the same. After :func:`drop`, or once rows were selected
        by numbers, a query reads the coords of its rows as a whole. ``groupby`` of xarray needs
        ``ds.label.load()`` first.
    storage_options
        Given to fsspec with a URL, as xarray does.

    Returns
    -------
    Dataset with ``feature`` (sample, proj_dim, checkpoint), ``output`` and ``out_to_loss`` (sample,
    checkpoint) and, if saved, ``gram`` (proj_dim, proj_dim_1, checkpoint), ``loss_gradient``
    (proj_dim, checkpoint), ``gram_eigenvalues`` (component, checkpoint), ``gram_eigenvectors``
    (proj_dim, component, checkpoint) and ``damping`` (checkpoint), λ, whose ``attrs`` say what
    chose it; if samples failed, the coord ``error`` (sample, checkpoint) says why, ""
    where they did not. ``sample`` has no index. Its ``attrs`` say how the features were made
    (hashes of weights, source, projector, parameters, task, precision, versions) and, in ``saved``,
    when, by how many hosts, on what devices, by what kernels, and in how many runs.

    Raises
    ------
    FileNotFoundError
        If there is no such store.
    IncompleteFeaturesError
        If blocks or coords are missing; when it is computed, if the file of a block has been lost
        since.
    ValueError
        If its metadata make no sense, coords or blocks would not fit in memory, or the bytes of
        metadata or coords are not those that were written; when it is computed, if those of a block
        are not.

    Warns
    -----
    UnfinishedAppendWarning
        If an append was cut short, or goes on in another process: what is shown is the store as it
        was before, and the warning says how to finish it.
    """
    flags = {
        "require_complete": require_complete, "dropped": dropped, "load_coords": load_coords
    }  # fmt: skip
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"expected {name}=True or False, got {value!r:.60}; try {name}=True")
    shown = snapshot(Folder.at(store, storage_options))
    if require_complete:
        shown = completed(shown)
    if shown.unfinished:
        text = (
            f"expected no unfinished append in the store {shown.folder.url!r}, which is shown as "
            f"it was before: {shown.unfinished}"
        )
        warnings.warn(text, UnfinishedAppendWarning, stacklevel=2)
    for part in shown.parts:
        _require_sense(part, complete=require_complete, load_coords=load_coords)
    ds = _assembled(shown, complete=require_complete, load_coords=load_coords)
    names = [name for name in (*FEATURE_NAMES, *REDUCTIONS) if name in ds]
    ds = _with_errors(ds[names], shown)
    ds = with_factors(shown.factors, _without_dropped(ds, show=dropped))
    return ds.assign_attrs(saved=runs(shown.parts))


def _without_dropped(ds: xr.Dataset, *, show: bool) -> xr.Dataset:
    if DROPPED not in ds.coords:
        return (
            ds.assign_coords({DROPPED: (SAMPLE, np.zeros(ds.sizes[SAMPLE], bool))}) if show else ds
        )
    if show:
        return ds.drop_vars(REDUCTIONS, errors="ignore")
    return ds.isel({SAMPLE: np.flatnonzero(~ds[DROPPED].values)}).drop_vars(DROPPED)


# ------------------------------------------------------------------------------ does it make sense


def _require_sense(part: Part, *, complete: bool = True, load_coords: bool = True) -> None:
    """Reject arrays that contradict the layout or do not fit in memory, before any is made.

    And, if it is to be complete, a part whose metadata are not those that were written.
    """
    url, own = part.folder.url, (*FEATURE_NAMES, ERROR, SCALE, *REDUCTIONS)
    available = psutil.virtual_memory().available
    for name, of in _members(part, complete):
        rows = (*of.shape[:1], *of.chunks[:1])
        needed_rows = part.layout["samples"], part.layout["block"]
        if name in (*FEATURE_NAMES, ERROR) and rows != needed_rows:
            raise ValueError(
                f"expected {name!r} of the store {url!r} to have (samples, samples per block) "
                f"{needed_rows}, got {rows}; its metadata are damaged: try td.verify(store)"
            )
        in_memory = of.shape if load_coords and name not in own else of.chunks
        needed = math.prod(in_memory) * of.dtype.itemsize
        if needed > available or of.nchunks > BLOCKS_AT_MOST:
            raise ValueError(
                f"expected {name!r} of the store {url!r} to take at most the {available:,} bytes "
                f"that are free, in {BLOCKS_AT_MOST:,} chunks, got {needed:,} bytes and "
                f"{of.nchunks:,} chunks; try a larger machine, or td.verify(store) if the numbers "
                "are absurd: then its metadata are damaged"
            )


def _members(part: Part, complete: bool) -> Iterator[tuple[str, zarr.Array[Any]]]:
    """Yield the arrays of a part by their names."""
    store = part.store(complete=complete)
    for name in sorted(part.arrays if complete else set(part.folder.names()) - BESIDE):
        with suppress(KeyError):  # a file, or a foreign folder
            yield name, _member(store, name, part)


def _member(store: Arrays, name: str, part: Part) -> zarr.Array[Any]:
    try:
        return store.array(name)
    except (IncompleteFeaturesError, KeyError, OSError):
        raise  # an OSError is of the disk or the network, and says nothing about the metadata
    except Exception as err:
        raise ValueError(
            f"expected the metadata of {name!r} in the store {part.folder.url!r} as they were "
            f"written, got what cannot be read ({err}); try td.verify(store, repair=True)"
        ) from err


# -------------------------------------------------------------------------- one array of many parts


def _assembled(store: Snapshot, *, complete: bool, load_coords: bool) -> xr.Dataset:
    """Return the parts of a store as one lazy Dataset.

    A coord ``dropped`` marks samples, if any were.
    """
    on_disk = opened_rows(store.parts, store.assigned, complete=complete)
    coords = sample_coords(store.parts, store.assigned, on_disk, load=load_coords)
    first, names = store.parts[0], store.checkpoints
    if len(store.parts) == 1 and store.drop is None:
        return _stored(first, on_disk[0], complete=complete).assign_coords(coords)
    rows = [
        _row(row, each, names, complete, coords)
        for row, each in zip(store.rows, on_disk, strict=True)
    ]
    ds = _concat([row[list(FEATURE_NAMES)] for row in rows], SAMPLE) if len(rows) > 1 else rows[0]
    ds = (
        ds[list(FEATURE_NAMES)]
        .assign_coords(coords)
        .assign_attrs(
            source=" + ".join(str(row.attrs.get("source")) for row in rows),
            layout={**first.layout, "samples": ds.sizes[SAMPLE]},
        )
    )
    return _with_reductions(ds, store, complete=complete)


def _stored(part: Part, on_disk: xr.Dataset, *, complete: bool) -> xr.Dataset:
    """Return features and reductions of a part, without coords along samples."""
    ds = on_disk.drop_vars(list(on_disk.data_vars))
    return without_sample_coords(ds.assign(stored(part, complete=complete)))


def _with_reductions(ds: xr.Dataset, store: Snapshot, *, complete: bool) -> xr.Dataset:
    """Return all samples, marked where they are dropped, with what is reduced from the others."""
    added = store.parts if store.drop is None else store.parts[store.drop.n_parts :]
    reduced = [
        xr.Dataset(stored(part, complete=complete), {CHECKPOINT: list(part.spec["checkpoints"])})
        for part in added
    ]
    n_dropped, names = 0, store.checkpoints
    if store.drop is not None:
        mask = store.dropped()
        n_dropped = int(mask.sum())
        ds = ds.assign_coords({DROPPED: (SAMPLE, mask)})
        packed = np.packbits(mask).tobytes().hex()
        ds.attrs["source"] += f" without {digest({'dropped': packed})[:16]}"
        reduced.append(_remaining(store.drop))
    about = {"n_samples": ds.sizes[SAMPLE] - n_dropped, "source": ds.attrs["source"]}
    totals = {name: _total(name, reduced, names) for name in REDUCTIONS}
    return ds.assign({n: v.assign_attrs(about) for n, v in totals.items() if v is not None})


def _remaining(drop: Edit) -> xr.Dataset:
    """Return what is reduced from the samples that a drop left, lazy."""
    store = drop.store()
    members = {n: store.array(n) for n in REDUCTIONS if f"{n}/{METADATA}" in drop.files}
    data = {
        name: (VARIABLES[name].dims, da.from_zarr(of), dict(of.attrs))
        for name, of in members.items()
    }
    return xr.Dataset(data, coords={CHECKPOINT: drop.attrs["checkpoints"]})


def _row(
    row: Sequence[Part],
    first: xr.Dataset,
    names: list[str],
    complete: bool,
    coords: Collection[str],
) -> xr.Dataset:
    """Return the samples of one source at the named checkpoints, without coords along samples."""
    others = (opened(part, complete=complete, without=coords) for part in row[1:])
    pairs = zip(row, (first, *others), strict=True)
    parts = [_stored(part, each, complete=complete)[list(FEATURE_NAMES)] for part, each in pairs]
    attrs = {**first.attrs, **with_all_checkpoints(row).spec}
    ds = _concat(parts, CHECKPOINT) if len(parts) > 1 else parts[0]
    here = [str(name) for name in ds[CHECKPOINT].values]
    ordered = attrs | {field: {n: attrs[field][n] for n in names} for field in BY_CHECKPOINT}
    return ds.isel({CHECKPOINT: [here.index(name) for name in names]}).assign_attrs(ordered)


def _concat(parts: list[xr.Dataset], dim: str) -> xr.Dataset:
    return xr.concat(
        parts, dim, data_vars="all", coords="minimal", compat="override", join="override",
        combine_attrs="override",
    )  # fmt: skip


def _total(name: str, reduced: Sequence[xr.Dataset], names: list[str]) -> xr.DataArray | None:
    """Return the sum over all samples of what was reduced from some, if all have the same."""
    if any(name not in part for part in reduced):
        return None
    attrs = [part[name].attrs for part in reduced]
    if len({each.get(_FORMULA[name]) for each in attrs}) > 1:
        return None
    if name == LOSS_GRADIENT and any(set(each[_POOLED]) != set(names) for each in attrs):
        return None  # its weights are means over checkpoints, of which there are more now
    totals = []
    for checkpoint in names:
        parts = [part[name] for part in reduced if checkpoint in part[CHECKPOINT].values]
        totals.append(reduce(add, (_at(part, checkpoint) for part in parts)))
    data = da.concatenate(totals, axis=-1)
    return xr.DataArray(data, dims=VARIABLES[name].dims, attrs={**attrs[0], _POOLED: names})


def _at(part: xr.DataArray, checkpoint: str) -> da.Array:
    index = part[CHECKPOINT].values.tolist().index(checkpoint)
    data: da.Array = part.data[..., index : index + 1]
    return data


# ------------------------------------------------------------------------------ why samples failed


def _with_errors(ds: xr.Dataset, store: Snapshot) -> xr.Dataset:
    """Return all samples of a store with the coord ``error``, if any of them failed.

    As a dask array it could not select (``ds.where(ds.error == "", drop=True)``). That of one part
    is read when it is asked for: in memory it would take longer to open than all other coords. Of
    several, those with failures are read, since arrays that are not cannot be joined.
    """
    if not any(_has_failed(part) for part in store.parts):
        return ds
    if len(store.parts) == 1:
        return ds.assign_coords({ERROR: opened(store.parts[0], complete=False)[ERROR].variable})
    names = [str(name) for name in ds[CHECKPOINT].values]
    joined = np.concatenate([_errors(row, names) for row in store.rows])
    variable = VARIABLES[ERROR]
    return ds.assign_coords({ERROR: (variable.dims, joined, variable.attrs)})


def _errors(row: Sequence[Part], names: list[str]) -> np.ndarray:
    """Return the errors of the samples of one source at the named checkpoints."""
    errors = np.full((row[0].layout["samples"], len(names)), "", np.dtypes.StringDType())
    for part in filter(_has_failed, row):
        known = np.asarray(part.store(complete=False).array(ERROR)[:])
        for column, name in enumerate(part.spec["checkpoints"]):
            if name in names:
                errors[:, names.index(name)] = known[:, column]
    return errors


def _has_failed(part: Part) -> bool:
    return len((part.folder / ERROR).names()) > 1  # beside its metadata
