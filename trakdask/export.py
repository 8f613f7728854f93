"""Write scores and rankings to zarr and parquet, for other programs."""

from __future__ import annotations

import functools
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import dask.array as da
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import xarray as xr
import zarr
from dask.utils import format_bytes, parse_bytes
from zarr.storage import LocalStore

from trakdask import execution
from trakdask.arrays.graphs import plain
from trakdask.arrays.memory import exported, tabled
from trakdask.checks import require_flags
from trakdask.files import Folder, naming, replacing
from trakdask.provenance import as_values
from trakdask.variables import RANK, TARGET

_MAX_BYTES = "10 GiB"
_WRITER = {"_NCProperties": "trakdask"}
"""Attribute by which a result is known for one. xarray does not read attributes that begin with
_NC, so that what others make of a result and store elsewhere does not have it."""
_UNFINISHED = json.dumps(
    {"zarr_format": 3, "node_type": "unfinished", "attributes": _WRITER}
).encode()
"""Content of a file that nobody can open, neither as a zarr group nor as parquet."""
_ZARR, _PARQUET = "zarr.json", "unfinished.parquet"
"""The files that have this content."""
_METADATA = "trakdask"
"""Key of the metadata of each parquet file that to_parquet writes."""
# As many rows as pyarrow puts into a row group, so that each part of a file is one.
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
        Replace an earlier result of this function, with all that lies in its folder. Other
        folders are never removed, in particular no store of features.

    Raises
    ------
    TypeError
        If ``data`` is not a DataArray or Dataset.
    ValueError
        If ``data`` takes more than ``max_bytes``.
    FileExistsError
        If the store exists and ``overwrite`` is false, or if something else is there.
    MemoryError
        If writing a block needs more memory than any worker has.

    Notes
    -----
    A result that is not finished cannot be opened. On a disk it is written beside the path and
    renamed at the end, so that whatever was there stays until then. Object stores cannot rename:
    there, an earlier result is removed first, and the new one can be opened, with NaN, only during
    the moment in which its metadata are made. The same call replaces the rest of a killed one.
    """
    if not isinstance(data, (xr.DataArray, xr.Dataset)):
        raise TypeError(
            f"expected a DataArray or Dataset, got {data!r:.60} ({type(data).__name__}); try "
            "td.to_zarr(td.score(features, targets), 'scores.zarr')"
        )
    ds = data.to_dataset(name=data.name or "score") if isinstance(data, xr.DataArray) else data
    _require_size(ds, ds.nbytes, max_bytes)
    # 1. Chunks as zarr has them, and no task that would not fit. Random digits of a float do not
    # compress: of Gaussian numbers, zstd saves 8 %.
    encoding = {
        str(n): {"compressors": None} for n, v in ds.data_vars.items() if v.dtype.kind == "f"
    }
    lazy = [plain(variable.data) for variable in ds.variables.values() if variable.chunks]
    sizes = [math.prod(array.chunksize) * array.itemsize for array in lazy]
    execution.require_memory(
        exported(max(sizes, default=0)),
        "writing a block of the results",
        "try smaller blocks: data.chunk(sample=...)",
    )
    # The encoding of a coord says how another store has it, which need not fit here.
    marked = _with_equal_chunks(ds).drop_encoding().assign_attrs(_WRITER)
    # 2. All metadata, and the coords that are in memory.
    with _replacing(store, _ZARR, overwrite=overwrite) as folder:
        # Of a local path zarr would take "a::b" for a chain of protocols.
        place = LocalStore(folder.url) if folder.is_local else folder.url
        chunks = marked.to_zarr(
            place,
            mode="w", compute=False, consolidated=False, zarr_format=3, encoding=encoding,
        )  # fmt: skip
        with warnings.catch_warnings():
            # xarray warns about a store without consolidated metadata, zarr about one with them.
            warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
            zarr.consolidate_metadata(place, zarr_format=3)
        # 3. The group cannot be opened while its chunks are written.
        metadata = folder.read(_ZARR)
        folder.write(_ZARR, _UNFINISHED)
        chunks.compute()
        folder.write(_ZARR, metadata)


def _with_equal_chunks(ds: xr.Dataset) -> xr.Dataset:
    """Return results with chunks that zarr has: chunks of an appended store may differ in size."""
    # All chunks of zarr along a dimension are equal, but the last may be smaller.
    chunks = {
        dim: max(sizes)
        for dim, sizes in ds.chunks.items()
        if len(set(sizes[:-1])) > 1 or sizes[-1] > sizes[0]
    }
    even = ds.chunk(chunks) if chunks else ds
    lazy = {n: v.copy(data=plain(v.data)) for n, v in even.variables.items() if v.chunks}
    return even.assign(lazy)


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
        Dataset of :func:`top_k` or of scores with intervals, or a DataArray: scores of
        :func:`score`, sums by one or several groups of :func:`group_score`, or
        :func:`self_influence`.
    path
        Folder or fsspec URL. There is one file per block (of a ranking, per block of targets), so
        that nothing larger than a block is in memory.
    max_bytes
        Raise an error instead of writing more than this, before compression: a number of bytes or a
        string such as ``"60 GB"``.
    overwrite
        Replace an earlier result of this function, with all that lies in its folder. Other
        folders are never removed.

    Raises
    ------
    ValueError
        If ``data`` is not such a result, or takes more than ``max_bytes``.
    FileExistsError
        If the folder exists and ``overwrite`` is false, or if it is no such result.
    MemoryError
        If writing a block needs more memory than any worker has.

    Notes
    -----
    Columns are ``target``, then ``rank``, ``sample`` or the groups (positions from 0 if there is no
    index); ``score``; for a ranking, the ``position`` of the training sample; and the coords, those
    of targets with the prefix ``target_``. Text is categorical (a dictionary of arrow). Where a
    rank has no sample, its coords are null. ``attrs`` are in the metadata of each file, under
    ``trakdask``, as JSON.

    As with :func:`to_zarr`, a result that is not finished cannot be opened: at the URL of an object
    store, its folder contains a file ``unfinished.parquet`` until the end.
    """
    ds = _as_table(data)
    dims = [str(dim) for dim in next(iter(ds.data_vars.values())).dims]
    coords = (str(name) for name, coord in ds.coords.items() if coord.ndim and name not in dims)
    columns = [*dims, *map(str, ds.data_vars), *coords]
    dtypes = [ds[name].dtype for name in columns]
    # A text is a position in the words of its column, int32.
    width = sum(4 if dtype.kind in "OTU" else dtype.itemsize for dtype in dtypes)
    _require_size(ds, width * math.prod(ds.sizes.values()), max_bytes)
    # The numbers of blocks, and positions where there are no labels.
    numbers = {
        f"{dim}_block": (dim, np.repeat(np.arange(len(sizes)), sizes))
        for dim, sizes in ds.chunksizes.items()
    }
    positions = {dim: np.arange(n) for dim, n in ds.sizes.items() if dim not in ds.coords}
    numbered = ds.drop_attrs().assign_coords({**numbers, **positions})
    _require_memory(numbered, width)
    attrs = {_METADATA: json.dumps(as_values(ds.attrs), default=str)}
    with _replacing(path, _PARQUET, overwrite=overwrite) as folder:
        write = functools.partial(_write_file, folder, dims, columns, attrs)
        # Blocks are mapped for what they write. What they return is a single number for each.
        shape = [len(ds.chunksizes[dim]) for dim in dims]
        written = xr.DataArray(da.zeros(shape, chunks=1), dims=dims)
        xr.map_blocks(write, numbered, template=written).compute()
        folder.remove(_PARQUET)


