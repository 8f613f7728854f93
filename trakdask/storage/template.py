"""A new piece: arrays without chunks, coords with theirs, and a mark while it is being made."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import xarray as xr
import zarr
from zarr.codecs import Crc32cCodec

from trakdask import arrays
from trakdask.errors import StoreMismatchError
from trakdask.estimators import Weights
from trakdask.storage.lease import PREFIX as LEASE
from trakdask.storage.piece import (
    ERROR,
    FEATURE_NAMES,
    GRAM,
    RECORDS,
    SCALE,
    Piece,
)
from trakdask.storage.place import Place, Recorded, checksum
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, VARIABLES

__all__ = [
    "METADATA",
    "TEMPLATE",
    "UNFINISHED",
    "create",
    "inventory",
    "require_place",
    "restore",
]

UNFINISHED = "unfinished"
"""A file of this name among the records says that nothing in the store counts yet."""
TEMPLATE = "template.json"
"""Among the records: every file of the new piece, with its size, checksum and, if JSON, content."""
METADATA = "zarr.json"
_FLAT: dict[str, Any] = {"name": "default", "separator": "."}
"""Chunks lie in one folder, not in one each: a listing on resume takes less than half the time."""


def create(piece: Piece, features: xr.Dataset, kept: Weights | None) -> None:
    """Make the arrays and coords of a piece; what an unfinished attempt left is removed before."""
    features = features.assign_attrs(piece.spec)
    control = piece.place / RECORDS
    control.write(UNFINISHED, b"trakdask is making this store; nothing in it counts yet\n")
    for place in (piece.place, control):
        for name in place.names():
            if name not in (RECORDS, UNFINISHED) and not name.startswith(LEASE):
                place.remove(name)
    store = Recorded(piece.place.zarr())
    zarr.create_group(store, zarr_format=3).create_group(RECORDS)
    write_coords(store, features)
    group = piece.group(store)
    group.attrs.update({**features.attrs, "layout": piece.layout})
    for name in FEATURE_NAMES:
        _create_array(group, piece, features, name, features[name].dtype)
    # Whether failures are recorded or not: a run that raises may be resumed by one that does not.
    _create_array(group, piece, features, ERROR, np.dtypes.StringDType())
    if piece.layout["dtype"] == "float16":
        _create_array(group, piece, features, SCALE, np.dtype("f8"))
    if kept is not None:
        for name in kept.sums:
            dtype = np.result_type(
                arrays.gram.accumulation_dtype(features.sizes[PROJ_DIM]), features.feature.dtype
            )
            _create_array(group, piece, features, name, dtype, kept.attrs(features))
    piece.records.write(TEMPLATE, json.dumps(_inventory(piece, store)).encode())
    control.remove(UNFINISHED)


def write_coords(store: Recorded, features: xr.Dataset) -> None:
    """Write the coords, as xarray encodes them; every chunk, since an absent one is lost."""
    coords = features.coords.to_dataset().drop_attrs(deep=False).drop_encoding()
    coords.to_zarr(store, mode="a", consolidated=False, zarr_format=3, write_empty_chunks=True)


def inventory(place: Place) -> dict[str, Any]:
    """Return the files of the store as it was made, found without its own metadata.

    Raises
    ------
    ValueError
        If there is no such list, or it is damaged.
    """
    for name in (place / RECORDS).names():
        if TEMPLATE in (place / RECORDS / name).names():
            found = dict((place / RECORDS / name).read_json(TEMPLATE))
            for path in found:
                if path.startswith("/") or ".." in path.split("/") or "\\" in path:
                    raise ValueError(f"{TEMPLATE} names {path!r}, outside of {place.url!r}")
            return found
    raise ValueError(f"there is no {TEMPLATE} in {place.url!r}")


def restore(place: Place, path: str) -> None:
    """Write metadata again that was damaged, from the copy among the records."""
    place.write(path, inventory(place)[path]["content"].encode())


def require_place(piece: Piece, group: zarr.Group, kept: Weights) -> None:
    """Refuse a store that has no place for what is to be kept."""
    if GRAM not in group:
        made, needed = "gram=False", "a place for the gram matrices"
    else:
        weights = group[GRAM].attrs.get("gram_weights", "1")
        if weights == kept.gram and all(name in group for name in kept.sums):
            return
        made = f"gram weights {weights!r} and keeps {[n for n in kept.sums if n in group]}"
        needed = f"{kept.gram!r} and {list(kept.sums)}"
    raise StoreMismatchError(
        f"the store {piece.place.url!r} was made with {made}; needed {needed}. Type "
        "td.save(features, store, gram=False), and td.score will reduce them when computed."
    )


def _create_array(
    group: zarr.Group,
    piece: Piece,
    features: xr.Dataset,
    name: str,
    dtype: np.dtype[Any],
    attrs: dict[str, Any] | None = None,
) -> None:
    variable = VARIABLES[name]
    known = {**features.sizes, "proj_dim_1": features.sizes[PROJ_DIM]}
    blocks = {**known, SAMPLE: piece.layout["block"], CHECKPOINT: 1}
    group.create_array(
        name,
        shape=tuple(known[dim] for dim in variable.dims),
        chunks=tuple(max(1, blocks[dim]) for dim in variable.dims),
        dtype=piece.layout["dtype"] if name == "feature" else dtype,
        compressors=[Crc32cCodec()],  # no compression: features do not compress
        chunk_key_encoding=_FLAT,
        fill_value="" if name == ERROR else np.nan,
        dimension_names=variable.dims,
        attributes={**variable.attrs, **(attrs or {})},
    )


def _inventory(piece: Piece, store: Recorded) -> dict[str, Any]:
    """List the files of a new piece; metadata with its text, so that it can be restored."""
    found: dict[str, Any] = {}
    for path in store.written:  # metadata may be written twice
        data = piece.place.read(path)
        found[path] = {"bytes": len(data), "checksum": checksum(data)}
        if path.endswith(METADATA):
            found[path]["content"] = data.decode()
    return found
