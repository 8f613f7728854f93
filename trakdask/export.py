"""Write scores and rankings to zarr and parquet, for other programs."""

from __future__ import annotations

import functools
import json
import math
import os
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import dask
import dask.array as da
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xarray as xr
import zarr
from dask.base import tokenize
from dask.utils import format_bytes, parse_bytes

from trakdask.files import Folder
from trakdask.provenance import as_values
from trakdask.variables import RANK, TARGET

__all__ = ["to_parquet", "to_zarr"]

_MAX_BYTES = "10 GiB"
_WRITER = {"_NCProperties": "trakdask.to_zarr"}
"""Attribute of stores that to_zarr writes. xarray does not read attributes that begin with _NC, so
that what others make of a result and store elsewhere does not have it."""
_UNFINISHED = json.dumps(
    {"zarr_format": 3, "node_type": "unfinished", "attributes": _WRITER}
).encode()
"""Content of a file that nobody can open, neither as a zarr group nor as parquet."""
_METADATA = "trakdask"
"""Key of the metadata of each parquet file that to_parquet writes."""
_MARKER = "unfinished.parquet"
_ROWS_AT_ONCE = 2**20


def to_zarr(
    data: xr.DataArray | xr.Dataset,
    store: str | os.PathLike[str],
    *,
    max_bytes: int | str = _MAX_BYTES,
    overwrite: bool = False,
) -> None:
    """Compute lazy scores (or any labelled result) into a zarr v3 store, tile by tile.

    Parameters
    ----------
    data
        Result of :func:`score`, :func:`top_k` or :func:`group_score`.
    store
        Folder or fsspec URL. Read it with ``xarray.open_zarr(store)``.
    max_bytes
        Raise an error instead of writing more than this, a number of bytes or a string such as
        ``"60 GB"``. Scores of a million samples for ten thousand targets take 40 GB.
    overwrite
        Replace an earlier result of this function. Nothing else is ever removed, in particular no
        store of features.

    Raises
    ------
    TypeError
        If ``data`` is not a DataArray or Dataset.
    ValueError
        If ``data`` takes more than ``max_bytes``.
    FileExistsError
        If the store exists and ``overwrite`` is false, or if something else is there.

    Notes
    -----
    A result that is not finished cannot be opened. On a disk it is written beside the path and
    renamed at the end, so that whatever was there stays until then. Object stores cannot rename:
    there, an earlier result is removed first, and the new one can be opened, with NaN, only during
    the moment in which its metadata are made. The same call replaces what a killed one has left.
    """
    if not isinstance(data, (xr.DataArray, xr.Dataset)):
        raise TypeError(
            f"expected a DataArray or Dataset, got {data!r:.60} ({type(data).__name__}); try "
            "td.to_zarr(td.score(features, targets), 'scores.zarr')"
        )
    ds = data.to_dataset(name=data.name or "score") if isinstance(data, xr.DataArray) else data
    _require_size(ds, ds.nbytes, max_bytes)
    encoding = {
        str(n): {"compressors": None} for n, v in ds.data_vars.items() if v.dtype.kind == "f"
    }
    # How coords are stored elsewhere, as those of a store that was opened say, need not fit here.
    marked = _with_equal_chunks(ds).drop_encoding().assign_attrs(_WRITER)
    with _replacing(store, overwrite, _is_our_zarr, "zarr.json") as folder:
        chunks = marked.to_zarr(
            folder.url,
            mode="w", compute=False, consolidated=False, zarr_format=3, encoding=encoding,
        )  # fmt: skip
        with warnings.catch_warnings():
            # xarray warns about a store without consolidated metadata, zarr about one with them.
            warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
            zarr.consolidate_metadata(folder.url, zarr_format=3)
        metadata = folder.read("zarr.json")
        folder.write("zarr.json", _UNFINISHED)
        chunks.compute()
        folder.write("zarr.json", metadata)


def _with_equal_chunks(ds: xr.Dataset) -> xr.Dataset:
    """Return results with chunks that zarr has; those of an appended store may differ in size."""
    chunks = {
        dim: max(sizes)
        for dim, sizes in ds.chunks.items()
        if len(set(sizes[:-1])) > 1 or sizes[-1] > sizes[0]
    }
    return ds.chunk(chunks) if chunks else ds


