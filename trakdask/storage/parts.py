"""Pieces of one store: what was appended lies beside the first, and opens as one Dataset."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, Literal

import dask.array as da
import numpy as np
import xarray as xr
import zarr

from trakdask.errors import IncompleteFeaturesError, StoreMismatchError
from trakdask.files import Folder
from trakdask.provenance import PRECISION, digest, require_same
from trakdask.storage.coords import (
    DROPPED,
    by_source,
    require_kinds,
    sample_coords,
    without_sample_coords,
)
from trakdask.storage.edits import Edit, latest
from trakdask.storage.piece import (
    ASSIGNED,
    DROPS,
    FEATURE_NAMES,
    GRAM,
    LOSS_GRADIENT,
    PARTS,
    RECORDS,
    SUMS,
    Piece,
    array,
)
from trakdask.storage.reading import find, stored
from trakdask.storage.template import METADATA, UNFINISHED, listed
from trakdask.storage.zarr_stores import zarr_store
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, VARIABLES

__all__ = [
    "AppendDim",
    "appended",
    "assembled",
    "coords_of",
    "count",
    "dropped_mask",
    "dropped_rows",
    "pieces",
    "places",
    "unmade",
]

AppendDim = Literal["sample", "checkpoint"]

_FORMULA = {GRAM: "gram_weights", LOSS_GRADIENT: "loss_weights"}
_POOLED = "pooled_checkpoints"
_BY_CHECKPOINT = ("checkpoints", "checkpoint_ids")
_SAME = ("projector", "parameters", "task", *PRECISION)


def pieces(place: Folder) -> list[Piece]:
    """Return the pieces of a store, the first of them at its root."""
    return [find(each) for each in places(place)]


def places(place: Folder) -> list[Folder]:
    """Return where the pieces of a store are; one that is being made is not there yet."""
    return [place, *(part for part in _parts(place) if _is_made(part))]


def unmade(place: Folder) -> list[Folder]:
    """Return where an append was cut short before anything in it counts."""
    return [part for part in _parts(place) if not _is_made(part)]


def _parts(place: Folder) -> list[Folder]:
    names = sorted((name for name in (place / PARTS).names() if name.isdigit()), key=int)
    return [place / PARTS / name for name in names]


def count(piece: Piece) -> tuple[int, int]:
    """Return how many blocks of a piece are complete, and how many there should be."""
    if UNFINISHED in (piece.place / RECORDS).names():
        return 0, len(piece.checkpoints) * piece.n_blocks
    has_gram = f"{GRAM}/{METADATA}" in listed(piece)
    return piece.count_done(), len(piece.checkpoints) * (piece.n_blocks + has_gram)


def appended(
    place: Folder, piece: Piece, features: xr.Dataset, append_dim: AppendDim
) -> tuple[Piece, xr.Dataset]:
    """Return where features belong that are appended, and those of them that are not there.

    An earlier piece that is to be resumed, or a new one.

    Raises
    ------
    StoreMismatchError
        If they differ from the store in more than they may; the field is named.
    IncompleteFeaturesError
        If the store lacks blocks of something else: where these belong depends on it.
    """
    found = pieces(place)
    if append_dim == CHECKPOINT:
        piece, features = _without_known(piece, features, found)
    for old in found:
        if old.digest == piece.digest:
            return old, features
    own = [old for old in found if old.spec.get("source") == piece.spec.get("source")]
    _refuse_known(piece, own, append_dim)
    _require_complete(found)
    if append_dim == SAMPLE:
        needed, names = _with_checkpoints(found), (*_SAME, *_BY_CHECKPOINT)
    else:
        needed, names = _with_checkpoints(own or found), (*_SAME, "source", "layout")
    what = f"these features and the store {place.url!r}"
    require_same(_described(piece), _described(needed), what=what, names=names)
    _require_width(features, found[0])
    if append_dim == SAMPLE:
        _require_coords(features, sample_coords(found, latest(place, ASSIGNED)), place)
    zarr.open_group(zarr_store(place), mode="r+", zarr_format=3).require_group(PARTS)
    number = 1 + max((int(each.place.url.rpartition("/")[2]) for each in found[1:]), default=0)
    return Piece(place / PARTS / str(number), piece.spec, piece.layout), features


def _require_complete(found: Sequence[Piece]) -> None:
    for piece in found:
        done, total = count(piece)
        if done < total:
            raise IncompleteFeaturesError(
                f"expected a complete store to append to, got {done} of {total} blocks in "
                f"{piece.place.url!r}, of the source {piece.spec.get('source')!r:.60} at the "
                f"checkpoints {list(piece.spec['checkpoints'])}; try td.save of these features "
                f"first{_or_give_up(piece)}"
            )


def _or_give_up(piece: Piece) -> str:
    is_part = piece.place.url.rpartition("/")[0].endswith(f"/{PARTS}")
    return f", or delete {piece.place.url!r} to give them up" if is_part else ""


def _refuse_known(piece: Piece, own: Sequence[Piece], append_dim: AppendDim) -> None:
    """Refuse features of which a part is there already, and which are not what it resumes."""
    names = set(piece.spec["checkpoints"])
    known = [old for old in own if append_dim == SAMPLE or names & set(old.spec["checkpoints"])]
    if known:
        source, old = f"{piece.spec.get('source')!r:.60}", known[0]
        raise StoreMismatchError(
            f"expected other samples or checkpoints to append, or the same to go on with them, got "
            f"the source {source}, of which {old.place.url!r} has the checkpoints "
            f"{list(old.spec['checkpoints'])} in {old.layout}; try append_dim='sample' with other "
            "samples (samples.attrs['source']), or append_dim='checkpoint' with other checkpoints"
        )


def _require_width(features: xr.Dataset, first: Piece) -> None:
    width, needed = features.sizes[PROJ_DIM], array(first.group(), "feature").shape[1]
    if width != needed:
        raise StoreMismatchError(
            f"expected features with proj_dim {needed}, as those of the store "
            f"{first.place.url!r}, got {width}; try the projector of the store"
        )


def _require_coords(features: xr.Dataset, known: Mapping[str, xr.Variable], place: Folder) -> None:
    ours = {str(name) for name, coord in features.coords.items() if SAMPLE in coord.dims}
    if ours != set(known):
        remedies = [f"features.drop_vars({sorted(ours - set(known))})"] * bool(ours - set(known))
        remedies += [f"features.assign_coords({name}=...)" for name in sorted(set(known) - ours)]
        raise StoreMismatchError(
            f"expected features with the coords {sorted(known)} of the store {place.url!r}, got "
            f"{sorted(ours)}; try {', '.join(remedies)}"
        )
    require_kinds(features, known, place.url)


def coords_of(place: Folder, piece: Piece, only: Collection[str]) -> dict[str, xr.Variable] | None:
    """Return the named coords of the samples of a piece; None if the store has no such samples."""
    found = pieces(place)
    rows = by_source(found)
    sources = [row[0].spec.get("source") for row in rows]
    if (source := piece.spec.get("source")) not in sources:
        return None
    at = sources.index(source)
    sizes = [row[0].layout["samples"] for row in rows]
    chosen = slice(sum(sizes[:at]), sum(sizes[: at + 1]))
    known = sample_coords(found, latest(place, ASSIGNED), only=only)
    return {name: variable[chosen] for name, variable in known.items()}


def assembled(
    found: Sequence[Piece],
    names: list[str],
    drop: Edit | None = None,
    assigned: Edit | None = None,
    *,
    complete: bool = True,
) -> xr.Dataset:
    """Return the pieces of a store at some checkpoints as one lazy Dataset, coords in memory.

    A coord ``dropped`` marks samples, if any were.
    """
    coords = sample_coords(found, assigned, complete=complete)
    if len(found) == 1 and drop is None:
        ds = without_sample_coords(stored(found[0], complete=complete, without=coords))
        return ds.assign_coords(coords)
    rows = [_row(row, names, complete, coords) for row in by_source(found)]
    ds = _concat([row[list(FEATURE_NAMES)] for row in rows], SAMPLE) if len(rows) > 1 else rows[0]
    ds = (
        ds[list(FEATURE_NAMES)]
        .assign_coords(coords)
        .assign_attrs(
            source=" + ".join(str(row.attrs.get("source")) for row in rows),
            layout={**found[0].layout, "samples": ds.sizes[SAMPLE]},
        )
    )
    own = found if drop is None else found[drop.pieces :]
    summed = [stored(piece, complete=complete, without=coords) for piece in own]
    n_dropped = 0
    if drop is not None:
        mask = dropped_mask(drop, ds.sizes[SAMPLE])
        n_dropped = int(mask.sum())
        ds = ds.assign_coords({DROPPED: (SAMPLE, mask)})
        packed = np.packbits(mask).tobytes().hex()
        ds.attrs["source"] += f" without {digest({'dropped': packed})[:16]}"
        summed.append(_left(drop))
    about = {"samples": ds.sizes[SAMPLE] - n_dropped, "source": ds.attrs["source"]}
    sums = {name: _sum(name, summed, names) for name in SUMS}
    return ds.assign({n: v.assign_attrs(about) for n, v in sums.items() if v is not None})


def dropped_mask(drop: Edit, n_samples: int) -> np.ndarray:
    """Return which samples are dropped; none that were appended since."""
    mask = np.zeros(n_samples, bool)
    found = np.asarray(array(drop.group(), DROPPED)[:], bool)
    mask[: len(found)] = found
    return mask


def _left(drop: Edit) -> xr.Dataset:
    """Return the sums over the samples that a drop left, lazy."""
    group = drop.group()
    found = {name: array(group, name) for name in SUMS if name in group}
    data = {
        name: (VARIABLES[name].dims, da.from_zarr(of), dict(of.attrs)) for name, of in found.items()
    }
    return xr.Dataset(data, coords={CHECKPOINT: drop.attrs["checkpoints"]})


def dropped_rows(place: Folder, piece: Piece) -> np.ndarray:
    """Return which samples of a piece the store leaves out."""
    rows = by_source(pieces(place))
    sizes = [row[0].layout["samples"] for row in rows]
    sources = [row[0].spec.get("source") for row in rows]
    start = sum(sizes[: sources.index(piece.spec.get("source"))])
    drop = latest(place, DROPS)
    if drop is None:
        return np.zeros(piece.layout["samples"], bool)
    return dropped_mask(drop, sum(sizes))[start : start + piece.layout["samples"]]


def _is_made(place: Folder) -> bool:
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
    """Leave out checkpoints that a piece has of these samples, complete and with its sums."""
    source = piece.spec.get("source")
    known = {
        name: old.spec["checkpoints"][name]
        for old in found
        if old.spec.get("source") == source and len(set(count(old))) == 1
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


def _row(
    row: Sequence[Piece], names: list[str], complete: bool, coords: Collection[str]
) -> xr.Dataset:
    """Return the samples of one source at the named checkpoints, without coords along samples."""
    parts = [stored(piece, complete=complete, without=coords) for piece in row]
    attrs = {**parts[0].attrs, **_with_checkpoints(row).spec}
    parts = [without_sample_coords(part[list(FEATURE_NAMES)]) for part in parts]
    ds = _concat(parts, CHECKPOINT) if len(parts) > 1 else parts[0]
    here = [str(name) for name in ds[CHECKPOINT].values]
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
