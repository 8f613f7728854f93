"""Samples from arrays, and from any Dataset; and lazy variables whose blocks tasks read.

A source of several variables says their fields and its length, and yields samples of a range. It is
one task of the graph, and identified by its pickled content.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, Protocol

import dask
import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
import zarr
from dask.array.utils import meta_from_array

from trakdask.arrays.blocks import take
from trakdask.checks import is_tensor, require_integer
from trakdask.samples.coords import (
    CoordsLike,
    check_name,
    fields_as_coords,
    normalise_coords,
    to_numpy,
)
from trakdask.samples.fingerprints import OpenedByTasks, fingerprint, mapped
from trakdask.variables import SAMPLE

Array = np.ndarray[Any, Any]

_READ_NAME = re.compile(r"read-.+-([0-9a-f]{64})-\d+", re.DOTALL)
_SOURCE = re.compile(r"samples-[0-9a-f]{64}")


def from_arrays(
    arrays: Mapping[str, Any], *, coords: CoordsLike = None, chunks: int = 512
) -> xr.Dataset:
    """Create a Dataset of samples from arrays.

    Parameters
    ----------
    arrays
        Model inputs by name, each (sample, ...) with the same number of samples: numpy arrays and
        memory maps, torch tensors, dask arrays, zarr arrays, or lists of numbers.
    coords
        Metadata by name, or a pandas DataFrame of metadata, one value per sample: numbers,
        booleans, strings or times. Or a list with names of ``arrays`` that are to be coords, such
        as ``["label"]``; lazy ones are computed. Models can also read numeric coords.
    chunks
        Samples per block, and thus per task.

    Returns
    -------
    Dataset with one lazy variable per array, (sample, ...) in its dtype, in blocks of ``chunks``
    samples and one chunk along other dimensions. The coords are in memory, without an index.
    ``attrs["source"]`` identifies the content.

    Raises
    ------
    TypeError
        If a variable is not an array, is sparse, or has neither numbers nor booleans, or ``chunks``
        is not an integer.
    ValueError
        If there are no arrays or no samples, lengths differ, values are masked, a name is reserved
        or used twice, or ``chunks`` is not positive.

    Notes
    -----
    Nothing is computed, except lazy arrays named in ``coords``. Arrays in memory are hashed once
    and referenced without a copy, so do not modify them afterwards. On a cluster each task is sent
    its block of them, through the scheduler: write arrays of several gigabytes to zarr first.
    Workers read zarr arrays from their storage, and a read-only ``np.memmap`` from its file, which
    all of them must see; a file is identified by its path, size and time of modification. For zarr
    arrays choose ``chunks`` that are multiples of theirs; otherwise chunks are read more than once.

    Examples
    --------
    >>> import numpy as np
    >>> train = from_arrays({"x": np.eye(4, dtype="f4")}, coords={"label": [0, 1, 0, 1]}, chunks=2)
    >>> train.x.dims, train.x.chunks, train.label.dtype.name
    (('sample', 'x_dim_1'), ((2, 2), (4,)), 'int64')
    """
    if not isinstance(arrays, Mapping):
        raise TypeError(
            f"expected a mapping from name to array as arrays, got {type(arrays).__name__}; try "
            "td.from_arrays({'image': images})"
        )
    size = require_integer("chunks", chunks, 1, remedy="try chunks=512")
    chosen = fields_as_coords(coords, arrays)
    variables = lazy_variables({n: a for n, a in arrays.items() if n not in chosen}, size)
    return assemble(variables, {name: _loaded(arrays[name]) for name in chosen} or coords)


def validate_samples(ds: xr.Dataset) -> xr.Dataset:
    """Convert a Dataset to the form that :func:`from_arrays` returns.

    Parameters
    ----------
    ds
        Dataset with a ``sample`` dimension: variables (sample, ...) are model inputs, coords
        (sample,) are metadata.

    Returns
    -------
    Dataset with lazy variables, ``sample`` first, in equal blocks of samples and one chunk along
    other dimensions; coords in memory; no index; ``attrs["source"]`` as set by the user, else
    derived from dask's names and the content. Blocks are those of the variable with the most bytes
    per sample, or of 512 samples if it has none. A Dataset that has this form already is not
    changed.

    Raises
    ------
    TypeError
        If ``ds`` is not a Dataset, or a variable or coord has an unsupported dtype.
    ValueError
        If there is no ``sample`` dimension, no variable or no sample, a variable lacks the
        dimension ``sample``, or a name is reserved.

    Notes
    -----
    Lazy coords are loaded; nothing else is computed. A coord named ``sample`` becomes
    ``sample_id``, and coords without the dimension ``sample`` are left out. Subsets of a Dataset
    get a source of their own, unless the user set one.

    Examples
    --------
    >>> import numpy as np
    >>> ds = xr.Dataset({"x": (("feature_dim", "sample"), np.zeros((3, 4)))})
    >>> validate_samples(ds).x.chunks
    ((4,), (3,))
    """
    if not isinstance(ds, xr.Dataset):
        raise TypeError(
            f"expected an xarray.Dataset as samples, got {type(ds).__name__}; try td.from_arrays, "
            "td.from_torch or td.from_dataframe"
        )
    for name, array in {"samples": ds, **ds.data_vars}.items():
        if SAMPLE not in array.dims:
            raise ValueError(
                f"expected the dimension {SAMPLE!r} in {name!r}, got {list(array.dims)}; try "
                f"ds.rename(row={SAMPLE!r}), or ds.drop_vars({name!r})"
            )
    ds = ds.transpose(SAMPLE, ...)
    ds = ds.reset_index(list(ds.xindexes))  # of a multi-index, the levels remain
    if SAMPLE in ds.coords:
        ds = ds.rename_vars({SAMPLE: "sample_id"})
    coords = {str(n): coord.compute() for n, coord in ds.coords.items() if SAMPLE in coord.dims}
    data: dict[Any, Any] = {name: _data(array) for name, array in ds.items()}
    arrays = lazy_variables(data, _block_size(ds))
    variables = {n: xr.Variable(ds[n].dims, array, ds[n].attrs) for n, array in arrays.items()}
    return dataset_of(variables, coords, ds.attrs)


def _block_size(ds: xr.Dataset) -> int:
    """Return the largest chunk of samples of the variable that has the most bytes."""
    widest = max(ds.data_vars.values(), key=lambda array: array.nbytes, default=ds[SAMPLE])
    sizes = widest.variable.chunksizes.get(SAMPLE)  # chunks of a DataArray would include its coords
    return max(1, *sizes) if sizes else 512


def _data(array: xr.DataArray) -> Any:
    """Return the array of a variable, made lazy if xarray would read it from a file here."""
    variable = array.variable
    if variable.chunks is None and not getattr(variable, "_in_memory", True):
        return array.chunk().data
    data = array.data
    return data if isinstance(data, da.Array) else np.asarray(data)


def _loaded(array: Any) -> Any:
    return np.asarray(array) if isinstance(array, da.Array | zarr.Array) else array


def lazy_variables(arrays: Mapping[str, Any], size: int) -> dict[str, da.Array]:
    """Make every array lazy, in blocks of ``size`` samples."""
    return {name: _lazy(name, array, size) for name, array in arrays.items()}


def _lazy(name: str, array: Any, size: int) -> Any:
    what = f"variable {name!r}"
    if is_tensor(array) or isinstance(array, np.ndarray | list | tuple | pd.Series):
        array = to_numpy(what, array)
    if not isinstance(array, np.ndarray | da.Array | zarr.Array) or array.ndim == 0:
        raise TypeError(
            f"expected a numpy, dask, zarr or torch array (sample, ...) as {what}, got "
            f"{type(array).__name__}; try array.toarray(), or numpy.atleast_1d(...)"
        )
    check_dtype(name, array.dtype)
    chunks = {0: size} | dict.fromkeys(range(1, array.ndim), -1)
    if isinstance(array, da.Array):
        if np.ma.isMaskedArray(meta_from_array(array)):
            raise ValueError(
                f"expected {what} without a mask, whose hidden values would be used; try "
                "dask.array.ma.filled(array, value)"
            )
        return array.rechunk(chunks)
    opened = _opened_by_tasks(array) if isinstance(array, zarr.Array) else mapped(array)
    source, token = (opened, opened.token) if opened else (array, fingerprint(array))
    # Of an array in memory, the graph has the blocks; of anything else, one task that opens it.
    lazy = da.from_array(
        source, chunks=tuple(chunks.values()), name=read_name(name, token, size),
        meta=np.empty((0,) * array.ndim, array.dtype),
    )  # fmt: skip
    return lazy.astype(array.dtype.newbyteorder("="), copy=False)


def _opened_by_tasks(array: zarr.Array[Any]) -> OpenedByTasks:
    identity = [str(array.store_path), array.metadata.to_dict()]
    token = json.dumps(identity, default=str, sort_keys=True)
    opened = functools.partial(_open_zarr, array.store_path, array.metadata)
    return OpenedByTasks(opened, token, array.shape, array.dtype)


def _open_zarr(where: Any, metadata: Any) -> Any:
    """Open an array anew: of one that is open and is not there, zarr reads the fill value."""
    array = zarr.open_array(where, mode="r")
    if array.metadata != metadata:
        raise ValueError(f"{where} is not the array that the samples were made of")
    return array


class Source(Protocol):
    """Samples that tasks read.

    ``fields`` has an array (0, ...) of each variable, whose shape and dtype all samples must have.
    """

    fields: dict[str, Array]

    def __len__(self) -> int: ...

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, Array]]]:
        """Yield the samples ``start:stop``, some at a time, after the number of the first."""
        ...


def fields_of(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return no samples of each variable (sample, ...), after a check of its dtype."""
    for name, array in arrays.items():
        check_dtype(name, array.dtype)
    # Copies, as a view would keep the group of rows that it is of in memory.
    return {name: array[:0].copy() for name, array in arrays.items()}