def to_parquet(
    data: xr.DataArray | xr.Dataset,
    path: str | os.PathLike[str],
    *,
    max_bytes: int | str = _MAX_BYTES,
    overwrite: bool = False,
) -> None:
    """Compute a ranking or scores into parquet files, with one row per score and its metadata.

    Parameters
    ----------
    data
        Lazy Dataset (target, rank) of :func:`top_k`, scores (sample, target) of :func:`score`, or
        scores by group of :func:`group_score`.
    path
        Folder or fsspec URL. There is one file per block of targets (for scores, per block of
        targets and samples), so that nothing larger than a block is in memory.
    max_bytes
        Raise an error instead of writing more than this, before compression: a number of bytes or a
        string such as ``"60 GB"``.
    overwrite
        Replace an earlier result of this function. Nothing else is ever removed.

    Raises
    ------
    ValueError
        If ``data`` is not such a result, or takes more than ``max_bytes``.
    FileExistsError
        If the folder exists and ``overwrite`` is false, or if something else is in it.

    Notes
    -----
    Columns are ``target``, then ``rank``, ``sample`` or the group (positions from 0 if there is no
    index); ``score``; for a ranking, the ``position`` of the training sample; and the coords, those
    of targets with the prefix ``target_``. Text is categorical (a dictionary of arrow), and null
    where a rank has no sample. ``attrs`` are in the metadata of each file, under ``trakdask``, as
    JSON.

    As with :func:`to_zarr`, a result that is not finished cannot be opened: at the URL of an object
    store, its folder contains a file ``unfinished.parquet`` until the end.
    """
    ds = _as_table(data)
    columns = _columns(ds)
    width = sum(4 if array.dtype.kind in "OTU" else array.dtype.itemsize for _, array in columns)
    _require_size(ds, width * math.prod(ds.sizes.values()), max_bytes)
    with _replacing(path, overwrite, _is_our_parquet, _MARKER) as folder:
        dask.compute(_written(ds, columns, folder))
        folder.remove(_MARKER)


def _require_size(ds: xr.Dataset, n_bytes: int, max_bytes: int | str) -> None:
    if n_bytes > (limit := parse_bytes(max_bytes)):
        sizes = " × ".join(f"{size:,} {dim}" for dim, size in ds.sizes.items())
        needed = math.ceil(n_bytes / 2**30)
        raise ValueError(
            f"expected at most {format_bytes(limit)}, got {format_bytes(n_bytes)} ({sizes}); try "
            "the highest scores of each target, td.top_k(scores, k=100), or to write everything, "
            f"max_bytes='{needed} GiB'"
        )


def require_replaceable(path: str) -> None:
    """Reject a path at which there is something that a result would not replace.

    Raises
    ------
    FileExistsError
        If there is; ``.zarr`` at the end says that :func:`to_zarr` will write there.
    """
    _free_folder(path, True, _is_our_zarr if path.endswith(".zarr") else _is_our_parquet)


@contextmanager
def _replacing(
    path: str | os.PathLike[str], overwrite: bool, is_ours: Callable[[Folder], bool], marker: str
) -> Iterator[Folder]:
    """Yield an empty folder that cannot be opened; what is in it at the end gets the path."""
    target = _free_folder(path, overwrite, is_ours)
    if not target.is_local:
        others = set(target.names()) - {marker}
        target.write(marker, _UNFINISHED)
        for name in others:
            target.remove(name)
        yield target
        return
    parent, name = os.path.split(os.path.realpath(target.url))  # of a link, that to which it leads
    new, old = (Folder(f"{parent}/.{name}.trakdask-{state}") for state in ("new", "old"))
    new.remove()
    try:
        new.write(marker, _UNFINISHED)
        yield new
    except BaseException:
        new.remove()  # the disk may be full
        raise
    old.remove()
    if os.path.exists(f"{parent}/{name}"):
        os.rename(f"{parent}/{name}", old.url)
    os.rename(new.url, f"{parent}/{name}")
    old.remove()


def _free_folder(
    path: str | os.PathLike[str], overwrite: bool, is_ours: Callable[[Folder], bool]
) -> Folder:
    """Return the folder of a path at which there is nothing, or what may be overwritten."""
    folder = Folder.at(path)
    names = folder.names()
    if names and not overwrite:
        raise FileExistsError(
            f"expected a new path, got {folder.url!r}, which exists; try overwrite=True to replace "
            "it"
        )
    if names and not is_ours(folder):
        raise FileExistsError(
            f"expected an earlier result of the same function to overwrite, got {folder.url!r}, "
            f"which contains {names[:3]}; try another path, or deleting the folder yourself"
        )
    return folder


def _is_our_zarr(folder: Folder) -> bool:
    """Return whether to_zarr wrote a store, or began to, and nothing else is in the folder."""
    try:
        attrs = folder.read_json("zarr.json")["attributes"]
    except (OSError, ValueError, KeyError):  # no group of zarr, or a damaged one
        return False
    files = [set((folder / name).names()) for name in folder.names() if name != "zarr.json"]
    return _WRITER.items() <= attrs.items() and all(
        names and names <= {"zarr.json", "c"} for names in files
    )


def _is_our_parquet(folder: Folder) -> bool:
    """Return whether to_parquet wrote all files of a folder, by their metadata."""
    return all(_is_our_file(folder, name) for name in folder.names())


def _is_our_file(folder: Folder, name: str) -> bool:
    if name == _MARKER:
        return folder.read(name) == _UNFINISHED
    try:
        with folder.open(name) as file:
            return _METADATA.encode() in (pq.read_schema(file).metadata or {})
    except (OSError, ValueError):  # not a parquet file
        return False


