"""Where features belong in a store: they resume a part of it, or are appended as a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import xarray as xr

from trakdask.errors import StoreMismatchError
from trakdask.provenance import PRECISION, require_same
from trakdask.storage.coords import require_kinds
from trakdask.storage.history import require_subgroup
from trakdask.storage.parts import PARTS, Part
from trakdask.storage.snapshot import (
    BY_CHECKPOINT,
    Snapshot,
    count_blocks,
    require_completed,
    with_all_checkpoints,
)
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE

__all__ = ["AppendDim", "appended"]

AppendDim = Literal["sample", "checkpoint"]

_SAME = ("projector", "parameters", "task", "code", *PRECISION)


def appended(
    store: Snapshot, part: Part, features: xr.Dataset, append_dim: AppendDim
) -> tuple[Part, xr.Dataset]:
    """Return the part of features that are appended, and those of them that are not there.

    The part is one that is to be resumed, or a new one.

    Raises
    ------
    StoreMismatchError
        If they differ from the store in more than they may; the field is named.
    IncompleteFeaturesError
        If the store lacks blocks of something else: where these belong depends on it.
    """
    if append_dim == CHECKPOINT:
        part, features = _without_known(part, features, store)
    for old in store.parts:
        if old.digest == part.digest:
            return old, features
    own = [old for old in store.parts if old.source == part.source]
    _require_unknown(part, own, append_dim)
    require_completed(store)
    if append_dim == SAMPLE:
        needed, names = with_all_checkpoints(store.parts), (*_SAME, *BY_CHECKPOINT)
    else:
        needed, names = with_all_checkpoints(own or store.parts), (*_SAME, "source", "layout")
    what = f"these features and the store {store.folder.url!r}"
    require_same(_described(part), _described(needed), what=what, names=names)
    _require_width(features, store.parts[0])
    if append_dim == SAMPLE:
        _require_coords(features, store.coords(), store.folder.url)
    require_subgroup(store.folder, PARTS)
    number = 1 + max((int(each.folder.name) for each in store.parts[1:]), default=0)
    return Part(store.folder / PARTS / str(number), part.spec, part.layout), features


def _without_known(part: Part, features: xr.Dataset, store: Snapshot) -> tuple[Part, xr.Dataset]:
    """Leave out checkpoints that complete parts have of these samples."""
    known = {
        name: old.spec["checkpoints"][name]
        for old in store.parts
        if old.source == part.source and len(set(count_blocks(old))) == 1
        for name in old.spec["checkpoints"]
    }
    names = [str(name) for name in features[CHECKPOINT].values]
    ours = part.spec["checkpoints"]
    same = {name: ours[name] for name in names if name in known}
    require_same(
        {"checkpoints": same},
        {"checkpoints": {name: known[name] for name in same}},
        what=f"these features and the store {store.folder.url!r}",
        names=("checkpoints",),
    )
    new = [name for name in names if name not in known]
    chosen = {field: {name: part.spec[field][name] for name in new} for field in BY_CHECKPOINT}
    selected = features.isel({CHECKPOINT: [names.index(name) for name in new]})
    return Part(part.folder, {**part.spec, **chosen}, part.layout), selected


def _require_unknown(part: Part, own: Sequence[Part], append_dim: AppendDim) -> None:
    """Reject features that are partly in the store, and are not what was begun there."""
    names = set(part.spec["checkpoints"])
    known = [old for old in own if append_dim == SAMPLE or names & set(old.spec["checkpoints"])]
    if known:
        old = known[0]
        raise StoreMismatchError(
            "expected other samples or checkpoints to append, or the same to go on with them, got "
            f"the source {part.source!r:.60}, of which {old.folder.url!r} has the checkpoints "
            f"{list(old.spec['checkpoints'])} in {old.layout}; try append_dim='sample' with other "
            "samples (samples.attrs['source']), or append_dim='checkpoint' with other checkpoints"
        )


def _require_width(features: xr.Dataset, first: Part) -> None:
    width, needed = features.sizes[PROJ_DIM], first.store().array("feature").shape[1]
    if width != needed:
        raise StoreMismatchError(
            f"expected features with proj_dim {needed}, as those of the store "
            f"{first.folder.url!r}, got {width}; try the projector of the store"
        )


def _require_coords(features: xr.Dataset, known: Mapping[str, xr.Variable], url: str) -> None:
    ours = {str(name) for name, coord in features.coords.items() if SAMPLE in coord.dims}
    if ours != set(known):
        remedies = [f"features.drop_vars({sorted(ours - set(known))})"] * bool(ours - set(known))
        remedies += [f"features.assign_coords({name}=...)" for name in sorted(set(known) - ours)]
        raise StoreMismatchError(
            f"expected features with the coords {sorted(known)} of the store {url!r}, got "
            f"{sorted(ours)}; try {', '.join(remedies)}"
        )
    require_kinds(features, known, url)


def _described(part: Part) -> dict[str, object]:
    """Return spec and layout to compare; checkpoints by name, since their order may differ."""
    ordered = {name: dict(sorted(part.spec[name].items())) for name in BY_CHECKPOINT}
    layout = {name: part.layout[name] for name in ("samples", "block", "dtype")}
    return {**part.spec, **ordered, "layout": layout}