def _require_memory(ds: xr.Dataset, row_bytes: int) -> None:
    """Refuse a table of which no worker has the memory to write a block."""
    block = {dim: max(sizes) for dim, sizes in ds.chunksizes.items()}
    counts = {
        name: math.prod(block.get(d, ds.sizes[d]) for d in v.dims)
        for name, v in ds.variables.items()
    }
    n_texts = sum(n for name, n in counts.items() if ds[name].dtype.kind in "OTU")
    n_bytes = sum(n * ds[name].dtype.itemsize for name, n in counts.items())
    dims = next(iter(ds.data_vars.values())).dims
    sizes = [block[dim] for dim in dims]
    # `_write_file` takes a target at least, even if it has more rows.
    n_rows = min(math.prod(sizes), max(_ROWS_AT_ONCE, math.prod(sizes[1:])))
    execution.require_memory(
        tabled(n_bytes, n_rows, row_bytes, n_texts),
        "writing a block of the results as a table",
        f"try smaller blocks: data.chunk({{{dims[0]!r}: ...}})",
    )


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
    _free_folder(path, _ZARR if path.endswith(".zarr") else _PARQUET, overwrite=True)


@contextmanager
def _replacing(path: str | os.PathLike[str], marker: str, *, overwrite: bool) -> Iterator[Folder]:
    """Yield an empty folder that cannot be opened; at the end, its content gets the path."""
    require_flags(overwrite=overwrite)
    target = _free_folder(path, marker, overwrite=overwrite)
    if not target.is_local:
        earlier = {*target.names()} - {marker}
        target.write(marker, _UNFINISHED)
        for name in earlier:
            target.remove(name)
        yield target
        return
    real = os.path.realpath(target.url)  # of a link, that to which it leads
    parent, name = os.path.split(real)
    with (
        naming(target.url, "try again when the cause is gone, or another path"),
        replacing(real, partial=f"{parent}/.{name}.trakdask-new") as partial,
    ):
        folder = Folder(str(partial))
        folder.write(marker, _UNFINISHED)
        yield folder


