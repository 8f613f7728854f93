"""Open a store: lazy features, and the coords of all samples.

A chunk of numbers in a local store is its file, up to the checksum at the end, so it is mapped:
zarr copies it twice, into pages that are new each time, which takes longer than the products that
a query computes from it.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dask.array as da
import google_crc32c
import numpy as np
import xarray as xr
import zarr
from dask.base import tokenize
from zarr.storage import StorePath

from trakdask.arrays.blocks import Read
from trakdask.arrays.gram import mirrored
from trakdask.arrays.graphs import stored
from trakdask.checks import require_flags
from trakdask.files import Folder
from trakdask.provenance import as_text
from trakdask.storage.group import (
    DROPPED,
    ERROR,
    SCALE,
    STORE_ATTRS,
    Group,
    dims_of,
    lost_chunk,
    zarr_store,
)
from trakdask.storage.unfinished import about_unfinished
from trakdask.variables import CHECKPOINT, DERIVED, SAMPLE, TRIANGLE, VARIABLES

_CRC_BYTES = 4
_LEAST_MAPPED = 2**20
"""Bytes of a file; a smaller one is read in less time, and a process may have few maps."""

_READING = threading.Lock()
_RECENT: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
_MOST_RECENT = 12
"""Chunks of weights, norms and outputs on a network, of up to 16 MB each: three of each of four
threads. A task needs the rows of one block of them."""

VERIFIED: dict[str, tuple[int, int, int]] = {}
"""Files whose checksums this process has compared, and what they were like then."""


def open(
    store: str | os.PathLike[str],
    *,
    dropped: bool = False,
    load_coords: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Open saved features as a lazy Dataset; metadata coords are loaded, arrays are not.

    Parameters
    ----------
    store
        Folder or fsspec URL that :func:`save` wrote. What others have copied, such as the store of
        a session of icechunk, is for ``xr.open_zarr``.
    dropped
        Show the samples that :func:`drop` left out, too, marked by the coord ``dropped``; without
        the sums that do not cover them.
    load_coords
        ``False`` leaves the coords of samples in the store, as Dask arrays in the blocks of the
        features: at 10⁸ samples, five coords take some gigabytes. The tasks of :func:`top_k` then
        read the coords of the samples that they have found, and for a function ``where=`` the
        coords of each tile. :func:`group_score`, and a mask such as ``scores.label == 3``, read
        that one coord when they are called. Results are the same. After :func:`drop`, or once rows
        were selected by numbers, a query reads the coords of its rows as a whole. ``groupby`` of
        xarray needs ``ds.label.load()`` first.
    storage_options
        As in :func:`save`.

    Returns
    -------
    Dataset with ``feature`` (sample, proj_dim, checkpoint), what :func:`featurize` has of each
    sample and checkpoint (``output``, ``out_to_loss`` and others) and, if saved, ``gram``
    (proj_dim, proj_dim_1, checkpoint), ``loss_gradient`` (proj_dim, checkpoint),
    ``damping`` (checkpoint), λ, whose ``attrs`` say what chose it, and above proj_dim 1024
    ``gram_eigenvalues`` (component, checkpoint) and ``gram_eigenvectors`` (proj_dim, component,
    checkpoint); if failures were recorded, the coord ``error`` (sample, checkpoint) says why, ""
    where there was none. ``sample`` has no index. Its ``attrs`` say how the features were made
    (hashes of weights, source, projector, parameters, task, precision) and, in ``saved``, when the
    store last changed.
    ``xr.open_zarr(store)`` shows the same, but for samples that were dropped, float16, and the
    lower triangle of symmetric matrices.

    Raises
    ------
    FileNotFoundError
        If there is no such store.
    IncompleteFeaturesError
        If blocks or coords are missing; when it is computed, if the file of a block has been lost
        since.
    ValueError
        If the metadata cannot be read, or the checksum of coords is wrong; when it is computed, if
        the checksum of a block is wrong.

    Warns
    -----
    UserWarning
        If an append was cut short, or goes on in another process: the result is the store as it
        was before.

    Examples
    --------
    >>> import tempfile
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = td.save(features, f"{folder}/train.zarr", progress=False)
    ...     td.open(f"{folder}/train.zarr").feature.shape
    (8, 4, 2)
    """
    require_flags(dropped=dropped, load_coords=load_coords)
    folder = Folder.at(store, storage_options)
    group = Group.read(folder)
    while True:
        try:
            group.require_complete()
            rows = da.core.normalize_chunks((group.block,), (group.n_samples,))[0]
            coords = read_coords(group, rows=() if load_coords else rows)
            ds = assembled(group, coords, dropped=dropped)
            break
        except ValueError:  # also IncompleteFeaturesError
            # A writer may have replaced arrays since the group was read.
            before, group = group, Group.read(folder)
            if group.attrs["saved"] == before.attrs["saved"]:
                raise
    ds.encoding["source"] = folder.url  # as xarray names what it has opened
    if "unfinished" in group.attrs:
        warnings.warn(
            f"expected no unfinished append in the store {folder.url!r}, which is shown as it was "
            f"before: {about_unfinished(group)}",
            stacklevel=2,
        )
    return ds


