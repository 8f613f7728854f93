"""Saved features as a lazy Dataset."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from trakdask.attribution.matrices import with_origin
from trakdask.errors import UnfinishedAppendWarning
from trakdask.files import Folder
from trakdask.storage.coords import DROPPED
from trakdask.storage.factors import with_factors
from trakdask.storage.failures import with_errors
from trakdask.storage.parts import assembled
from trakdask.storage.piece import FEATURE_NAMES, SUMS
from trakdask.storage.reading import require_sense
from trakdask.storage.runs import runs
from trakdask.storage.state import state
from trakdask.variables import SAMPLE, load_coords

__all__ = ["open"]


def open(
    store: str | os.PathLike[str],
    *,
    require_complete: bool = True,
    dropped: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Open saved features as a lazy Dataset; metadata coords are loaded, arrays are not.

    Parameters
    ----------
    store
        Folder or fsspec URL that :func:`save` wrote.
    require_complete
        Refuse a store that lacks blocks: they would read as NaN.
    dropped
        Show the samples that :func:`drop` left out, too, marked by the coord ``dropped``; without
        the sums that do not cover them.
    storage_options
        Given to fsspec with a URL, as xarray does.

    Returns
    -------
    Dataset with ``feature`` (sample, proj_dim, checkpoint), ``output`` and ``out_to_loss`` (sample,
    checkpoint) and, if saved, ``gram`` (proj_dim, proj_dim_1, checkpoint) and ``loss_gradient``
    (proj_dim, checkpoint); if samples failed, the coord ``error`` (sample, checkpoint) says why, ""
    where they did not. ``sample`` has no index. Its ``attrs`` say how the features were made
    (hashes of weights, source, projector, parameters, task, precision, versions) and, in ``saved``,
    when, by how many hosts, on what devices, by what kernels, and in how many runs.

    Raises
    ------
    FileNotFoundError
        If there is no such store.
    IncompleteFeaturesError
        If blocks or coords are missing; when it is computed, if the file of a block has been lost
        since.
    ValueError
        If its metadata make no sense, coords or blocks would not fit in memory, or the bytes of
        metadata or coords are not those that were written; when it is computed, if those of a block
        are not.

    Warns
    -----
    UnfinishedAppendWarning
        If an append was cut short, or goes on in another process: what is shown is the store as it
        was before, and the warning says how to finish it.
    """
    for name, value in {"require_complete": require_complete, "dropped": dropped}.items():
        if not isinstance(value, bool):
            raise TypeError(f"expected {name}=True or False, got {value!r:.60}; try {name}=True")
    place = Folder.at(store, storage_options)
    found = state(place, require_complete=require_complete)
    if found.unfinished and require_complete:
        text = (
            f"expected no unfinished append in the store {place.url!r}, which is shown as it was "
            f"before: {found.unfinished}"
        )
        warnings.warn(text, UnfinishedAppendWarning, stacklevel=2)
    for piece in found.shown:
        require_sense(piece, complete=require_complete)
    ds = assembled(
        found.shown, found.checkpoints, found.drop, found.assigned, complete=require_complete
    )
    names = [name for name in (*FEATURE_NAMES, *SUMS) if name in ds]
    ds = with_errors(load_coords(ds[names]), found.shown)
    ds = _without_dropped(ds, show=dropped)
    ds = with_origin(with_factors(place, ds))
    return ds.assign_attrs(saved=runs(found.shown))


def _without_dropped(ds: xr.Dataset, *, show: bool) -> xr.Dataset:
    if DROPPED not in ds.coords:
        return (
            ds.assign_coords({DROPPED: (SAMPLE, np.zeros(ds.sizes[SAMPLE], bool))}) if show else ds
        )
    if show:
        return ds.drop_vars(SUMS, errors="ignore")
    return ds.isel({SAMPLE: np.flatnonzero(~ds[DROPPED].values)}).drop_vars(DROPPED)