def _free_folder(path: str | os.PathLike[str], marker: str, *, overwrite: bool) -> Folder:
    """Return the folder of a path at which there is nothing, or what may be overwritten."""
    folder = Folder.at(path)
    names = folder.names()
    if names and not overwrite:
        raise FileExistsError(
            f"expected a new path, got {folder.url!r}, which exists; try overwrite=True to replace "
            "it"
        )
    is_ours = not names  # or the same function wrote it, or began to
    with suppress(OSError, ValueError, KeyError):  # neither a result of ours, nor a part of one
        if names and (marker == _ZARR or marker in names):
            is_ours = _WRITER.items() <= folder.read_json(marker)["attributes"].items()
        # A result that was completed has no marker. Any of its files says who wrote it.
        elif names:
            with folder.open(names[-1]) as file:
                is_ours = _METADATA.encode() in (pq.read_schema(file).metadata or {})
    if not is_ours:
        raise FileExistsError(
            f"expected an earlier result of the same function to overwrite, got {folder.url!r}, "
            f"which contains {names[:3]}; try another path, or deleting the folder yourself"
        )
    return folder


def _as_table(data: object) -> xr.Dataset:
    """Return a chunked Dataset, ``target`` first."""
    if isinstance(data, xr.DataArray):
        data = data.to_dataset(name=data.name or "score")
    if (
        not isinstance(data, xr.Dataset)
        or len(shapes := {v.dims for v in data.values()}) != 1
        or () in shapes
    ):
        got = tuple(data.dims) if isinstance(data, xr.Dataset) else type(data)
        raise ValueError(
            "expected a Dataset of td.top_k, scores with level=, or a DataArray such as td.score "
            "returns, got "
            f"{got}; try a variable of a Dataset, or td.to_zarr(data, path)"
        )
    chunked = data.map(lambda array: array.copy(data=array.variable.chunk().data), keep_attrs=True)
    if RANK in chunked.dims:
        chunked = chunked.chunk({RANK: -1})
    return chunked.transpose(TARGET, ..., missing_dims="ignore").unify_chunks()


def _write_file(
    folder: Folder, dims: list[str], columns: list[str], attrs: dict[str, str], block: xr.Dataset
) -> xr.DataArray:
    """Write the rows of a block, some targets at a time."""
    sizes = [block.sizes[dim] for dim in dims]
    if math.prod(sizes):
        numbers = (block[f"{dim}_block"].values[0] for dim in dims)
        name = "-".join(["part", *(f"{number:05d}" for number in numbers)]) + ".parquet"
        # 1. Text as positions in the words of its column, -1 where it is null.
        words, codes = {}, {}
        for column, text in block.variables.items():
            if text.dtype.kind in "OTU":
                positions, unique = pd.factorize(text.values.astype(object).ravel())
                codes[column] = text.copy(data=positions.astype(np.int32).reshape(text.shape))
                words[str(column)] = pa.array(unique, pa.string())
        block = block.assign(codes)
        # 2. As many targets at once as memory was asked for.
        table = functools.partial(_table, dims=dims, columns=columns, words=words)
        schema = table(block.isel({dims[0]: slice(1)})).schema.with_metadata(attrs)
        step = max(1, _ROWS_AT_ONCE // math.prod(sizes[1:]))
        with folder.writing(name) as file, pq.ParquetWriter(file, schema) as writer:
            for start in range(0, sizes[0], step):
                writer.write_table(table(block.isel({dims[0]: slice(start, start + step)})))
    return xr.DataArray(np.zeros([1] * len(dims)), dims=dims)


def _table(
    block: xr.Dataset, dims: list[str], columns: list[str], words: Mapping[str, pa.Array]
) -> pa.Table:
    table, of_samples = {}, {name for name in block.coords if RANK in block[name].dims} - {RANK}
    for name in columns:
        variable = block[name].variable.set_dims({dim: block.sizes[dim] for dim in dims})
        values = variable.values.ravel()
        null = values < 0 if name in words else np.zeros(values.shape, bool)
        if name in of_samples and "position" in block:
            null |= block.position.values.ravel() < 0
        table[name] = pa.array(values, mask=null)
        if name in words:
            table[name] = pa.DictionaryArray.from_arrays(table[name], words[name])
    return pa.table(table)