def check_field(name: str, field: Array, first: int, values: Array) -> None:
    """Check the shape and dtype of values (sample, ...), of which the first is a sample's."""
    if values.shape[1:] != field.shape[1:]:
        raise ValueError(
            f"expected shape {field.shape[1:]} in variable {name!r}, as sample 0 has, got "
            f"{values.shape[1:]} for sample {first}; try padding all samples to one shape: "
            "padding='max_length' in a tokenizer or in the collate_fn of td.from_torch, or "
            "td.from_dataframe(..., max_length=128)"
        )
    # Floating-point values may be rounded, but integers must not overflow.
    casting: Literal["safe", "same_kind"] = "safe" if field.dtype.kind in "biu" else "same_kind"
    if not np.can_cast(values.dtype, field.dtype, casting):
        raise ValueError(
            f"expected dtype {field.dtype} in variable {name!r}, as sample 0 has, got "
            f"{values.dtype} for sample {first}; try one dtype for all samples"
        )


def check_dtype(name: str, dtype: np.dtype[Any]) -> None:
    """Check that a variable has a dtype that models can read."""
    if dtype.kind not in "biufc":
        raise TypeError(
            f"expected numbers or booleans in variable {name!r}, as models read tensors, got dtype "
            f"{dtype}; try np.unique(values, return_inverse=True)[1] for classes, or, if the model "
            f"does not read it, coords={{{name!r}: ...}}"
        )


