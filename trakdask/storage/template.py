"""A new piece: arrays without chunks, coords with theirs, and a mark while it is being made."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import xarray as xr
import zarr
from zarr.abc.store import Store
from zarr.codecs import Crc32cCodec

from trakdask import arrays
from trakdask.attribution.estimators import Weights
from trakdask.errors import IncompleteFeaturesError, StoreMismatchError
from trakdask.files import Folder
from trakdask.storage.lease import PREFIX as LEASE
from trakdask.storage.piece import (
    ERROR,
    FEATURE_NAMES,
    GRAM,
    RECORDS,
    SCALE,
    SUMS,
    Piece,
)
from trakdask.storage.zarr_stores import Recorded, checksum, zarr_store
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, VARIABLES

__all__ = [
    "METADATA",
    "TEMPLATE",
    "UNFINISHED",
    "create",
    "inventory",
    "listed",
    "listed_coords",
    "require_place",
    "restore",
    "write_coords",
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
    piece.place.sweep()
    for place in (piece.place, control):
        for name in place.names():
            if name not in (RECORDS, UNFINISHED) and not name.startswith(LEASE):
                place.remove(name)
    store = Recorded(zarr_store(piece.place))
    zarr.create_group(store, zarr_format=3).create_group(RECORDS)
    write_coords(store, features.coords.to_dataset())
    group = piece.group(store)
    group.update_attributes({**features.attrs, "layout": piece.layout})
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


def write_coords(store: Store, coords: xr.Dataset) -> None:
    """Write the coords, as xarray encodes them; every chunk, since an absent one is lost."""
    coords = coords.drop_attrs(deep=False).drop_encoding()
    coords.to_zarr(store, mode="a", consolidated=False, zarr_format=3, write_empty_chunks=True)


def listed(piece: Piece) -> dict[str, list[int]]:
    """Return size and checksum of the files that a piece was made with: metadata and coords.

    Raises
    ------
    IncompleteFeaturesError
        If the list was lost, or is damaged.
    """
    try:
        found = piece.records.read_json(TEMPLATE)
        return {path: [about["bytes"], about["checksum"]] for path, about in found.items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise IncompleteFeaturesError(
            f"expected the list of files {TEMPLATE} among the records of the store "
            f"{piece.place.url!r}, got none that can be read ({type(err).__name__}); try "
            "ds = td.open(store, require_complete=False), and if it looks right, "
            "td.save(ds, new_store)"
        ) from err


def listed_coords(files: Iterable[str]) -> list[str]:
    """Return the names of the coords among the files that a piece was made with."""
    arrays = (path.partition("/") for path in files if path.count("/") == 1)
    names = {folder for folder, _, name in arrays if name == METADATA}
    return sorted(names - {*FEATURE_NAMES, *SUMS, SCALE, ERROR, RECORDS})


def inventory(place: Folder) -> dict[str, Any]:
    """Return the files of the store as it was made, found without its own metadata.

    Raises
    ------
    ValueError
        If there is no such list, or it is damaged.
    """
    for name in (place / RECORDS).names():
        if TEMPLATE in (place / RECORDS / name).names():
            found = (place / RECORDS / name).read_json(TEMPLATE)
            if not isinstance(found, dict) or not all(map(_is_described, found.items())):
                raise ValueError(f"{TEMPLATE} of {place.url!r} is no list of files")
            for path in found:
                if path.startswith("/") or ".." in path.split("/") or "\\" in path:
                    raise ValueError(f"{TEMPLATE} names {path!r}, outside of {place.url!r}")
            return found
    raise ValueError(f"there is no {TEMPLATE} in {place.url!r}")


def _is_described(item: tuple[str, Any]) -> bool:
    path, about = item
    fields = {"bytes", "checksum"} | ({"content"} if path.endswith(METADATA) else set())
    return isinstance(about, dict) and fields <= set(about)


def restore(place: Folder, path: str) -> None:
    """Write metadata again that was damaged, from the copy among the records.

    Raises
    ------
    ValueError
        If the copy is damaged, too.
    """
    known = inventory(place)[path]
    data = known["content"].encode()
    if checksum(data) != known["checksum"]:
        raise ValueError(
            f"expected a copy of {path!r} in the {TEMPLATE} of {place.url!r} as it was written, "
            "got other bytes; try restoring both from a backup"
        )
    place.write(path, data)


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
        f"expected a store with {needed}, got {piece.place.url!r}, which was made with {made}; try "
        "td.save(features, store, gram=False), and td.score will reduce them when computed"
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
