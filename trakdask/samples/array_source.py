"""Create samples from arrays, numpy, dask, zarr or torch, and from any Dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import torch
import xarray as xr
import zarr

from trakdask.samples.blocks import (
    assemble,
    check_chunks,
    check_dtype,
    read_array,
    require_inputs,
    source_of,
)
from trakdask.samples.coords import (
    CoordsLike,
    check_name,
    fields_as_coords,
    normalise_coords,
    to_numpy,
    without_mask,
)
from trakdask.samples.fingerprints import fingerprint, mapped
from trakdask.variables import SAMPLE

__all__ = ["from_arrays", "lazy_variables", "validate_samples"]

_COORDS_BYTES = 10**9
_CHUNKS = 512


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
        If a variable is not an array, is sparse, or has neither numbers nor booleans.
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
    size = check_chunks(chunks)
    chosen = fields_as_coords(coords, arrays)
    variables = lazy_variables({n: a for n, a in arrays.items() if n not in chosen}, size)
    values = {name: _loaded(arrays[name]) for name in chosen} if chosen else coords
    return assemble(variables, values)


def validate_samples(ds: xr.Dataset, *, chunks: int | None = None) -> xr.Dataset:
    """Convert a Dataset to the form that :func:`from_arrays` returns.

    Parameters
    ----------
    ds
        Dataset with a ``sample`` dimension: variables (sample, ...) are model inputs, coords
        (sample,) are metadata.
    chunks
        Samples per block. By default the chunks of the variable with the most bytes per sample,
        or 512 if it has none.

    Returns
    -------
    Dataset with lazy variables, ``sample`` first, in equal blocks of samples and one chunk along
    other dimensions; coords in memory; no index; ``attrs["source"]`` as set by the user, else
    derived from dask's names and the content. A Dataset that has this form already is not changed.

    Raises
    ------
    TypeError
        If ``ds`` is not a Dataset, or a variable or coord has an unsupported dtype.
    ValueError
        If there is no ``sample`` dimension, no variable or no sample, a variable lacks the
        dimension ``sample``, a name is reserved, or lazy coords are larger than 1 GB.

    Notes
    -----
    Lazy coords are loaded; nothing else is computed. A coord named ``sample`` becomes
    ``sample_id``, and coords without the dimension ``sample`` are left out. Subsets of a Dataset
    get a source of their own, unless the user set one.

    Examples
    --------
    >>> import numpy as np
    >>> ds = xr.Dataset({"x": (("feature_dim", "sample"), np.zeros((3, 4)))})
    >>> validate_samples(ds, chunks=2).x.chunks
    ((2, 2), (3,))
    """
    _check_form(ds)
    size = _block_size(ds) if chunks is None else check_chunks(chunks)
    ds = _without_indexes(ds)
    coords = normalise_coords(_load_coords(ds), set(ds.data_vars), ds.sizes[SAMPLE])
    ordered = {str(name): array.transpose(SAMPLE, ...) for name, array in ds.data_vars.items()}
    arrays = lazy_variables({name: _data(array) for name, array in ordered.items()}, size)
    result = xr.Dataset(
        {name: (ordered[name].dims, array, ordered[name].attrs) for name, array in arrays.items()},
        coords={name: (SAMPLE, values) for name, values in coords.items()},
        attrs=ds.attrs,
    )
    return result.assign_attrs(source=source_of(result))


def _check_form(ds: Any) -> None:
    if not isinstance(ds, xr.Dataset):
        raise TypeError(
            f"expected an xarray.Dataset as samples, got {type(ds).__name__}; try td.from_arrays, "
            "td.from_torch or td.from_dataframe"
        )
    if SAMPLE not in ds.dims:
        raise ValueError(
            f"expected the dimension {SAMPLE!r} in samples, got {list(ds.sizes)}; try "
            f"ds.rename({next(iter(ds.sizes), 'row')}={SAMPLE!r})"
        )
    for name, array in ds.data_vars.items():
        check_name(name, "variable")
        if SAMPLE not in array.dims:
            raise ValueError(
                f"expected {SAMPLE!r} among the dimensions of variable {name!r}, got {array.dims}; "
                f"try ds.drop_vars({name!r})"
            )
    require_inputs(dict(ds.data_vars))


def _block_size(ds: xr.Dataset) -> int:
    widest = max(ds.data_vars.values(), key=lambda array: array.nbytes)
    sizes = widest.variable.chunksizes.get(SAMPLE)  # chunks of a DataArray would include its coords
    return max(1, *sizes) if sizes else _CHUNKS


def _without_indexes(ds: xr.Dataset) -> xr.Dataset:
    indexed = [name for name, coord in ds.coords.items() if name in ds.xindexes]
    multi = [name for name in indexed if isinstance(ds.xindexes[name], xr.indexes.PandasMultiIndex)]
    if SAMPLE in multi:  # it consists of tuples of the levels, which remain as coords
        ds = ds.drop_indexes(multi).drop_vars(SAMPLE)
        indexed = [name for name in indexed if name not in multi]
    ds = ds.drop_indexes(indexed)
    if SAMPLE in ds.coords:
        ds = ds.drop_vars(SAMPLE).assign_coords(sample_id=(SAMPLE, ds[SAMPLE].data))
    return ds


def _load_coords(ds: xr.Dataset) -> dict[str, Any]:
    coords = {name: coord for name, coord in ds.coords.items() if SAMPLE in coord.dims}
    lazy = {name: coord.nbytes for name, coord in coords.items() if coord.chunks is not None}
    if sum(lazy.values()) > _COORDS_BYTES:
        raise ValueError(
            f"expected lazy coords of at most {_COORDS_BYTES} bytes, as coords are held in memory, "
            f"got {sum(lazy.values())} bytes in {lazy}; try ds.drop_vars(...), or "
            "ds.reset_coords(...) to make one a variable"
        )
    return {str(name): coord.compute() for name, coord in coords.items()}


def _data(array: xr.DataArray) -> Any:
    """Return the array of a variable, made lazy if xarray would read it from a file here."""
    variable = array.variable
    if variable.chunks is None and not getattr(variable, "_in_memory", True):
        return array.chunk().data
    data = array.data
    return data if isinstance(data, da.Array) else np.asarray(data)


def _loaded(array: Any) -> Any:
    if isinstance(array, da.Array):
        return array.compute()
    return array[:] if isinstance(array, zarr.Array) else array


def lazy_variables(arrays: Mapping[str, Any], size: int) -> dict[str, da.Array]:
    """Make every array lazy, in blocks of ``size`` samples."""
    readable = {name: _readable(name, array) for name, array in arrays.items()}
    require_inputs(readable)
    return {name: _lazy(name, array, size) for name, array in readable.items()}


def _readable(name: str, array: Any) -> Any:
    """Check one array, and convert tensors and lists to numpy."""
    if isinstance(array, torch.Tensor | list | tuple | pd.Series):
        array = to_numpy(f"variable {name!r}", array)
    if not isinstance(array, np.ndarray | da.Array | zarr.Array) or array.ndim == 0:
        advice = "array.toarray()" if hasattr(array, "toarray") else "numpy.atleast_1d(...)"
        raise TypeError(
            f"expected a numpy, dask, zarr or torch array (sample, ...) as variable {name!r}, got "
            f"{type(array).__name__}; try {advice}"
        )
    check_dtype(name, array.dtype)
    if isinstance(array, da.Array) and isinstance(array._meta, np.ma.MaskedArray):
        raise ValueError(
            f"expected variable {name!r} without a mask, whose hidden values would be used; try "
            "dask.array.ma.filled(array, value)"
        )
    return without_mask(f"variable {name!r}", array)


def _lazy(name: str, array: Any, size: int) -> Any:
    if isinstance(array, da.Array):
        return array.rechunk({0: size} | dict.fromkeys(range(1, array.ndim), -1))
    if isinstance(array, zarr.Array):
        source: Any = _ZarrRows(array)
        return read_array(name, source, _zarr_token(array), size)
    if (source := mapped(array)) is not None:
        return read_array(name, source, source.token, size)
    return read_array(name, np.asarray(array), fingerprint(array), size)


class _ZarrRows:
    """A zarr array that tasks open themselves: where there is none, zarr returns its fill value."""

    def __init__(self, array: zarr.Array[Any]) -> None:
        self.where, self.metadata = array.store_path, array.metadata
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __getitem__(self, rows: Any) -> Any:
        array = zarr.open_array(self.where, mode="r")
        if array.metadata != self.metadata:
            raise ValueError(f"{self.where} is not the array that the samples were made of")
        return array[rows]


def _zarr_token(array: zarr.Array[Any]) -> str:
    """Identify a zarr array by location and metadata; its values may be too large to hash."""
    identity = [str(array.store_path), array.metadata.to_dict()]
    return hashlib.sha256(json.dumps(identity, default=str, sort_keys=True).encode()).hexdigest()