def assembled(
    group: Group, coords: Mapping[str, xr.Variable] | None = None, *, dropped: bool = False
) -> xr.Dataset:
    """Return the lazy arrays of a store, with the names of checkpoints, and coords of all rows.

    Samples that were dropped are left out, or with ``dropped`` marked, without the sums that do not
    cover them.
    """
    data = {}
    # Known variables in their own order, before others that a task returned.
    for name in dict.fromkeys((*VARIABLES, *group.features)):
        if (array := group.arrays.get(name)) and name not in (ERROR, SCALE):
            # The array is whole, whatever a store has of it.
            of_array = {key: v for key, v in array["attributes"].items() if key != TRIANGLE}
            data[name] = dims_of(array), lazy_array(group, name), as_text(of_array)
    attrs = {key: value for key, value in group.attrs.items() if key not in STORE_ATTRS}
    names = np.array(group.checkpoints, np.dtypes.StringDType())
    ds = xr.Dataset(data, {CHECKPOINT: names, **(coords or {})}, as_text(attrs))
    if dropped:
        ds = ds.assign_coords({DROPPED: (SAMPLE, dropped_mask(group))})
        return ds.drop_vars(DERIVED, errors="ignore") if DROPPED in group.arrays else ds
    if DROPPED in group.arrays:
        ds = ds.isel({SAMPLE: np.flatnonzero(~dropped_mask(group))})
    return ds


def dropped_mask(group: Group) -> np.ndarray:
    """Return which samples of a store are dropped, (sample,) bool."""
    if DROPPED not in group.arrays:
        return np.zeros(group.n_samples, bool)
    with _named(group.folder, DROPPED):
        mask = np.asarray(group.array(DROPPED, read_only=True)[...])
    # After reading: until then a writer may have removed a chunk, of which zarr reads the fill
    # value.
    group.require_chunks(DROPPED)
    return mask


# ------------------------------------------------------------------------------------------ coords


def read_coords(
    group: Group, names: Collection[str] | None = None, *, rows: tuple[int, ...] = ()
) -> dict[str, xr.Variable]:
    """Return coords that count in a store, as xarray opens them.

    Parameters
    ----------
    group
        The store.
    names
        Names of the coords; by default all that :func:`assembled` lacks.
    rows
        Numbers of samples in the chunks of coords along samples, which are then Dask arrays; else
        they are in memory. ``error`` is always read when it is asked for: as a Dask array it could
        not select.
    """
    names = {*group.coords, ERROR} - {CHECKPOINT, DROPPED} if names is None else names
    # Not those that were written since and are not committed.
    names = [n for n, array in group.arrays.items() if n in names and array == group.before.get(n)]
    if not names:
        return {}
    # As the store was when the group was read, whatever a writer has put there since.
    arrays = {"kind": "inline", "metadata": {name: group.arrays[name] for name in names}}
    metadata = {"zarr_format": 3, "node_type": "group", "consolidated_metadata": arrays}
    path = StorePath(zarr_store(group.folder, read_only=True))
    root = zarr.Group(zarr.AsyncGroup.from_dict(path, metadata))
    opened = functools.partial(xr.open_dataset, xr.backends.ZarrStore(root, mode="r"), chunks=None)
    try:
        ds = opened()
    except ValueError:  # a date that nanoseconds cannot hold, which xarray takes by default
        ds = opened(decode_times=xr.coders.CFDatetimeCoder(time_unit="s"))
    coords: dict[str, xr.Variable] = {}
    for name in names:
        coord = coords[name] = ds.variables[name]
        # Stays an array that xarray reads when somebody asks, which can be selected from.
        if name == ERROR:
            continue
        if rows and coord.dims == (SAMPLE,):
            read = functools.partial(_read_coord, coord, group, name)
            data = stored(read, (rows,), coord.dtype, _name(group, name))
            coords[name] = coord._replace(data=data)
            continue
        with _named(group.folder, name):
            coord.load()
        group.require_chunks(name)
    return coords


def _read_coord(coord: xr.Variable, group: Group, name: str, key: tuple[Any, ...]) -> np.ndarray:
    values = np.asarray(coord[key].values)
    group.require_chunks(name)
    return values


@contextmanager
def _named(folder: Folder, path: str) -> Iterator[None]:
    """Let errors of zarr, and of its checksums, name the damaged file."""
    try:
        yield
    except ValueError as err:
        raise ValueError(
            f"expected {path!r} in {folder.url!r} as it was written, got other bytes ({err}); try "
            "td.verify(store, checksums=True), which says how to restore it"
        ) from err


# ----------------------------------------------------------------------------------------- numbers


def lazy_array(group: Group, name: str) -> da.Array:
    """Return an array of numbers, lazy, in blocks; features as float32 or float64."""
    array = group.array(name, read_only=True)
    # Chunks of numbers have the rows of many blocks.
    chunks = (group.block, 1) if name in group.numbers else array.chunks
    sizes = da.core.normalize_chunks(chunks, array.shape)
    read, dtype = _reader(group, name), array.dtype
    if name == "feature" and SCALE in group.arrays:
        read = functools.partial(_read_decoded, read, _reader(group, SCALE))
        dtype = np.dtype(np.float32)
    return stored(read, sizes, dtype, _name(group, name))


