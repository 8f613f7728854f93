"""Lazy variables whose blocks tasks read from a source.

A source of several variables says their fields and its length, and yields samples of a range. It is
one task of the graph, and identified by its pickled content.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, Protocol

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask.arrays.blocks import take
from trakdask.checks import require_integer
from trakdask.execution import n_slots
from trakdask.samples.fingerprints import fingerprint
from trakdask.variables import SAMPLE

ROWS = 512
"""Samples of a block until features are made of them."""
_FEATURE_BYTES, _INPUT_BYTES = 2**24, 2**26
_LEAST_BLOCKS, _BLOCKS_PER_TASK = 64, 4


class Source(Protocol):
    """Samples that tasks read.

    ``fields`` has an array (0, ...) of each variable, whose shape and dtype all samples must have.
    """

    fields: dict[str, np.ndarray]

    def __len__(self) -> int: ...

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yield the samples ``start:stop``, some at a time, after the number of the first."""
        ...


def fields_of(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return no samples of each variable (sample, ...), after a check of its dtype."""
    for name, array in arrays.items():
        check_dtype(name, array.dtype)
    # Copies, because a view would keep the rows in memory.
    return {name: array[:0].copy() for name, array in arrays.items()}


def check_field(name: str, field: np.ndarray, first: int, values: np.ndarray) -> None:
    """Check the shape and dtype of values (sample, ...) that begin with sample ``first``."""
    if values.shape[1:] != field.shape[1:]:
        raise ValueError(
            f"expected shape {field.shape[1:]} in variable {name!r}, as sample 0 has, got "
            f"{values.shape[1:]} for sample {first}; try padding='max_length' in a tokenizer, "
            "collate_fn= in td.from_torch, or max_length= in td.from_dataframe"
        )
    # Floating-point values may be rounded, but integers must not overflow.
    casting: Literal["safe", "same_kind"] = "safe" if field.dtype.kind in "biu" else "same_kind"
    if not np.can_cast(values.dtype, field.dtype, casting):
        raise ValueError(
            f"expected dtype {field.dtype} in variable {name!r}, as sample 0 has, got "
            f"{values.dtype} for sample {first}; try one dtype for all samples"
        )


def check_dtype(name: str, dtype: np.dtype[Any], column: str = "") -> None:
    """Check that a variable, or a column of one, has a dtype that models can read."""
    if dtype.kind not in "biufc":
        remedy = "np.unique(values, return_inverse=True)[1] for classes, a name for each nested key"
        if dtype.kind in "mM":
            remedy = "(times - times.min()) / np.timedelta64(1, 'D') for days"
        of, coords = "", f"{{{name!r}: ...}}"
        if column:
            of, coords = f" from column {column!r}", f"[{column!r}]"
        raise TypeError(
            f"expected numbers or booleans in variable {name!r}, got dtype {dtype}{of}; try "
            f"{remedy}, or coords={coords}"
        )


def block_size(chunks: int | Literal["auto"]) -> int:
    """Return how many samples are in a block; see :func:`joined_rows`."""
    is_auto = isinstance(chunks, str) and chunks == "auto"
    return ROWS if is_auto else require_integer("chunks", chunks, 1, remedy="try chunks=512")


def joined_rows(n: int, feature_bytes: int, input_bytes: int = 0) -> int:
    """Return how many samples are in a block of features of ``chunks="auto"``.

    Blocks of 512 samples are joined until features have 16 MB, as long as there are four blocks for
    each task that runs at once, and at least 64, and the inputs of a block have up to 64 MB.

    Parameters
    ----------
    n
        Number of samples.
    feature_bytes, input_bytes
        The bytes of one sample, at one checkpoint.

    Examples
    --------
    >>> joined_rows(10**6, 4 * 2048), joined_rows(10**4, 4 * 2048)
    (2048, 512)
    """
    # So many that threads which are done do not wait long for the last block.
    least_blocks = max(_LEAST_BLOCKS, _BLOCKS_PER_TASK * n_slots())
    wanted = -(-_FEATURE_BYTES // (ROWS * max(feature_bytes, 1)))
    allowed = min(n // (ROWS * least_blocks), _INPUT_BYTES // (ROWS * max(input_bytes, 1)))
    # A multiple of 512, so that blocks are joined as a whole, and no task reads a part of one.
    return ROWS * max(1, min(wanted, allowed))


def require_samples(n: int, what: str) -> None:
    """Reject data without a sample."""
    if n == 0:
        raise ValueError(f"expected at least one sample, got none in {what}")


def read(
    source: Source, start: int, stop: int, names: Collection[str] = ()
) -> dict[str, np.ndarray]:
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


def lazy_fields(source: Source, chunks: int | Literal["auto"]) -> dict[str, xr.Variable]:
    """Build the lazy variables of a source: one read per block serves all variables."""
    size, n = block_size(chunks), len(source)
    # In the names of tasks, which are then the same in every process.
    token = fingerprint(source)
    # One object per block, but with the chunks of the samples, so that blockwise can match them.
    blocks = da.map_blocks(
        _read_block, dask.delayed(source, name=f"dataset-{token}", traverse=False), n, size,
        chunks=da.core.normalize_chunks(size, (n,)), dtype=object, meta=np.empty((0,), object),
        name=f"read-bundle-{token}-{size}",
    )  # fmt: skip
    return unpacked(blocks, source.fields, token, size)


def _read_block(source: Source, n: int, size: int, block_id: tuple[int]) -> dict[str, np.ndarray]:
    start = block_id[0] * size
    return read(source, start, min(start + size, n))


def unpacked(
    blocks: da.Array, fields: Mapping[str, np.ndarray], token: str, size: int
) -> dict[str, xr.Variable]:
    """Return the lazy variables of blocks that are mappings from variables to arrays."""
    variables = {}
    for name, field in fields.items():
        # Axis 0 is that of the samples, which ``blocks`` has; all others are new.
        axes = tuple(range(field.ndim))
        content = content_of(name, token)
        array = da.blockwise(
            take, axes, blocks, axes[:1], name, None,
            new_axes=dict(zip(axes[1:], field.shape[1:], strict=True)), dtype=field.dtype,
            meta=np.empty((0,) * field.ndim, field.dtype),
            name=f"read-{name}-{content}-{size}",
        )  # fmt: skip
        variables[name] = variable_of(name, array, content)
    return variables


def content_of(name: str, token: str) -> str:
    """Return the hash of a variable; all variables of a source share its token."""
    return fingerprint(f"{name} {token}")


def variable_of(name: str, array: da.Array, content: str | None = None) -> xr.Variable:
    """Return a lazy variable (sample, ...), which says the hash of its content if that is known.

    Dask's name of the array stands beside the hash: attributes survive ``isel``, and the hash is
    not that of the rows which are left.
    """
    dims = (SAMPLE, *(f"{name}_dim_{axis}" for axis in range(1, array.ndim)))
    return xr.Variable(dims, array, {} if content is None else {"content": [array.name, content]})


def known_by(token: str, name: str, array: da.Array) -> xr.Variable:
    """Return a variable of another array, so that it, and what is selected from it, are known."""
    content = content_of(name, token)
    named = da.map_blocks(_same, array, name=f"read-{name}-{content}-0", meta=array._meta)
    return variable_of(name, named, content)


def _same(block: np.ndarray) -> np.ndarray:
    return block


def identity_of(variable: xr.Variable) -> str:
    """Return the hash of a variable's content, or Dask's name of its array if it is unknown."""
    name: str = variable.data.name
    known, content = variable.attrs.get("content", (None, ""))
    return str(content) if known == name else name
