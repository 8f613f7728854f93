"""Build Datasets from blocks that are read inside tasks; shared by all sources of samples."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask.arrays.blocks import take
from trakdask.samples.coords import CoordsLike, check_name, normalise_coords
from trakdask.samples.fingerprints import fingerprint
from trakdask.variables import SAMPLE

__all__ = [
    "Field",
    "Reader",
    "assemble",
    "check_chunks",
    "check_dtype",
    "dims_of",
    "members",
    "read_array",
    "read_bundle",
    "require_inputs",
    "require_samples",
    "source_of",
]

Array = np.ndarray[Any, Any]

_READ_NAME = re.compile(r"read-.+-([0-9a-f]{64})-\d+", re.DOTALL)
_SOURCE = re.compile(r"samples-[0-9a-f]{64}")


@dataclass(frozen=True)
class Field:
    """Shape and dtype that every sample of a variable must have."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def check(self, name: str, sample: int, value: Array) -> None:
        """Check the shape and dtype of the value of one sample."""
        if value.shape != self.shape:
            raise ValueError(
                f"expected shape {self.shape} in variable {name!r}, as sample 0 has, got "
                f"{value.shape} for sample {sample}; try padding or cropping all samples to one "
                "shape"
            )
        # Floating-point values may be rounded, but integers must not overflow.
        casting: Literal["safe", "same_kind"] = "safe" if self.dtype.kind in "biu" else "same_kind"
        if not np.can_cast(value.dtype, self.dtype, casting):
            raise ValueError(
                f"expected dtype {self.dtype} in variable {name!r}, as sample 0 has, got "
                f"{value.dtype} for sample {sample}; try one dtype for all samples"
            )


class Reader(Protocol):
    """A source that reads all of its variables together."""

    def read(self, start: int, stop: int) -> dict[str, Array]:
        """Read the samples ``start:stop`` of every variable, each (stop - start, ...)."""
        ...


def check_chunks(chunks: int) -> int:
    """Check the number of samples per block, and return it as an int."""
    if isinstance(chunks, bool) or not isinstance(chunks, int | np.integer) or chunks < 1:
        raise ValueError(
            f"expected a positive integer as chunks, the samples per block, got {chunks!r}; try "
            "chunks=512"
        )
    return int(chunks)


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


def read_array(name: str, source: Any, token: str, size: int) -> Any:
    """Build the lazy array (sample, ...) whose blocks are slices of ``source``.

    Of an array in memory, a graph has the blocks; of anything else, one task that opens it.
    """
    chunks = _chunks(source.shape, size)
    native = source.dtype.newbyteorder("=")
    array = da.from_array(
        source, chunks=chunks, name=_read_name(name, token, size),
        meta=np.empty((0,) * len(chunks), source.dtype),
    )  # fmt: skip
    return array if source.dtype == native else array.astype(native)


def read_bundle(
    reader: Reader, token: str, fields: Mapping[str, Field], n: int, size: int
) -> dict[str, da.Array]:
    """Build the lazy arrays of a reader: one read per block serves all variables."""
    # One object per block, but with the chunks of the samples, so that blockwise can match them.
    bundle = da.map_blocks(
        _read_bundle,
        dask.delayed(reader, name=f"dataset-{token}", traverse=False),
        n,
        size,
        chunks=_chunks((n,), size),
        dtype=object,
        meta=np.empty((0,), object),
        name=f"read-bundle-{token}-{size}",
    )
    return members(bundle, fields, token, size)


def members(
    bundle: da.Array, fields: Mapping[str, Field], token: str, size: int
) -> dict[str, da.Array]:
    """Return the lazy arrays of blocks that are mappings from variables to arrays."""
    return {name: _member(name, bundle, field, token, size) for name, field in fields.items()}


def _member(name: str, bundle: da.Array, field: Field, token: str, size: int) -> Any:
    axes = tuple(range(1 + len(field.shape)))
    return da.blockwise(
        take,
        axes,
        bundle,
        axes[:1],
        name,
        None,
        new_axes=dict(zip(axes[1:], field.shape, strict=True)),
        dtype=field.dtype,
        meta=np.empty((0,) * len(axes), field.dtype),
        name=_read_name(name, token, size),
    )


def _read_bundle(reader: Reader, n: int, size: int, block_id: tuple[int, ...]) -> dict[str, Array]:
    start = block_id[0] * size
    return reader.read(start, min(start + size, n))


def _chunks(shape: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
    n, *rest = shape
    starts = range(0, n, size)
    return (tuple(min(size, n - start) for start in starts), *((length,) for length in rest))


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _read_name(name: str, token: str, size: int) -> str:
    # The digest includes the variable's name, because all variables of a reader share its token.
    return f"read-{name}-{_digest(f'{name} {token}')}-{size}"


def dims_of(name: str, ndim: int) -> tuple[str, ...]:
    """Return names for the dimensions of a variable; only ``sample`` is shared with others."""
    return SAMPLE, *(f"{name}_dim_{axis}" for axis in range(1, ndim))


def assemble(variables: Mapping[str, da.Array], coords: CoordsLike) -> xr.Dataset:
    """Create a Dataset from lazy arrays with equal chunks along samples, and from coords."""
    n = require_inputs(variables)
    for name in variables:
        check_name(name, "variable")
    values = normalise_coords(coords, variables, n)
    ds = xr.Dataset(
        {name: (dims_of(name, array.ndim), array) for name, array in variables.items()},
        coords={name: (SAMPLE, array) for name, array in values.items()},
    )
    return ds.assign_attrs(source=source_of(ds))


def require_inputs(variables: Mapping[Any, Any]) -> int:
    """Return the number of samples of model inputs; reject those without any."""
    if not variables:
        raise ValueError(
            "expected at least one model input, got none; try td.from_arrays({'image': images}), "
            "or samples.reset_coords('name')"
        )
    n: int = min(array.shape[0] for array in variables.values())
    require_samples(n, f"the variables {list(variables)}")
    return n


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
        (str(name), str(array.dtype), array.shape, _content(array.data))
        for name, array in ds.data_vars.items()
    )
    coords = sorted(
        (str(name), fingerprint(coord.values))
        for name, coord in ds.coords.items()
        if coord.dtype.kind in "biuf" and (inputs is None or name in inputs)
    )
    return f"samples-{_digest(repr((variables, coords)))}"


def _content(array: da.Array) -> str:
    """Return dask's name of an array, without the chunk size if this module chose the name."""
    match = _READ_NAME.fullmatch(array.name)
    return match[1] if match else array.name
