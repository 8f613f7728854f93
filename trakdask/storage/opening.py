"""Open a store: lazy features, and the coords of all samples."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize

from trakdask.arrays.stored import stored
from trakdask.errors import UnfinishedAppendWarning
from trakdask.files import Folder
from trakdask.storage.group import DERIVED, DROPPED, ERROR, OWN, SCALE, Group, dims_of, zarr_store
from trakdask.storage.reading import lazy_array, lazy_feature
from trakdask.variables import SAMPLE, VARIABLES

__all__ = ["assembled", "open", "read_coords", "without_dropped"]


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
    Dataset with ``feature`` (sample, proj_dim, checkpoint), what :func:`featurize` has of each
    sample and checkpoint (``output``, ``out_to_loss`` and others) and, if saved, ``gram``
    (proj_dim, proj_dim_1, checkpoint), ``loss_gradient`` (proj_dim, checkpoint),
    ``gram_eigenvalues`` (component, checkpoint), ``gram_eigenvectors`` (proj_dim, component,
    checkpoint) and ``damping`` (checkpoint), λ, whose ``attrs`` say what chose it; if failures were
    recorded, the coord ``error`` (sample, checkpoint) says why, "" where there was none. ``sample``
    has no index. Its ``attrs`` say how the features were made (hashes of weights, source,
    projector, parameters, task, precision) and, in ``saved``, when the store last changed.
    ``xr.open_zarr(store)`` shows the same, but for samples that were dropped and for float16.

    Raises
    ------
    FileNotFoundError
        If there is no such store.
    IncompleteFeaturesError
        If blocks or coords are missing; when it is computed, if the file of a block has been lost
        since.
    ValueError
        If the metadata cannot be read, or were written by an earlier version, or the checksum of
        coords is wrong; when it is computed, if that of a block is.

    Warns
    -----
    UnfinishedAppendWarning
        If an append was cut short, or goes on in another process: what is shown is the store as it
        was before.
    """
    flags = {
        "require_complete": require_complete, "dropped": dropped, "load_coords": load_coords
    }  # fmt: skip
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"expected {name}=True or False, got {value!r:.60}; try {name}=True")
    group = Group.read(Folder.at(store, storage_options))
    if require_complete:
        group.require_complete()
        if "unfinished" in group.attrs:
            warnings.warn(
                f"expected no unfinished append in the store {group.folder.url!r}, which is shown "
                f"as it was before: {group.about_unfinished()}",
                UnfinishedAppendWarning,
                stacklevel=2,
            )
    elif not group.n_samples:
        group = group.target()
    ds = _with_errors(assembled(group, complete=require_complete, load_coords=load_coords), group)
    if dropped:
        if DROPPED not in ds.coords:
            return ds.assign_coords({DROPPED: (SAMPLE, np.zeros(ds.sizes[SAMPLE], bool))})
        return ds.drop_vars(DERIVED, errors="ignore")
    return without_dropped(ds)


def assembled(group: Group, *, complete: bool = True, load_coords: bool = True) -> xr.Dataset:
    """Return all that counts in a store, with lazy arrays."""
    data = {}
    for name in (*group.features, *(each for each in DERIVED if each in group.arrays)):
        if name in (ERROR, SCALE):
            continue
        if name == "feature":
            lazy = lazy_feature(group, complete=complete)
        elif name == "damping":  # so small that it is read
            token = tokenize(group.folder.url, group.attrs["saved"], group.chunk_path(name, (0,)))
            lazy = da.from_array(_whole(group, name), chunks=1, name=f"open-damping-{token}")
        else:
            lazy = lazy_array(group, name, complete=complete)
        data[name] = (dims_of(group.arrays[name]), lazy, group.arrays[name]["attributes"])
    attrs = {key: value for key, value in group.attrs.items() if key not in OWN}
    ds = xr.Dataset({name: data[name] for name in (*VARIABLES, *data) if name in data}, attrs=attrs)
    rows = () if load_coords else ds.chunksizes[SAMPLE]
    ds = ds.assign_coords(read_coords(group, rows=rows))
    return ds


def _with_errors(ds: xr.Dataset, group: Group) -> xr.Dataset:
    """Return features with the coord that says why samples failed, read when it is asked for."""
    if ERROR not in group.arrays or group.arrays != group.before:
        return ds
    # As a dask array it could not select (ds.where(ds.error == "", drop=True)).
    return ds.assign_coords({ERROR: _on_disk(group, [ERROR])[ERROR][: group.n_samples]})


def without_dropped(ds: xr.Dataset) -> xr.Dataset:
    """Return a Dataset without the samples that were dropped."""
    if DROPPED not in ds.coords:
        return ds
    return ds.isel({SAMPLE: np.flatnonzero(~ds[DROPPED].values)}).drop_vars(DROPPED)


def read_coords(
    group: Group, names: Collection[str] | None = None, *, rows: tuple[int, ...] = ()
) -> dict[str, xr.Variable]:
    """Return coords of a store, decoded by xarray.

    Parameters
    ----------
    group
        The store.
    names
        Of the coords; all by default.
    rows
        Numbers of samples in the chunks of those along samples, as Dask arrays; else they are in
        memory.
    """
    coords = {}
    for name in (each for each in group.coords if names is None or each in names):
        dims = dims_of(group.arrays[name])
        if not rows or dims != [SAMPLE] or name == DROPPED:
            coords[name] = xr.Variable(dims, _whole(group, name), group.arrays[name]["attributes"])
        else:
            group.require_chunks(name)
    encoded = {n: coord for n, coord in coords.items() if coord.dtype.kind != "T"}  # times
    decoded = xr.decode_cf(xr.Dataset(encoded)).variables
    coords |= {name: decoded[name].load() for name in encoded}
    lazy = [name for name in group.coords if rows and name not in coords]
    for name, coord in _on_disk(group, lazy).items() if lazy else ():
        token = tokenize(group.folder.url, group.attrs["saved"], name)
        read = functools.partial(_read_coord, coord[: group.n_samples])
        lazy_coord = stored(read, (rows,), coord.dtype, f"open-coord-{token}")
        coords[name] = coord._replace(data=lazy_coord)
    return coords


def _read_coord(coord: xr.Variable, key: tuple[slice, ...]) -> np.ndarray:
    return np.asarray(coord[key].values)


def _whole(group: Group, name: str) -> np.ndarray:
    """Return the values of an array; zarr would read a lost chunk as zeros, without a word."""
    group.require_chunks(name)
    try:
        return np.asarray(group.array(name, read_only=True)[...])
    except ValueError as err:
        raise ValueError(
            f"expected {name!r} of {group.folder.url!r} as it was written, got other bytes "
            f"({err}); try td.verify(store, checksums=True)"
        ) from err


def _on_disk(group: Group, names: Collection[str]) -> dict[str, xr.Variable]:
    """Return variables of a store as xarray opens them: read when they are asked for."""
    others = [name for name in group.arrays if name not in names]
    ds = xr.open_zarr(
        zarr_store(group.folder, read_only=True), consolidated=True, chunks=None, zarr_format=3,
        drop_variables=others,
    )  # fmt: skip
    return {name: ds[name].variable for name in names}
