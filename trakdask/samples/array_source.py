"""Create samples from arrays: numpy, dask, zarr, torch."""

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
    require_samples,
)
from trakdask.samples.coords import (
    CoordsLike,
    fields_as_coords,
    normalise_coords,
    to_numpy,
    without_mask,
)
from trakdask.samples.fingerprints import fingerprint
from trakdask.samples.memory_maps import mapped

__all__ = ["from_arrays", "lazy_variables"]


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
    n = len(next(iter(variables.values())))
    values = {name: _loaded(arrays[name]) for name in chosen} if chosen else coords
    return assemble(variables, normalise_coords(values, variables, n))


def _loaded(array: Any) -> Any:
    if isinstance(array, da.Array):
        return array.compute()
    return array[:] if isinstance(array, zarr.Array) else array


def lazy_variables(arrays: Mapping[str, Any], size: int) -> dict[str, da.Array]:
    """Make every array lazy, in blocks of ``size`` samples, and check that lengths are equal."""
    if not arrays:
        raise ValueError(
            "expected at least one model input, got no arrays; try "
            "td.from_arrays({'image': images})"
        )
    readable = {name: _readable(name, array) for name, array in arrays.items()}
    lengths = {name: array.shape[0] for name, array in readable.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"expected arrays with the same number of samples, got {lengths}; try "
            f"array[:{min(lengths.values())}] of each"
        )
    require_samples(min(lengths.values()), f"the arrays {list(lengths)}")
    return {name: _lazy(name, array, size) for name, array in readable.items()}


def _readable(name: str, array: Any) -> Any:
    """Check one array, and convert tensors and lists to numpy."""
    if isinstance(array, torch.Tensor | list | tuple | pd.Series):
        array = to_numpy(f"variable {name!r}", array)
    if not isinstance(array, np.ndarray | da.Array | zarr.Array):
        advice = "array.toarray()" if hasattr(array, "toarray") else "numpy.asarray(...)"
        raise TypeError(
            f"expected a numpy, dask, zarr or torch array as variable {name!r}, got "
            f"{type(array).__name__}; try {advice}"
        )
    if array.ndim == 0:
        raise ValueError(
            f"expected samples along the first dimension of variable {name!r}, got an array "
            "without dimensions; try numpy.atleast_1d(...)"
        )
    check_dtype(name, array.dtype)
    if np.isnan(array.shape[0]):
        raise ValueError(
            f"expected chunks of known size in variable {name!r}; try {name}.compute_chunk_sizes()"
        )
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