def require_samples(n: int, what: str) -> None:
    """Reject data without a sample."""
    if n == 0:
        raise ValueError(f"expected at least one sample, got none in {what}")


def read(source: Source, start: int, stop: int, names: Collection[str] = ()) -> dict[str, Array]:
    """Return the samples ``start:stop`` of all variables, or of some."""
    fields = {name: source.fields[name] for name in names or source.fields}
    n = stop - start
    block = {name: np.empty((n, *f.shape[1:]), f.dtype) for name, f in fields.items()}
    for first, rows in source.rows(start, stop):
        for name, field in fields.items():
            values = rows[name]
            check_field(name, field, first, values)
            block[name][first - start : first - start + len(values)] = values
    return block


def lazy_fields(source: Source, size: int) -> dict[str, da.Array]:
    """Build the lazy arrays of a source: one read per block serves all variables."""
    token, n = fingerprint(source), len(source)
    # One object per block, but with the chunks of the samples, so that blockwise can match them.
    blocks = da.map_blocks(
        _read_block, dask.delayed(source, name=f"dataset-{token}", traverse=False), n, size,
        chunks=da.core.normalize_chunks(size, (n,)), dtype=object, meta=np.empty((0,), object),
        name=f"read-bundle-{token}-{size}",
    )  # fmt: skip
    return unpacked(blocks, source.fields, token, size)


