"""Lazy variables of samples, whose blocks tasks read, and the Dataset that they make up.

A source of several variables says their fields and its length, and yields samples of a range. It is
one task of the graph, and identified by its pickled content.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, Protocol

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask.arrays.blocks import take
from trakdask.samples.coords import CoordsLike, check_name, normalise_coords
from trakdask.samples.fingerprints import fingerprint
from trakdask.variables import SAMPLE

Array = np.ndarray[Any, Any]

_READ_NAME = re.compile(r"read-.+-([0-9a-f]{64})-\d+", re.DOTALL)
_SOURCE = re.compile(r"samples-[0-9a-f]{64}")


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
            f"{values.shape[1:]} for sample {first}; try padding or cropping all samples to one "
            "shape, or td.from_dataframe(..., max_length=128), which pads lists such as tokens"
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
    values = normalise_coords(coords, variables, n)
    samples = {name: (SAMPLE, array) for name, array in values.items()}
    ds = xr.Dataset(variables, samples, attrs)
    return ds.assign_attrs(source=source_of(ds))


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
    given = ds.attrs.get("source")
    if given is not None and not _SOURCE.fullmatch(str(given)):
        return str(given)
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
