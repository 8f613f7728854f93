"""Samples that are arrays: numpy, dask, zarr, torch."""

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

from trakdask.samples.blocks import assemble, check_chunks, check_dtype, read_array
from trakdask.samples.coords import CoordsLike, normalise_coords
from trakdask.spool import Spooled

__all__ = ["from_arrays", "lazy_variables"]


def from_arrays(
    arrays: Mapping[str, Any], *, coords: CoordsLike = None, chunks: int = 512
) -> xr.Dataset:
    """Label arrays as samples.

    Parameters
    ----------
    arrays
        Model inputs by name, each (sample, ...) with the same number of samples: numpy arrays and
        memory maps, torch tensors, dask arrays, zarr arrays, or lists of numbers.
    coords
        Metadata by name, or a pandas DataFrame of it, one value per sample: numbers, booleans,
        strings or times. Models can read numeric coords too, labels for instance.
    chunks
        Samples per block, and so per task.

    Returns
    -------
    Dataset with one lazy variable per array, (sample, ...) in its dtype, in blocks of ``chunks``
    samples and one chunk along other dimensions; the coords in memory, without an index;
    ``attrs["source"]`` names the content.

    Raises
    ------
    TypeError
        If something is no array, or holds neither numbers nor booleans.
    ValueError
        If there are no arrays or no samples, lengths differ, a name is reserved or given twice, or
        ``chunks`` is not positive.

    Notes
    -----
    Nothing is computed. Arrays in memory are hashed once and held, not copied: do not change them
    afterwards. They never enter the graph: worker processes map a file of them
    (:class:`~trakdask.spool.Spooled`). Zarr arrays and read-only ``np.memmap`` are read by the
    workers where they lie, and named by where that is; give zarr arrays ``chunks`` that are
    multiples of their own, else chunks are read more than once.

    Examples
    --------
    >>> import numpy as np
    >>> train = from_arrays({"x": np.eye(4, dtype="f4")}, coords={"label": [0, 1, 0, 1]}, chunks=2)
    >>> train.x.dims, train.x.chunks, train.label.dtype.name
    (('sample', 'x_dim_1'), ((2, 2), (4,)), 'int64')
    """
    if not isinstance(arrays, Mapping):
        raise TypeError(
            f"arrays is a {type(arrays).__name__}; needed a mapping from name to array. Use "
            "from_arrays({'image': images})."
        )
    size = check_chunks(chunks)
    variables = lazy_variables(arrays, size)
    n = len(next(iter(variables.values())))
    return assemble(variables, normalise_coords(coords, variables, n))


def lazy_variables(arrays: Mapping[str, Any], size: int) -> dict[str, da.Array]:
    """Make every array lazy, in blocks of ``size`` samples; check that lengths agree."""
    if not arrays:
        raise ValueError(
            "there are no arrays; needed at least one model input. Use "
            "from_arrays({'image': images})."
        )
    readable = {name: _readable(name, array) for name, array in arrays.items()}
    lengths = {name: array.shape[0] for name, array in readable.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"the arrays have different numbers of samples: {lengths}; needed one. Cut them to "
            f"{min(lengths.values())} samples: array[:{min(lengths.values())}]."
        )
    if not min(lengths.values()):
        raise ValueError(
            f"the arrays {list(lengths)} hold 0 samples; needed at least one. Check what selected "
            "them."
        )
    return {name: _lazy(name, array, size) for name, array in readable.items()}


def _readable(name: str, array: Any) -> Any:
    """Check one array; bring what is not lazy and on the host into numpy."""
    if isinstance(array, torch.Tensor):
        array = _from_tensor(name, array)
    elif isinstance(array, list | tuple | pd.Series):
        array = np.asarray(array)
    if not isinstance(array, np.ndarray | da.Array | zarr.Array):
        raise TypeError(
            f"variable {name!r} is a {type(array).__name__}; needed a numpy, dask, zarr or torch "
            "array. Use numpy.asarray(...) or dask.array.from_array(...)."
        )
    if array.ndim == 0:
        raise ValueError(
            f"variable {name!r} has no dimensions; needed samples along the first. Use "
            "numpy.atleast_1d(...)."
        )
    check_dtype(name, array.dtype)
    if np.isnan(array.shape[0]):
        raise ValueError(
            f"variable {name!r} has chunks of unknown size; needed known ones. Use "
            f"{name}.compute_chunk_sizes()."
        )
    return array


def _from_tensor(name: str, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    try:
        return tensor.detach().cpu().numpy()
    except TypeError as err:
        raise TypeError(
            f"variable {name!r} is a tensor of {tensor.dtype}; needed a dtype that numpy has. Use "
            "tensor.float()."
        ) from err


def _lazy(name: str, array: Any, size: int) -> Any:
    if isinstance(array, da.Array):
        return array.rechunk({0: size} | dict.fromkeys(range(1, array.ndim), -1))
    token = _zarr_token(array) if isinstance(array, zarr.Array) else None
    return read_array(name, Spooled(array, token), array.shape, array.dtype, size)


def _zarr_token(array: zarr.Array[Any]) -> str:
    """Name a zarr array by its place and metadata; its values may be more than one can read."""
    place = [str(array.store_path), array.metadata.to_dict()]
    return hashlib.sha256(json.dumps(place, default=str, sort_keys=True).encode()).hexdigest()
