"""Convert any Dataset of samples to the form that the rest of the package expects."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from trakdask.samples.array_source import lazy_variables
from trakdask.samples.blocks import check_chunks, source_of
from trakdask.samples.coords import check_name, normalise_coords
from trakdask.variables import SAMPLE

__all__ = ["validate_samples"]

_COORDS_BYTES = 10**9
_CHUNKS = 512


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
    if not ds.data_vars:
        raise ValueError(
            "expected at least one model input among the variables of samples, got only the "
            f"coords {list(ds.coords)}; try ds.reset_coords('name')"
        )
    for name, array in ds.data_vars.items():
        check_name(name, "variable")
        if SAMPLE not in array.dims:
            raise ValueError(
                f"expected {SAMPLE!r} among the dimensions of variable {name!r}, got {array.dims}; "
                f"try ds.drop_vars({name!r})"
            )


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
    for name, coord in coords.items():
        if coord.ndim > 1:
            raise ValueError(
                f"expected the dimension {SAMPLE!r} alone for coord {name!r}, got {coord.dims}; "
                f"try ds.reset_coords({name!r}), which makes it a variable"
            )
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
