"""Saved features as a lazy Dataset."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from trakdask.errors import IncompleteFeaturesError
from trakdask.estimators import with_origin
from trakdask.storage.drops import latest
from trakdask.storage.failures import with_errors
from trakdask.storage.parts import DROPPED, assembled, pieces
from trakdask.storage.piece import FEATURE_NAMES, GRAM, RECORDS, SUMS, Piece
from trakdask.storage.place import Place
from trakdask.storage.reading import require_sense
from trakdask.storage.runs import runs
from trakdask.storage.template import UNFINISHED
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
        If blocks are missing; when it is computed, if the file of a block has been lost since.
    ValueError
        If its metadata make no sense, or coords or blocks would not fit in memory.
    """
    place = Place.at(store, storage_options)
    found = pieces(place)
    if require_complete:
        _require_complete(found)
    for piece in found:
        require_sense(piece)
    ds = assembled(found, latest(place), complete=require_complete)
    names = [name for name in (*FEATURE_NAMES, *SUMS) if name in ds]
    ds = with_errors(load_coords(ds[names]), found)
    ds = with_origin(_without_dropped(ds, show=dropped))
    return ds.assign_attrs(saved=runs(found))


def _without_dropped(ds: xr.Dataset, *, show: bool) -> xr.Dataset:
    if DROPPED not in ds.coords:
        return (
            ds.assign_coords({DROPPED: (SAMPLE, np.zeros(ds.sizes[SAMPLE], bool))}) if show else ds
        )
    if show:
        return ds.drop_vars(SUMS, errors="ignore")
    return ds.isel({SAMPLE: np.flatnonzero(~ds[DROPPED].values)}).drop_vars(DROPPED)


def _require_complete(found: Sequence[Piece]) -> None:
    counts = [_count(piece) for piece in found]
    done, total = (sum(numbers) for numbers in zip(*counts, strict=True))
    if done < total:
        url, (first_done, first_total) = found[0].place.url, counts[0]
        is_append = first_done == first_total
        which = "; those that lack were to be appended" if is_append else ""
        append = ", append_dim=..." if is_append else ""
        raise IncompleteFeaturesError(
            f"the store {url!r} has {done} of {total} blocks{which}; needed all, since the "
            f"rest reads as NaN. Type td.save(features, {url!r}{append}) to compute what is "
            "missing, or td.open(store, require_complete=False) to look at it."
        )


def _count(piece: Piece) -> tuple[int, int]:
    """Return how many blocks are complete, and how many there should be."""
    total = len(piece.checkpoints) * (piece.n_blocks + (GRAM in piece.group()))
    is_unfinished = UNFINISHED in (piece.place / RECORDS).names()
    return 0 if is_unfinished else piece.count_done(), total
