"""Why samples failed, in a store: an array of text that holds nothing until something fails."""

from __future__ import annotations

from collections.abc import Callable

import xarray as xr
import zarr

from trakdask.variables import VARIABLES

__all__ = ["ERROR", "as_coord", "as_variable", "ensure_array"]

ERROR = "error"


def as_variable(features: xr.Dataset) -> xr.Dataset:
    """Return features with ``error``, if they have it, among the variables, as featurize has it."""
    return features.reset_coords(ERROR) if ERROR in features.coords else features


def ensure_array(group: zarr.Group, block: int) -> None:
    """Make room for ``error`` beside ``output`` (sample, checkpoint), if there is none.

    A chunk that is not there reads as "": nothing failed. So blocks that were stored before, when
    failures were raised, need no change.
    """
    if ERROR in group:
        return
    variable = VARIABLES[ERROR]
    group.create_array(
        ERROR,
        shape=group["output"].shape,  # type: ignore[union-attr]
        chunks=(block, 1),
        dtype="string",
        fill_value="",
        compressors=None,
        dimension_names=variable.dims,
        attributes=dict(variable.attrs),
    )


def as_coord(ds: xr.Dataset, unchunked: Callable[[], xr.Dataset]) -> xr.Dataset:
    """Return an opened store with ``error`` as a coord that is read when it is asked for.

    As a dask array it could not select (``ds.where(ds.error == "", drop=True)``); in memory it
    would take longer to open than all other coords.

    Parameters
    ----------
    ds
        The store, opened in chunks.
    unchunked
        Opens it without.
    """
    if ERROR not in ds:
        return ds
    return ds.drop_vars(ERROR).assign_coords({ERROR: unchunked()[ERROR].variable})
