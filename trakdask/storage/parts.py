"""Pieces of one store: what was appended lies beside the first, and opens as one Dataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, Literal

import dask.array as da
import numpy as np
import xarray as xr
import zarr

from trakdask.errors import IncompleteFeaturesError, StoreMismatchError
from trakdask.provenance import PRECISION, digest, require_same
from trakdask.storage.drops import Drop, latest
from trakdask.storage.piece import (
    ERROR,
    FEATURE_NAMES,
    GRAM,
    LOSS_GRADIENT,
    RECORDS,
    SCALE,
    SUMS,
    Piece,
    array,
)
from trakdask.storage.place import Place
from trakdask.storage.reading import find, stored
from trakdask.storage.template import UNFINISHED
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, VARIABLES

__all__ = [
    "DROPPED",
    "PARTS",
    "AppendDim",
    "appended",
    "assembled",
    "by_source",
    "dropped_rows",
    "pieces",
    "places",
]

PARTS = "parts"
AppendDim = Literal["sample", "checkpoint"]

DROPPED = "dropped"
_FORMULA = {GRAM: "gram_weights", LOSS_GRADIENT: "loss_weights"}
_POOLED = "pooled_checkpoints"
_BY_CHECKPOINT = ("checkpoints", "checkpoint_ids")
_SAME = ("projector", "parameters", "task", *PRECISION)


def pieces(place: Place) -> list[Piece]:
    """Return the pieces of a store, the first of them at its root."""
    return [find(each) for each in places(place)]


def places(place: Place) -> list[Place]:
    """Return where the pieces of a store are; one that is being made is not there yet."""
    names = sorted((name for name in (place / PARTS).names() if name.isdigit()), key=int)
    parts = [place / PARTS / name for name in names]
    return [place, *(part for part in parts if _is_made(part))]


def appended(
    place: Place, piece: Piece, features: xr.Dataset, append_dim: AppendDim
) -> tuple[Piece, xr.Dataset]:
    """Return where features belong that are appended, and those of them that are not there.

    An earlier piece that is to be resumed, or a new one.

    Raises
    ------
    StoreMismatchError
        If they differ from the store in more than they may; the field is named.
    """
    found = pieces(place)
    if append_dim == CHECKPOINT:
        piece, features = _without_known(piece, features, found)
    for old in found:
        if old.digest == piece.digest:
            return old, features
    own = [old for old in found if old.spec.get("source") == piece.spec.get("source")]
    _refuse_known(piece, own, append_dim)
    if append_dim == SAMPLE:
        needed, names = _with_checkpoints(found), (*_SAME, *_BY_CHECKPOINT)
    else:
        needed, names = _with_checkpoints(own or found), (*_SAME, "source", "layout")
    what = f"these features and the store {place.url!r}"
    require_same(_described(piece), _described(needed), what=what, names=names)
    _require_variables(features, found[0])
    zarr.open_group(place.zarr(), mode="r+", zarr_format=3).require_group(PARTS)
    return Piece(place / PARTS / str(len(found)), piece.spec, piece.layout), features


def _refuse_known(piece: Piece, own: Sequence[Piece], append_dim: AppendDim) -> None:
    """Refuse features of which a part is there already, and which are not what it resumes."""
    names = set(piece.spec["checkpoints"])
    known = [old for old in own if append_dim == SAMPLE or names & set(old.spec["checkpoints"])]
    if known:
        source, old = f"{piece.spec.get('source')!r:.60}", known[0]
        raise StoreMismatchError(
            f"{old.place.url!r} has samples of the source {source} at the checkpoints "
            f"{list(old.spec['checkpoints'])} in {old.layout}; needed the same to go on with them, "
            "or others to append. Type append_dim='sample' with other samples "
            "(samples.attrs['source']), or append_dim='checkpoint' with other checkpoints."
        )


def _require_variables(features: xr.Dataset, first: Piece) -> None:
    group = first.group()
    ours = {str(name) for name, coord in features.coords.items() if SAMPLE in coord.dims}
    theirs = {n for n, _ in group.arrays()} - {*FEATURE_NAMES, *SUMS, SCALE, ERROR, CHECKPOINT}
    if ours != theirs:
        raise StoreMismatchError(
            f"these features have the coords {sorted(ours)} and the store {first.place.url!r} "
            f"{sorted(theirs)}; needed the same. Type features.assign_coords(...) or "
            f"features.drop_vars({sorted(ours - theirs)})."
        )
    width, needed = features.sizes[PROJ_DIM], array(group, "feature").shape[1]
    if width != needed:
        raise StoreMismatchError(
            f"these features have proj_dim {width} and the store {first.place.url!r} {needed}; "
            "needed the same. Featurize with the projector of the store."
        )


def assembled(
    found: Sequence[Piece], drop: Drop | None = None, *, complete: bool = True
) -> xr.Dataset:
    """Return the pieces of a store as one lazy Dataset; a coord ``dropped`` marks samples."""
    if len(found) == 1 and drop is None:
        return stored(found[0], complete=complete)
    names = list(_with_checkpoints(found).spec["checkpoints"])
    rows = [_row(row, names, complete) for row in by_source(found)]
    ds = _concat([row[list(FEATURE_NAMES)] for row in rows], SAMPLE) if len(rows) > 1 else rows[0]
    ds = ds[list(FEATURE_NAMES)].assign_attrs(
        source=" + ".join(str(row.attrs.get("source")) for row in rows),
        layout={**found[0].layout, "samples": ds.sizes[SAMPLE]},
    )
    own = found if drop is None else found[drop.attrs["pieces"] :]
    summed = [stored(piece, complete=complete) for piece in own]
    if drop is not None:
        mask = drop.mask(ds.sizes[SAMPLE])
        ds = ds.assign_coords({DROPPED: (SAMPLE, mask)})
        packed = np.packbits(mask).tobytes().hex()
        ds.attrs["source"] += f" without {digest({'dropped': packed})[:16]}"
        summed.append(drop.sums())
    n_dropped = int(ds[DROPPED].sum()) if drop is not None else 0
    about = {"samples": ds.sizes[SAMPLE] - n_dropped, "source": ds.attrs["source"]}
    sums = {name: _sum(name, summed, names) for name in SUMS}
    return ds.assign({n: v.assign_attrs(about) for n, v in sums.items() if v is not None})


def dropped_rows(place: Place, piece: Piece) -> np.ndarray:
    """Return which samples of a piece the store leaves out."""
    rows = by_source(pieces(place))
    sizes = [row[0].layout["samples"] for row in rows]
    sources = [row[0].spec.get("source") for row in rows]
    start = sum(sizes[: sources.index(piece.spec.get("source"))])
    drop = latest(place)
    if drop is None:
        return np.zeros(piece.layout["samples"], bool)
    return drop.mask(sum(sizes))[start : start + piece.layout["samples"]]


def _is_made(place: Place) -> bool:
    control = (place / RECORDS).names()
    return bool(control) and UNFINISHED not in control


def _described(piece: Piece) -> dict[str, Any]:
    """Return spec and layout to compare; checkpoints by name, since their order may differ."""
    ordered = {name: dict(sorted(piece.spec[name].items())) for name in _BY_CHECKPOINT}
    layout = {name: piece.layout[name] for name in ("samples", "block", "dtype")}
    return {**piece.spec, **ordered, "layout": layout}


def _without_known(
    piece: Piece, features: xr.Dataset, found: Sequence[Piece]
) -> tuple[Piece, xr.Dataset]:
    """Leave out checkpoints that a complete piece has of these samples."""
    source = piece.spec.get("source")
    known = {
        name: old.spec["checkpoints"][name]
        for old in found
        if old.spec.get("source") == source and old.is_complete()
        for name in old.spec["checkpoints"]
    }
    names = [str(name) for name in features[CHECKPOINT].values]
    ours = piece.spec["checkpoints"]
    same = {name: ours[name] for name in names if name in known}
    require_same(
        {"checkpoints": same},
        {"checkpoints": {name: known[name] for name in same}},
        what=f"these features and the store {found[0].place.url!r}",
        names=("checkpoints",),
    )
    new = [name for name in names if name not in known]
    chosen = {field: {name: piece.spec[field][name] for name in new} for field in _BY_CHECKPOINT}
    taken = features.isel({CHECKPOINT: [names.index(name) for name in new]})
    return Piece(piece.place, {**piece.spec, **chosen}, piece.layout), taken


def _with_checkpoints(found: Sequence[Piece]) -> Piece:
    """Return the first piece as if it had the checkpoints of all."""
    merged = {name: _merged(piece.spec[name] for piece in found) for name in _BY_CHECKPOINT}
    return Piece(found[0].place, {**found[0].spec, **merged}, found[0].layout)


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def by_source(found: Sequence[Piece]) -> list[list[Piece]]:
    """Return the pieces of the same samples together, in the order of the first of each."""
    rows: dict[Any, list[Piece]] = {}
    for piece in found:
        rows.setdefault(piece.spec.get("source"), []).append(piece)
    return list(rows.values())


def _row(row: Sequence[Piece], names: list[str], complete: bool) -> xr.Dataset:
    """Return all checkpoints of the samples of one source."""
    parts = [stored(piece, complete=complete) for piece in row]
    attrs = {**parts[0].attrs, **_with_checkpoints(row).spec}
    parts = [part[list(FEATURE_NAMES)] for part in parts]
    ds = _concat(parts, CHECKPOINT) if len(parts) > 1 else parts[0]
    here = [str(name) for name in ds[CHECKPOINT].values]
    if missing := [name for name in names if name not in here]:
        raise IncompleteFeaturesError(
            f"the samples of {attrs.get('source')!r:.60} have no features of the checkpoints "
            f"{missing} in the store; needed all of {names}. Type td.save(td.featurize(samples, "
            "model), store, append_dim='checkpoint') with these samples."
        )
    ordered = attrs | {field: {n: attrs[field][n] for n in names} for field in _BY_CHECKPOINT}
    return ds.isel({CHECKPOINT: [here.index(name) for name in names]}).assign_attrs(ordered)


def _concat(parts: list[xr.Dataset], dim: str) -> xr.Dataset:
    return xr.concat(
        parts, dim, data_vars="all", coords="minimal", compat="override", join="override",
        combine_attrs="override",
    )  # fmt: skip


def _sum(name: str, summed: Sequence[xr.Dataset], names: list[str]) -> xr.DataArray | None:
    """Return the sum over all samples of what was kept of some, if all kept the same."""
    if any(name not in part for part in summed):
        return None
    attrs = [part[name].attrs for part in summed]
    if len({each.get(_FORMULA[name]) for each in attrs}) > 1:
        return None
    if name == LOSS_GRADIENT and any(set(each[_POOLED]) != set(names) for each in attrs):
        return None  # its weights are means over checkpoints, of which there are more now
    totals = []
    for checkpoint in names:
        parts = [part[name] for part in summed if checkpoint in part[CHECKPOINT].values]
        totals.append(reduce(add, (_at(part, checkpoint) for part in parts)))
    data = da.concatenate(totals, axis=-1)
    return xr.DataArray(data, dims=VARIABLES[name].dims, attrs={**attrs[0], _POOLED: names})


def _at(part: xr.DataArray, checkpoint: str) -> da.Array:
    index = part[CHECKPOINT].values.tolist().index(checkpoint)
    data: da.Array = part.data[..., index : index + 1]
    return data
