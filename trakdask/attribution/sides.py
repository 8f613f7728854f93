"""The sides of a product: features of samples, or of the parts of samples, which add up to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize

from trakdask.arrays.blocks import divided
from trakdask.provenance import require_comparable
from trakdask.variables import (
    MODULE,
    SAMPLE,
    TOKEN,
    lazy_features,
    may_have_failed,
    validate,
)

__all__ = ["Side", "part_dim", "per_part", "sides"]

_PARTS = (TOKEN, MODULE)

_MOST_TARGETS = 4096
"""In a block. More would make large tiles, of which a selection of targets needs little."""


@dataclass(frozen=True)
class Side:
    """Features of one side of a product, with lazy arrays.

    Attributes
    ----------
    ds
        The features, of samples or of their parts.
    part
        The dimension of the parts of samples; None if the features are of whole samples.
    may_have_failed
        Whether some of the samples have failed, or may fail when they are computed.
    """

    ds: xr.Dataset
    part: str | None = None
    may_have_failed: bool = False

    def rows(self) -> da.Array:
        """Return the features of all parts in order, (sample * part, proj_dim, checkpoint).

        Features of whole samples are returned as they are.
        """
        data: da.Array = self.ds["feature"].data
        if self.part is None:
            return data
        n = data.shape[1]
        flat: da.Array = da.map_blocks(
            _merged, data, drop_axis=1,
            chunks=(tuple(size * n for size in data.chunks[0]), *data.chunks[2:]),
            dtype=data.dtype, meta=np.empty((0, 0, 0), data.dtype),
            name=f"rows-{tokenize(data.name)}",
        )  # fmt: skip
        return flat

    def whole(self) -> da.Array:
        """Return the features of whole samples, (sample, proj_dim, checkpoint)."""
        data: da.Array = self.ds["feature"].data
        return data if self.part is None else data.sum(axis=1, dtype=data.dtype)

    def spread(self, values: da.Array) -> da.Array:
        """Repeat a value of each sample for all of its parts, (sample * part, ...)."""
        if self.part is None:
            return values
        n = self.ds.sizes[self.part]
        repeated: da.Array = da.map_blocks(
            np.repeat, values, n, axis=0,
            chunks=(tuple(size * n for size in values.chunks[0]), *values.chunks[1:]),
            dtype=values.dtype, name=f"spread-{tokenize(values.name, n)}",
        )  # fmt: skip
        return repeated


def _merged(block: np.ndarray) -> np.ndarray:
    return block.reshape(-1, *block.shape[2:])


def sides(
    features: xr.Dataset, targets: xr.Dataset, of: xr.Dataset | None = None
) -> tuple[Side, Side, Side]:
    """Check the features that scores are made of, and return them as sides.

    Parameters
    ----------
    features
        Features of all training samples.
    targets
        Features of targets, or of their parts.
    of
        Features of what is scored, if that is not all training samples.

    Returns
    -------
    training, explained, scored
        The sides of ``features``, of ``targets`` and of ``of``.

    Raises
    ------
    TypeError, ValueError
        If variables are missing, or have other dimensions or chunks.
    StoreMismatchError
        If they were made differently.
    """
    validate(features, ["feature", "out_to_loss"], what="features")
    part = _required(targets, ["feature"], what="targets")
    require_comparable(features, targets)
    if of is not None:
        part_of = _required(of, ["feature", "out_to_loss"], what="of")
        require_comparable(features, of, name="parts'")
    training = Side(lazy_features(features))
    explained = Side(_in_blocks(_lazy(targets, part), part), part, may_have_failed(targets))
    return training, explained, training if of is None else Side(_lazy(of, part_of), part_of)


def part_dim(ds: xr.Dataset) -> str | None:
    """Return the dimension of the parts of samples; None if the features are of whole samples."""
    if "feature" not in ds:
        return None
    return next((dim for dim in _PARTS if dim in ds["feature"].dims), None)


def _required(ds: xr.Dataset, names: list[str], *, what: str) -> str | None:
    """Check that a Dataset has features, and other variables; return the dimension of parts."""
    dim = part_dim(ds) if isinstance(ds, xr.Dataset) else None
    if dim is None:
        validate(ds, names, what=what)
        return None
    feature = ds["feature"].variable
    if feature.dims[:2] != (SAMPLE, dim):
        raise ValueError(
            f"expected 'feature' of {what} with the dimensions sample and {dim} first, got "
            f"{feature.dims}; try ds.transpose('sample', {dim!r}, ...)"
        )
    if len(chunks := feature.chunksizes.get(dim, ())) > 1:
        raise ValueError(
            f"expected 'feature' of {what} in one chunk along {dim!r}, got {chunks}; try "
            f"ds.chunk({{{dim!r}: -1}})"
        )
    validate(ds.isel({dim: 0}), names, what=what)
    return dim


def _lazy(ds: xr.Dataset, part: str | None) -> xr.Dataset:
    """Return lazy features, as :func:`lazy_features` does; coords of parts stay as they are."""
    if part is None:
        return lazy_features(ds)
    kept = {name: coord for name, coord in ds.coords.items() if part in coord.dims}
    return lazy_features(ds.drop_vars(list(kept))).assign_coords(kept)


def _in_blocks(targets: xr.Dataset, part: str | None) -> xr.Dataset:
    """Divide blocks of targets that have more than 4096 rows."""
    feature = targets["feature"].variable
    most = max(1, _MOST_TARGETS // (targets.sizes[part] if part else 1))
    sizes = feature.chunksizes[SAMPLE]
    if max(sizes, default=0) <= most:
        return targets
    return targets.assign(feature=feature.chunk({SAMPLE: divided(sizes, most)}))


def per_part(data: da.Array, *sides: Side) -> da.Array:
    """Split the rows of each side, an axis of ``data``, into samples and their parts."""
    for axis, side in reversed(list(enumerate(sides))):
        if side.part is not None:
            data = _split_axis(data, axis, side.ds.sizes[side.part])
    return data


def _split_axis(data: da.Array, axis: int, n: int) -> da.Array:
    sizes = tuple(size // n for size in data.chunks[axis])
    chunks: Any = (*data.chunks[:axis], sizes, n, *data.chunks[axis + 1 :])
    apart: da.Array = da.map_blocks(
        _split, data, axis, n,
        new_axis=axis + 1, chunks=chunks,
        dtype=data.dtype, meta=np.empty((0,) * (data.ndim + 1), data.dtype),
        name=f"per-part-{tokenize(data.name, axis, n)}",
    )  # fmt: skip
    return apart


def _split(block: np.ndarray, axis: int, n: int) -> np.ndarray:
    return block.reshape(*block.shape[:axis], -1, n, *block.shape[axis + 1 :])