def _as_table(data: object) -> xr.Dataset:
    """Return a chunked Dataset of two dimensions, ``target`` first."""
    is_ranking = isinstance(data, xr.Dataset) and set(data.dims) == {TARGET, RANK}
    is_scores = isinstance(data, xr.DataArray) and data.ndim == 2 and TARGET in data.dims
    if isinstance(data, xr.DataArray) and is_scores:
        data = data.to_dataset(name=data.name or "score")
    elif not is_ranking:
        given = tuple(data.dims) if isinstance(data, (xr.DataArray, xr.Dataset)) else type(data)
        raise ValueError(
            "expected the Dataset (target, rank) of td.top_k, or a DataArray with two dimensions, "
            f"one of them target, got {given}; try scores.mean('checkpoint') for an ensemble, or "
            "td.to_zarr(data, path)"
        )
    assert isinstance(data, xr.Dataset)
    chunked = data.map(lambda array: array.copy(data=array.variable.chunk().data), keep_attrs=True)
    if is_ranking:
        chunked = chunked.chunk({RANK: -1})
    return chunked.transpose(*_dims(chunked)).unify_chunks()


def _dims(ds: xr.Dataset) -> list[Hashable]:
    return [TARGET, *(dim for dim in ds.dims if dim != TARGET)]


def _columns(ds: xr.Dataset) -> list[tuple[str, da.Array]]:
    """Return the columns' names, and their arrays over one or both dimensions, chunked alike."""
    names = [*_dims(ds), *ds.data_vars, *(name for name in ds.coords if name not in ds.dims)]
    columns = []
    for name in names:
        array = ds[name]  # of a dimension without an index: 0, 1, ...
        if array.ndim:
            chunks = tuple(ds.chunksizes[dim] for dim in array.dims)
            lazy = isinstance(array.data, da.Array)
            columns.append((str(name), array.data if lazy else da.from_array(array.values, chunks)))
    return columns


def _written(ds: xr.Dataset, columns: list[tuple[str, da.Array]], folder: Folder) -> da.Array:
    """Return tasks that write one file each, (block of targets, block of the other dimension)."""
    dims = dict(zip(_dims(ds), "to", strict=True))
    axes = ["".join(dims[dim] for dim in ds[name].dims) for name, _ in columns]
    numbers = [da.arange(len(ds.chunksizes[dim]), chunks=1) for dim in dims]
    token = tokenize(folder.url, [(name, array.name) for name, array in columns])
    written: da.Array = da.blockwise(
        functools.partial(_write_file, folder, [name for name, _ in columns], axes, ds.attrs), "to",
        *(item for (_, array), axis in zip(columns, axes, strict=True) for item in (array, axis)),
        numbers[0], "t", numbers[1], "o",
        name=f"to-parquet-{token}", align_arrays=False, concatenate=True,
        adjust_chunks={"t": 1, "o": 1}, dtype=bool, meta=np.empty((0, 0), bool),
    )  # fmt: skip
    return written


def _write_file(
    folder: Folder, names: list[str], axes: list[str], attrs: dict[str, Any], *blocks: np.ndarray
) -> np.ndarray:
    *values, (target_block,), (other_block,) = blocks
    n_targets, n_other = values[axes.index("to")].shape
    columns = dict(zip(names, values, strict=True))
    step = max(1, _ROWS_AT_ONCE // max(n_other, 1))  # rows of whole targets
    schema = _table(columns, axes, slice(0, 0), n_other).schema
    schema = schema.with_metadata({_METADATA: json.dumps(as_values(attrs), default=str)})
    with (
        folder.writing(f"part-{target_block:05d}-{other_block:05d}.parquet") as file,
        pq.ParquetWriter(file, schema) as writer,
    ):
        for start in range(0, n_targets, step):
            targets = slice(start, min(start + step, n_targets))
            writer.write_table(_table(columns, axes, targets, n_other))
    return np.ones((1, 1), bool)


def _table(
    columns: dict[str, np.ndarray], axes: list[str], targets: slice, n_other: int
) -> pa.Table:
    """Return the rows of some targets of a block."""
    n_targets = targets.stop - targets.start
    rows = {
        "t": pa.array(np.repeat(np.arange(n_targets), n_other)),
        "o": pa.array(np.tile(np.arange(n_other), n_targets)),
    }
    missing = columns["position"][targets].ravel() < 0 if "position" in columns else None
    table = {}
    for (name, values), axis in zip(columns.items(), axes, strict=True):
        if axis == "to":
            table[name] = _arrow(values[targets].ravel(), missing)
        else:
            table[name] = _arrow(values[targets] if axis == "t" else values).take(rows[axis])
    return pa.table(table)


def _arrow(values: np.ndarray, missing: np.ndarray | None = None) -> pa.Array:
    """Return an arrow array; text as a dictionary, null where it is missing."""
    if values.dtype.kind not in "OTU":
        return pa.array(np.ascontiguousarray(values))
    return pa.array(values.astype(object), pa.string(), mask=missing).dictionary_encode()
