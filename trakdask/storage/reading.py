"""One piece of a store as it is on disk: believed only where it makes sense."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import psutil
import xarray as xr
import zarr
from dask.base import tokenize
from zarr.abc.store import Store

from trakdask.arrays.half import decoded
from trakdask.errors import IncompleteFeaturesError
from trakdask.files import Folder
from trakdask.provenance import STORE_SPEC
from trakdask.storage.piece import BESIDE, ERROR, FEATURE_NAMES, SCALE, SUMS, Piece, array
from trakdask.storage.template import listed
from trakdask.storage.zarr_stores import Complete, zarr_store

__all__ = ["find", "opened", "require_sense", "stored"]

_BLOCKS_AT_MOST = 10**7


def find(place: Folder) -> Piece:
    """Return the piece that is at a place, as its metadata tell."""
    try:
        group = zarr.open_group(zarr_store(place, read_only=True), mode="r", zarr_format=3)
    except (FileNotFoundError, KeyError, ValueError) as err:
        raise FileNotFoundError(_no_store(place)) from err
    if "layout" not in group.attrs:
        raise FileNotFoundError(
            f"expected a store that td.save wrote, got the zarr store {place.url!r} without "
            "features; try xarray.open_zarr(store)"
        )
    attrs = dict(group.attrs)
    found = {name: attrs[name] for name in STORE_SPEC if name in attrs}
    layout: Any = attrs["layout"]
    _require_plain(place, found, layout)
    return Piece(place, found, layout)


def _no_store(place: Folder) -> str:
    names = place.names()
    if not names:
        return (
            f"expected a folder that td.save wrote, but there is no store {place.url!r}; try "
            "another path"
        )
    if {".zgroup", ".zarray", ".zmetadata"} & set(names):
        return (
            f"expected a folder that td.save wrote, got {place.url!r} in the older zarr format 2; "
            "try xarray.open_zarr(store), or another path"
        )
    return (
        f"expected a folder that td.save wrote, got {place.url!r} with {names[:5]} and no readable "
        "zarr v3 group; try another path, or td.verify(store) if it was one"
    )


def stored(piece: Piece, *, complete: bool = True, without: Collection[str] = ()) -> xr.Dataset:
    """Return features and sums of a piece, lazy; features in the dtype that they are used in.

    A lost chunk raises when it is read; if it need not be complete, it reads as NaN.
    """
    ds = opened(piece, complete=complete, without=without)
    token = tokenize(piece.place.url, _token(piece), complete)
    lazy = {
        name: ds[name].variable.chunk(
            ds[name].encoding["preferred_chunks"], name=f"open-{name}-{token}"
        )
        for name in (*FEATURE_NAMES, SCALE, *SUMS)
        if name in ds
    }
    ds = ds.drop_vars(list(ds.data_vars)).assign(lazy)
    if SCALE in ds:
        feature = ds.feature.copy(data=decoded(ds.feature.data, ds[SCALE].data))
        ds = ds.drop_vars(SCALE).assign(feature=feature)
    return ds


def opened(piece: Piece, *, complete: bool = True, without: Collection[str] = ()) -> xr.Dataset:
    """Return the arrays of a piece as they are on disk, but those that are named.

    Nothing is read yet. If it is to be complete, files that were changed or lost raise when they
    are.
    """
    store: Store = piece.arrays()
    if complete:
        known = listed(piece)
        store = Complete(store, piece.place, _token(piece), may_lack=(ERROR,), known=known)
    # A version is named: the older format knows codecs that run code.
    ds: xr.Dataset = xr.open_zarr(
        store, consolidated=False, chunks=None, zarr_format=3, drop_variables=list(without)
    )
    return ds


def _token(piece: Piece) -> str:
    """Tell what is there from what was there before, if the store was deleted and made anew."""
    made = os.stat(f"{piece.place.url}/zarr.json").st_mtime_ns if piece.place.is_local else ""
    return f"{piece.digest} {made}"


def _require_plain(place: Folder, described: Mapping[str, Any], layout: Any) -> None:
    """Refuse numbers that are none: names of folders and sizes of loops are made of them."""
    ids = described.get("checkpoint_ids")
    if isinstance(ids, Mapping) and isinstance(layout, Mapping):
        numbers = [*ids.values(), layout.get("samples"), layout.get("block")]
        is_plain = all(type(number) is int and number >= 0 for number in numbers)
        if is_plain and layout["samples"] <= _BLOCKS_AT_MOST * max(layout["block"], 1):
            return
    raise ValueError(
        f"expected whole numbers in the metadata of the store {place.url!r}, and no more than "
        f"{_BLOCKS_AT_MOST:,} blocks, got checkpoint_ids={ids!r:.60} and layout={layout!r:.60}; "
        "they are damaged: try td.verify(store)"
    )


def require_sense(piece: Piece, *, complete: bool = True) -> None:
    """Refuse arrays that contradict the layout or could not be held, before anything is made.

    And, if it is to be complete, a piece whose metadata are not those that were written.
    """
    url, own = piece.place.url, (*FEATURE_NAMES, ERROR, SCALE, *SUMS)
    available = psutil.virtual_memory().available
    for name, of in _arrays(piece, complete):
        rows = (*of.shape[:1], *of.chunks[:1])
        needed_rows = piece.layout["samples"], piece.layout["block"]
        if name in (*FEATURE_NAMES, ERROR) and rows != needed_rows:
            raise ValueError(
                f"expected {name!r} of the store {url!r} to have (samples, samples per block) "
                f"{needed_rows}, got {rows}; its metadata are damaged: try td.verify(store)"
            )
        held = of.chunks if name in own else of.shape  # coords are loaded as a whole
        needed = math.prod(held) * of.dtype.itemsize
        if needed > available or of.nchunks > _BLOCKS_AT_MOST:
            raise ValueError(
                f"expected {name!r} of the store {url!r} to take at most the {available:,} bytes "
                f"that are free, in {_BLOCKS_AT_MOST:,} chunks, got {needed:,} bytes and "
                f"{of.nchunks:,} chunks; try a larger machine, or td.verify(store) if the numbers "
                "are absurd: then its metadata are damaged"
            )


def _arrays(piece: Piece, complete: bool) -> Iterator[tuple[str, zarr.Array[Any]]]:
    store: Store = piece.arrays()
    names = set(piece.place.names()) - BESIDE
    if complete:
        known = listed(piece)
        store = Complete(store, piece.place, known=known)
        names = {path.partition("/")[0] for path in known if path.count("/") == 1} - BESIDE
    group = zarr.open_group(store, mode="r", zarr_format=3)
    for name in sorted(names):
        with suppress(KeyError):  # a file, or a foreign folder
            yield name, _array(group, name, piece)


def _array(group: zarr.Group, name: str, piece: Piece) -> zarr.Array[Any]:
    try:
        return array(group, name)
    except (IncompleteFeaturesError, KeyError):
        raise
    except Exception as err:
        raise ValueError(
            f"expected the metadata of {name!r} in the store {piece.place.url!r} as they were "
            f"written, got what cannot be read ({err}); try td.verify(store, repair=True)"
        ) from err
