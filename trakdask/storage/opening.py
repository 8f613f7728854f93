"""Saved features as a lazy Dataset."""

from __future__ import annotations

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
from trakdask.storage.piece import FEATURE_NAMES, GRAM, LOSS_GRADIENT, RECORDS, SCALE, Piece
from trakdask.storage.place import Place
from trakdask.storage.template import UNFINISHED
from trakdask.variables import SAMPLE, load_coords

__all__ = ["find", "open", "stored"]


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
    (proj_dim, checkpoint); ``sample`` has no index.

    Raises
    ------
    FileNotFoundError
        If there is no such store.
    IncompleteFeaturesError
        If blocks are missing.
    """
    piece = find(Place(location(store), storage_options or {}))
    if require_complete:
        _require_complete(piece)
    ds = stored(piece)
    _require_memory(piece, ds)
    names = [name for name in (*FEATURE_NAMES, GRAM, LOSS_GRADIENT) if name in ds]
    return load_coords(ds[names])


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
    return Piece(place, found, layout)


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


def _require_memory(piece: Piece, ds: xr.Dataset) -> None:
    """Refuse what could not be held, by its metadata, before anything is allocated."""
    samples, found = piece.layout["samples"], ds.sizes.get(SAMPLE)
    if samples != found:
        raise ValueError(
            f"the store {piece.place.url!r} has {found} samples and says {samples}; needed the "
            "same. Its metadata are damaged: type td.verify(store)."
        )
    needed = {str(name): coord.nbytes for name, coord in ds.coords.items()}
    for name, variable in ds.variables.items():
        if variable.chunks is not None:
            block = variable.dtype.itemsize
            for sizes in variable.chunks:
                block *= max(sizes)
            needed[f"a block of {name}"] = block
    available = psutil.virtual_memory().available
    name = max(needed, key=needed.__getitem__)
    if needed[name] > available:
        raise ValueError(
            f"{name} of the store {piece.place.url!r} takes {needed[name]:,} bytes; needed no more "
            f"than the {available:,} that are free. Open it on a larger machine; if the number is "
            "absurd, its metadata are damaged: type td.verify(store)."
        )
