"""Saved features as a lazy Dataset."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import psutil
import xarray as xr
import zarr

from trakdask.arrays.half import decoded
from trakdask.errors import IncompleteFeaturesError
from trakdask.locations import location
from trakdask.provenance import STORE_SPEC
from trakdask.storage.piece import FEATURE_NAMES, GRAM, LOSS_GRADIENT, RECORDS, SCALE, SUMS, Piece
from trakdask.storage.place import Place
from trakdask.storage.runs import runs
from trakdask.storage.template import UNFINISHED
from trakdask.variables import load_coords

__all__ = ["find", "open", "stored"]

_BLOCKS_AT_MOST = 10**7


def open(
    store: str | os.PathLike[str],
    *,
    require_complete: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Open saved features as a lazy Dataset; metadata coords are loaded, arrays are not.

    Parameters
    ----------
    store
        Folder or fsspec URL that :func:`save` wrote.
    require_complete
        Refuse a store that lacks blocks: they would read as NaN.
    storage_options
        Given to fsspec with a URL, as xarray does.

    Returns
    -------
    Dataset with ``feature`` (sample, proj_dim, checkpoint), ``output`` and ``out_to_loss`` (sample,
    checkpoint) and, if saved, ``gram`` (proj_dim, proj_dim_1, checkpoint) and ``loss_gradient``
    (proj_dim, checkpoint); ``sample`` has no index. Its ``attrs`` say how the features were made
    (hashes of weights, source, projector, parameters, task, precision, versions) and, in ``saved``,
    when, by how many hosts, and in how many runs.

    Raises
    ------
    FileNotFoundError
        If there is no such store.
    IncompleteFeaturesError
        If blocks are missing.
    ValueError
        If its metadata make no sense, or coords or blocks would not fit in memory.
    """
    piece = find(Place(location(store), storage_options or {}))
    if require_complete:
        _require_complete(piece)
    _require_sense(piece)
    ds = stored(piece)
    names = [name for name in (*FEATURE_NAMES, GRAM, LOSS_GRADIENT) if name in ds]
    return load_coords(ds[names]).assign_attrs(saved=runs(piece))


def find(place: Place) -> Piece:
    """Return the piece that is at a place, as its metadata tell."""
    try:
        group = zarr.open_group(place.zarr(read_only=True), mode="r", zarr_format=3)
    except (FileNotFoundError, KeyError, ValueError) as err:
        names = place.names()
        if names:
            raise FileNotFoundError(
                f"{place.url!r} holds {names[:5]} and no readable zarr v3 group; needed a folder "
                "that td.save wrote. Check the path; if it is one, type td.verify(store)."
            ) from err
        raise FileNotFoundError(
            f"there is no store {place.url!r}; needed a folder that td.save wrote. Check the path."
        ) from err
    if "layout" not in group.attrs:
        raise FileNotFoundError(
            f"{place.url!r} is a zarr store without features; needed one that td.save wrote. "
            "Open other zarr stores with xarray.open_zarr."
        )
    attrs = dict(group.attrs)
    found = {name: attrs[name] for name in STORE_SPEC if name in attrs}
    layout: Any = attrs["layout"]
    _require_plain(place, found, layout)
    return Piece(place, found, layout)


def _require_plain(place: Place, described: Mapping[str, Any], layout: Any) -> None:
    """Refuse numbers that are none: names of folders and sizes of loops are made of them."""
    ids = described.get("checkpoint_ids")
    if isinstance(ids, Mapping) and isinstance(layout, Mapping):
        numbers = [*ids.values(), layout.get("samples"), layout.get("block")]
        is_plain = all(type(number) is int and number >= 0 for number in numbers)
        if is_plain and layout["samples"] <= _BLOCKS_AT_MOST * max(layout["block"], 1):
            return
    raise ValueError(
        f"the store {place.url!r} says checkpoint_ids={ids!r:.60} and layout={layout!r:.60}; "
        f"needed whole numbers, and no more than {_BLOCKS_AT_MOST:,} blocks. Its metadata are "
        "damaged: type td.verify(store)."
    )


def stored(piece: Piece) -> xr.Dataset:
    """Return all that is in a piece, lazy; features in the dtype that they are used in."""
    # A version is named: the older format knows codecs that run code.
    store = piece.place.url if piece.place.is_local else piece.place.zarr(read_only=True)
    ds: xr.Dataset = xr.open_zarr(store, consolidated=False, chunks={}, zarr_format=3)
    if SCALE in ds:
        feature = ds.feature.copy(data=decoded(ds.feature.data, ds[SCALE].data))
        ds = ds.assign(feature=feature)
    return ds


def _require_complete(piece: Piece) -> None:
    has_gram = GRAM in piece.group()
    total = len(piece.checkpoints) * (piece.n_blocks + has_gram)
    is_unfinished = UNFINISHED in (piece.place / RECORDS).names()
    if (done := 0 if is_unfinished else piece.count_done()) < total:
        url = piece.place.url
        raise IncompleteFeaturesError(
            f"the store {url!r} has {done} of {total} blocks; needed all, since the rest "
            f"reads as NaN. Type td.save(features, {url!r}) to compute what is missing, or "
            "td.open(store, require_complete=False) to look at it."
        )


def _require_sense(piece: Piece) -> None:
    """Refuse arrays that contradict the layout or could not be held, before anything is made."""
    own = (*FEATURE_NAMES, SCALE, *SUMS)
    available = psutil.virtual_memory().available
    for name, of in piece.group().arrays():
        rows = of.shape[0], of.chunks[0]
        needed_rows = piece.layout["samples"], piece.layout["block"]
        if name in FEATURE_NAMES and rows != needed_rows:
            raise ValueError(
                f"{name!r} of the store {piece.place.url!r} has (samples, samples per block) "
                f"{rows}; needed {needed_rows}. Its metadata are damaged: type td.verify(store)."
            )
        held = of.chunks if name in own else of.shape  # coords are loaded as a whole
        needed = math.prod(held) * of.dtype.itemsize
        if needed > available or of.nchunks > _BLOCKS_AT_MOST:
            raise ValueError(
                f"{name!r} of the store {piece.place.url!r} takes {needed:,} bytes and "
                f"{of.nchunks:,} chunks; needed no more than the {available:,} bytes that are free "
                f"and {_BLOCKS_AT_MOST:,} chunks. Open it on a larger machine; if the numbers are "
                "absurd, its metadata are damaged: type td.verify(store)."
            )