def _reader(group: Group, name: str) -> Read:
    array = group.array(name, read_only=True)
    read = functools.partial(read_chunk, array, group.folder, _name(group, name))
    if TRIANGLE not in array.attrs:
        return read
    return functools.partial(_read_mirrored, read, array.shape[0])


def _name(group: Group, name: str) -> str:
    """Return the name of a Dask array: another one after every commit, since content may differ."""
    token = tokenize(group.folder.url, group.attrs["saved"], group.arrays[name])
    return f"open-{name.replace('_', '-')}-{token}"


def _read_decoded(halves: Read, scales: Read, key: tuple[slice, ...]) -> np.ndarray:
    return from_half(halves(key), scales((key[0], key[2])))


def _read_mirrored(triangles: Read, size: int, key: tuple[slice, ...]) -> np.ndarray:
    rows, columns, checkpoint = key
    # What is below the diagonal lies in other rows.
    whole = slice(0, size)
    return mirrored(triangles((whole, whole, checkpoint)))[rows, columns]


def from_half(halves: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return (rows, p, 1) features that are stored as float16 as float32."""
    # A scale may be too large or too small for float32, where the feature is not: so its exponent
    # is added to that of the feature.
    mantissa, exponent = np.frexp(scale[:, None, :])  # ½, or NaN of an erased sample
    return np.ldexp(halves * mantissa.astype(np.float32), exponent)


def read_chunk(
    array: zarr.Array[Any], folder: Folder, key: str, rows: tuple[slice, ...]
) -> np.ndarray:
    """Return rows of a chunk of numbers, by their slices of the array; ``key`` as of a cache."""
    # 1. The chunk that has these rows, and where they lie in it.
    index = tuple(part.start // size for part, size in zip(rows, array.chunks, strict=True))
    starts = [i * size for i, size in zip(index, array.chunks, strict=True)]
    inside = tuple(slice(r.start - s, r.stop - s) for r, s in zip(rows, starts, strict=True))
    path = f"{array.basename}/{array.metadata.encode_chunk_key(index)}"
    # 2. From a file as it is.
    if folder.is_local and len(array.compressors) == 1:  # the checksum
        data = _mapped(f"{folder.url}/{path}", array.chunks, array.dtype)
        if data is not None:  # which has rows beyond the last of the array
            return data[inside]
    # 3. By zarr: all rows of a chunk at once, or some from a chunk that is kept, since others need
    # the rest of it soon.
    if inside[0].stop - inside[0].start == min(array.chunks[0], array.shape[0]):
        return _read(array, folder, path, rows)
    whole = tuple(slice(s, s + size) for s, size in zip(starts, array.chunks, strict=True))
    with _READING:  # so that it is read once, however many threads need it
        chunk = _RECENT.pop((key, index), None)
        if chunk is None:
            chunk = _read(array, folder, path, whole)
        _RECENT[key, index] = chunk
        for oldest in list(_RECENT)[:-_MOST_RECENT]:
            del _RECENT[oldest]
    return chunk[inside]


def _read(array: zarr.Array[Any], folder: Folder, path: str, rows: tuple[slice, ...]) -> np.ndarray:
    """Return rows of a chunk, as zarr reads them; raise if they should be there and are not."""
    with _named(folder, path):
        block = np.asarray(array[rows])
    is_filled = np.isnan(block) if block.dtype.kind == "f" else block == array.fill_value
    if is_filled.all():  # as zarr reads an absent chunk, without a word
        parent, _, name = path.rpartition("/")
        if name not in (folder / parent).names():
            raise lost_chunk(folder, path)
        with _named(folder, path):  # again: it may have come back since the first time
            block = np.asarray(array[rows])
    return block


def _mapped(path: str, chunks: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray | None:
    """Return the content of a chunk; None if it is not as it should be, which zarr then says."""
    n_bytes = int(np.prod(chunks)) * dtype.itemsize
    try:
        about = os.stat(path)
    except OSError:
        return None
    if about.st_size != n_bytes + _CRC_BYTES:
        return None
    if n_bytes < _LEAST_MAPPED:
        data = np.fromfile(path, np.uint8)
    else:  # pages are copied when they are written to, so that the file stays as it is
        data = np.asarray(np.memmap(path, np.uint8, mode="c"))
    # A file that was replaced is another one, which has not been compared.
    state = (about.st_ino, about.st_mtime_ns, about.st_size)
    if VERIFIED.get(path) != state:
        content = data[:-_CRC_BYTES]
        content.flags.writeable = False  # the function takes nothing else
        if data[-_CRC_BYTES:].view("<u4")[0] != google_crc32c.value(content):
            return None
        VERIFIED[path] = state
    return data[:n_bytes].view(dtype).reshape(chunks)
