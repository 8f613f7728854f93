"""Why samples failed, in a store: an array of text that holds nothing until something fails."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from trakdask.storage.coords import by_source
from trakdask.storage.piece import ERROR, Piece, array
from trakdask.storage.reading import opened
from trakdask.variables import CHECKPOINT, VARIABLES

__all__ = ["as_variable", "with_errors"]


def as_variable(features: xr.Dataset) -> xr.Dataset:
    """Return features with ``error``, if they have it, among the variables, as featurize has it."""
    return features.reset_coords(ERROR) if ERROR in features.coords else features


def with_errors(ds: xr.Dataset, found: Sequence[Piece]) -> xr.Dataset:
    """Return all samples of a store with the coord ``error``, if any of them failed.

    As a dask array it could not select (``ds.where(ds.error == "", drop=True)``). That of one piece
    is read when it is asked for: in memory it would take longer to open than all other coords. Of
    several, those with failures are read, since arrays that are not cannot be joined.
    """
    if not any(_has_failed(piece) for piece in found):
        return ds
    if len(found) == 1:
        return ds.assign_coords({ERROR: opened(found[0], complete=False)[ERROR].variable})
    names = [str(name) for name in ds[CHECKPOINT].values]
    joined = np.concatenate([_errors(row, names) for row in by_source(found)])
    variable = VARIABLES[ERROR]
    return ds.assign_coords({ERROR: (variable.dims, joined, variable.attrs)})


def _errors(row: Sequence[Piece], names: list[str]) -> np.ndarray:
    """Return the errors of the samples of one source at the named checkpoints."""
    errors = np.full((row[0].layout["samples"], len(names)), "", np.dtypes.StringDType())
    for piece in filter(_has_failed, row):
        found = np.asarray(array(piece.group(), ERROR)[:])
        for column, name in enumerate(piece.spec["checkpoints"]):
            if name in names:
                errors[:, names.index(name)] = found[:, column]
    return errors


def _has_failed(piece: Piece) -> bool:
    return len((piece.place / ERROR).names()) > 1  # beside its metadata