def _read_block(source: Source, n: int, size: int, block_id: tuple[int]) -> dict[str, Array]:
    start = block_id[0] * size
    return read(source, start, min(start + size, n))


def unpacked(
    blocks: da.Array, fields: Mapping[str, Array], token: str, size: int
) -> dict[str, da.Array]:
    """Return the lazy arrays of blocks that are mappings from variables to arrays."""
    arrays = {}
    for name, field in fields.items():
        axes = tuple(range(field.ndim))
        arrays[name] = da.blockwise(
            take, axes, blocks, axes[:1], name, None,
            new_axes=dict(zip(axes[1:], field.shape[1:], strict=True)), dtype=field.dtype,
            meta=np.empty((0,) * field.ndim, field.dtype), name=read_name(name, token, size),
        )  # fmt: skip
    return arrays


def read_name(name: str, token: str, size: int) -> str:
    """Return Dask's name of a variable: equal content has equal names, but for the chunk size."""
    # The digest includes the variable's name, because all variables of a source share its token.
    return f"read-{name}-{_digest(f'{name} {token}')}-{size}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def assemble(arrays: Mapping[str, da.Array], coords: CoordsLike) -> xr.Dataset:
    """Create a Dataset from lazy arrays with equal chunks along samples, and from coords."""
    variables = {
        name: xr.Variable((SAMPLE, *(f"{name}_dim_{axis}" for axis in range(1, array.ndim))), array)
        for name, array in arrays.items()
    }
    return dataset_of(variables, coords, {})


def dataset_of(
    variables: Mapping[str, xr.Variable], coords: CoordsLike, attrs: Mapping[str, Any]
) -> xr.Dataset:
    """Create a Dataset from lazy variables (sample, ...) and from coords, after checks of both."""
    if not variables:
        raise ValueError(
            "expected at least one model input, got none; try td.from_arrays({'image': images}), "
            "or samples.reset_coords('name')"
        )
    for name in variables:
        check_name(name, "variable")
    n = min(len(variable) for variable in variables.values())
    require_samples(n, f"the variables {list(variables)}")
    samples = {name: (SAMPLE, array) for name, array in normalise_coords(coords, n).items()}
    ds = xr.Dataset(variables, samples, attrs)
    return ds.assign_attrs(source=source_of(ds))


def drawn(ds: xr.Dataset, n: int, block: int) -> xr.Dataset:
    """Return n samples that are drawn at random, always the same ones, in their order.

    Parameters
    ----------
    ds
        As :func:`validate_samples` returns it.
    n
        How many; all of them if there are no more.
    block
        How many are in a block of those that are drawn.
    """
    total = ds.sizes[SAMPLE]
    if total <= n:
        return ds
    some = ds.isel({SAMPLE: np.sort(np.random.default_rng(0).permutation(total)[:n])})
    # Variables, one at a time: Dataset.chunk would make coords lazy.
    return some.assign({name: some.variables[name].chunk({SAMPLE: block}) for name in some})


def source_of(ds: xr.Dataset, inputs: Collection[str] | None = None) -> str:
    """Identify what a model can read of the samples, independently of chunks.

    Parameters
    ----------
    ds
        Dataset with lazy variables and in-memory coords.
    inputs
        Names of the coords that the model reads; other coords do not affect the result. By default,
        as long as no model is known, all numeric coords are included.

    Returns
    -------
    ``ds.attrs["source"]`` if the user set it, else a hash of the variables, identified by dask's
    names, and of those coords. Strings and times are not included, since models cannot read them,
    so such metadata may be added later.
    """
    source = ds.attrs.get("source")
    if source is not None and not _SOURCE.fullmatch(str(source)):
        return str(source)
    variables = sorted(
        (str(name), str(array.dtype), array.shape, _content(array.data.name))
        for name, array in ds.data_vars.items()
    )
    coords = sorted(
        (str(name), fingerprint(coord.values))
        for name, coord in ds.coords.items()
        if coord.dtype.kind in "biuf" and (inputs is None or name in inputs)
    )
    return f"samples-{_digest(repr((variables, coords)))}"


def _content(name: str) -> str:
    """Return dask's name of an array, without the chunk size if this module chose the name."""
    match = _READ_NAME.fullmatch(name)
    return match[1] if match else name
