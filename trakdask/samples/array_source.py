"""Create samples from arrays (in memory, memory-mapped, lazy, or of zarr), or from any Dataset."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
import zarr
from dask.array.utils import meta_from_array
from zarr.storage import LocalStore

from trakdask.arrays.graphs import plain
from trakdask.checks import is_tensor
from trakdask.samples.coords import fields_as_coords, to_numpy
from trakdask.samples.datasets import assemble, dataset_of
from trakdask.samples.fingerprints import OpenedByTasks, content_of_folder, fingerprint, mapped
from trakdask.samples.sources import ROWS, block_size, check_dtype, content_of, variable_of
from trakdask.variables import SAMPLE, TRAINED_ON


def from_arrays(
    arrays: Mapping[str, Any],
    *,
    coords: Mapping[str, Any] | pd.DataFrame | Sequence[str] | None = None,
    chunks: int | Literal["auto"] = "auto",
) -> xr.Dataset:
    """Create a Dataset of samples from arrays.

    Parameters
    ----------
    arrays
        Model inputs by name, each (sample, ...) with the same number of samples: numpy arrays and
        memory maps, torch tensors, dask arrays, zarr arrays, or lists of numbers.
    coords
        Metadata by name, or a pandas DataFrame of metadata, one value per sample: numbers,
        booleans, strings or times. The index of pandas, if it has one, must be 0, 1, … in order;
        ``reset_index(drop=True)`` says that the order is that of the samples. Or a list with names
        of ``arrays`` that become coords, such as ``["label"]``; lazy ones are computed. Models can
        also read numeric coords.
    chunks
        Samples per block, and thus per task. ``"auto"``: blocks have 512 samples until
        :func:`featurize` joins them to blocks of 16 MB of features, as long as there are four
        blocks for each thread, and at least 64, and a block has up to 64 MB of inputs. ``plan``
        shows the blocks. The results are the same.

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
    all of them must see. A memory map is hashed, too, and so are the files of a zarr array in a
    local folder, which reads them once; so samples are the same after their files were moved,
    copied or touched, and others if a value has changed. A zarr array elsewhere is identified by
    its path and metadata; choose ``chunks`` that are multiples of its own, since
    other chunks are read more than once.

    Examples
    --------
    >>> import numpy as np
    >>> train = from_arrays({"x": np.eye(4, dtype="f4")}, coords={"label": [0, 1, 0, 1]}, chunks=2)
    >>> train.x.dims, train.x.chunks, train.label.dtype.name
    (('sample', 'x_dim_1'), ((2, 2), (4,)), 'int64')
    """
    if not isinstance(arrays, Mapping):
        raise TypeError(
            f"expected arrays by name, got {type(arrays).__name__}; try "
            "td.from_arrays({'image': images})"
        )
    size = block_size(chunks)
    # 1. Model inputs, and those of them that are to become coords.
    as_coords = fields_as_coords(coords, arrays)
    variables = {n: lazy_variable(n, a, size) for n, a in arrays.items() if n not in as_coords}
    chosen = {name: arrays[name] for name in as_coords}
    # 2. The coords, which are in memory: lazy ones are computed here.
    lazy = (da.Array, zarr.Array)
    loaded = {n: np.asarray(a) if isinstance(a, lazy) else a for n, a in chosen.items()}
    return assemble(variables, loaded or coords, chunks)


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
    derived from dask's names and the content. The variable with the most bytes decides on the
    blocks; without chunks, they have 512 samples. A Dataset that has this form already is not
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
    if SAMPLE not in ds.dims:
        raise ValueError(
            f"expected the dimension {SAMPLE!r} in the samples, got {list(ds.dims)}; try "
            f"ds.rename(row={SAMPLE!r}), or, for one sample, ds.isel({SAMPLE}=[0]), with a list, "
            "which keeps the dimension"
        )
    for name, array in ds.data_vars.items():
        if SAMPLE not in array.dims:
            raise ValueError(
                f"expected the dimension {SAMPLE!r} in {name!r}, got {list(array.dims)}; try "
                f"ds.rename(row={SAMPLE!r}), or ds.drop_vars({name!r})"
            )
    ds = ds.transpose(SAMPLE, ...)
    # Without an index, because xarray aligns Datasets by it: samples would be reordered or dropped.
    ds = ds.reset_index(list(ds.xindexes))  # of a multi-index, the levels remain
    if SAMPLE in ds.coords:
        ds = ds.rename_vars({SAMPLE: "sample_id"})
    kept = ds.drop_vars(TRAINED_ON, errors="ignore").coords  # that is of features, not of samples
    coords = {str(n): coord.compute() for n, coord in kept.items() if SAMPLE in coord.dims}
    # Blocks as those of the variable that has the most bytes.
    widest = max(ds.data_vars.values(), key=lambda array: array.nbytes, default=ds[SAMPLE])
    sizes = widest.variable.chunksizes.get(SAMPLE)  # chunks of a DataArray would include its coords
    size = max(1, *sizes) if sizes else ROWS
    variables: dict[Any, xr.Variable] = {}
    for name, array in ds.items():
        lazy = lazy_variable(str(name), data_of(array), size)
        variables[name] = xr.Variable(array.dims, lazy.data, {**array.attrs, **lazy.attrs})
    return dataset_of(variables, coords, ds.attrs)


def data_of(array: xr.DataArray) -> Any:
    """Return the array of a variable, made lazy if xarray would read it from a file here."""
    variable = array.variable
    # xarray has no public name for data that it has not read from their file yet.
    if variable.chunks is None and not getattr(variable, "_in_memory", True):
        return plain(array.chunk().data)
    data = plain(array.data)
    return data if isinstance(data, da.Array) else np.asarray(data)


def lazy_variable(name: str, array: Any, size: int | None) -> xr.Variable:
    """Make an array lazy, in blocks of ``size`` samples; without it, dask's keep their chunks."""
    what = f"variable {name!r}"
    if is_tensor(array) or isinstance(array, np.ndarray | list | tuple | pd.Series):
        array = to_numpy(what, array)
    if not isinstance(array, np.ndarray | da.Array | zarr.Array) or array.ndim == 0:
        raise TypeError(
            f"expected an array (sample, ...) of numpy, dask, zarr or torch as {what}, got "
            f"{type(array).__name__}; try array.toarray(), or numpy.atleast_1d(...)"
        )
    check_dtype(name, array.dtype)
    chunks = {0: size} | dict.fromkeys(range(1, array.ndim), -1)
    if isinstance(array, da.Array):
        if np.ma.isMaskedArray(meta_from_array(array)):
            raise ValueError(
                f"expected {what} without a mask, got a masked array; try "
                "dask.array.ma.filled(array, value)"
            )
        return variable_of(name, array if size is None else array.rechunk(chunks))
    if isinstance(array, zarr.Array):
        identity = [str(array.store_path), array.metadata.to_dict()]
        token = json.dumps(identity, default=str, sort_keys=True)
        open_ = functools.partial(_open_zarr, array.store_path, array.metadata)
        opened: Any = OpenedByTasks(open_, token, array.shape, array.dtype)
        if isinstance(array.store, LocalStore):
            token = content_of_folder(array.store.root / array.path)
    else:
        opened, token = mapped(array), fingerprint(array)
    content = content_of(name, token)
    # The graph has the blocks of an array in memory, or one task that opens any other array.
    lazy = da.from_array(
        opened or array, chunks=tuple(chunks.values()), name=f"read-{name}-{content}-{size}",
        meta=np.empty((0,) * array.ndim, array.dtype),
    )  # fmt: skip
    # Files may have the other order of bytes, which torch does not take.
    lazy = lazy.astype(array.dtype.newbyteorder("="), copy=False)
    return variable_of(name, lazy, content)


def _open_zarr(where: Any, metadata: Any) -> Any:
    """Open an array anew: if its files are gone, an open array of zarr would be its fill value."""
    array = zarr.open_array(where, mode="r")
    if array.metadata != metadata:
        raise ValueError(f"{where} is not the array that the samples were made of")
    return array
