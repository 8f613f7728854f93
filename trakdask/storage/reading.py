"""One piece of a store as it is on disk: believed only where it makes sense."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import psutil
import xarray as xr
import zarr

from trakdask.arrays.half import decoded
from trakdask.provenance import STORE_SPEC
from trakdask.storage.piece import ERROR, FEATURE_NAMES, SCALE, SUMS, Piece
from trakdask.storage.place import Complete, Place

__all__ = ["find", "opened", "require_sense", "stored"]

_BLOCKS_AT_MOST = 10**7


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


def stored(piece: Piece, *, complete: bool = True) -> xr.Dataset:
    """Return all that is in a piece, lazy; features in the dtype that they are used in.

    A lost chunk raises when it is read; if it need not be complete, it reads as NaN.
    """
    ds = opened(piece, chunks={}, complete=complete)
    if SCALE in ds:
        feature = ds.feature.copy(data=decoded(ds.feature.data, ds[SCALE].data))
        ds = ds.assign(feature=feature)
    return ds


def opened(piece: Piece, *, chunks: dict[str, int] | None, complete: bool = True) -> xr.Dataset:
    """Return the arrays of a piece as they are on disk."""
    store = piece.place.zarr(read_only=True)
    if complete:
        store = Complete(store, piece.place, _token(piece), may_lack=(ERROR,))
    # A version is named: the older format knows codecs that run code.
    ds: xr.Dataset = xr.open_zarr(store, consolidated=False, chunks=chunks, zarr_format=3)
    return ds


def _token(piece: Piece) -> str:
    """Tell what is there from what was there before, if the store was deleted and made anew."""
    made = os.stat(f"{piece.place.url}/zarr.json").st_mtime_ns if piece.place.is_local else ""
    return f"{piece.digest} {made}"


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


def require_sense(piece: Piece) -> None:
    """Refuse arrays that contradict the layout or could not be held, before anything is made."""
    own = (*FEATURE_NAMES, ERROR, SCALE, *SUMS)
    available = psutil.virtual_memory().available
    for name, of in piece.group().arrays():
        rows = (*of.shape[:1], *of.chunks[:1])
        needed_rows = piece.layout["samples"], piece.layout["block"]
        if name in (*FEATURE_NAMES, ERROR) and rows != needed_rows:
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
