"""The place of features in a store, and whether they were made in the same way as its content."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import xarray as xr

from trakdask.errors import IncompleteFeaturesError, StoreMismatchError
from trakdask.provenance import BY_CHECKPOINT, STORE_SPEC, require_same, spec
from trakdask.storage.blocks import difference_of_block
from trakdask.storage.coords import joined_coords
from trakdask.storage.group import DROPPED, ERROR, SCALE, Group
from trakdask.storage.unfinished import about_unfinished
from trakdask.variables import CHECKPOINT, FITTED, PROJ_DIM, SAMPLE, TRAINED_ON, checkpoint_names

_SAME = tuple(name for name in STORE_SPEC if name not in (*BY_CHECKPOINT, "source"))


def by_sets(before: Group, features: xr.Dataset, append_dim: str | None) -> list[xr.Dataset]:
    """Return features of all samples of a store as features of its sets; others as they are.

    So each set goes on, is compared and is named as if it were saved alone. That these are its
    samples, in its order, is known from their coords.

    Raises
    ------
    StoreMismatchError
        If coords differ, or there is none that could.
    """
    sets = [*before.rows_of_sources()]
    n = features.sizes[SAMPLE]
    if append_dim == SAMPLE or len(sets) < 2 or n != before.n_samples:
        return [features]
    joined_coords(before, before, features.coords.variables, range(n))
    known = {name for name in before.coords if name not in (CHECKPOINT, DROPPED)}
    if known and not known & {*map(str, features.coords)}:
        raise StoreMismatchError(
            f"expected one of the coords {sorted(known)} of the store {before.folder.url!r}, which "
            f"tell whether these are its {n} samples in its order, got none; try "
            "features.assign_coords(...), or samples with them"
        )
    return [
        features.isel({SAMPLE: slice(rows.start, rows.stop)}).assign_attrs(source=source)
        for source, rows in sets
    ]


def place(
    before: Group, features: xr.Dataset, append_dim: str | None, dtype: str | None
) -> tuple[Group, Group, range]:
    """Find the place of features in a store; ``before`` stays as it is.

    Features are at home in a store if they were made in the same way as its content. Their
    samples are either a set that was saved before, completely or not, or are appended. What an
    unfinished append adds counts only for calls that bring it, because no other has its coords.

    Returns
    -------
    The store as it counts, in which the append that they begin or go on with is noted; as it is to
    be with them; and their rows.

    Raises
    ------
    StoreMismatchError
        If the store holds something else, or if ``append_dim`` adds something else than is new.
    IncompleteFeaturesError
        If they begin an append while another is unfinished.
    """
    target, names, ours = before.target(), checkpoint_names(features), spec(features)
    what = f"these features and the store {before.folder.url!r}"
    numbers = {*map(str, features.data_vars)} - {ERROR, *FITTED}
    layout = {
        "proj_dim": features.sizes[PROJ_DIM],
        "stored_dtype": dtype or str(features.feature.dtype),
        "variables": sorted(numbers | ({TRAINED_ON} & {*target.features})),
    }
    checkpoints = _joined_checkpoints(target, {**ours, **layout}, what)
    rows, added = _known_rows(before, features, append_dim), {*names} - {*target.checkpoints}
    if rows is not None and not added:
        if rows.stop <= before.n_samples and {*names} <= {*before.checkpoints}:
            return before, copy.deepcopy(before), rows
        if {*target.checkpoints} - {*before.checkpoints} <= {*names}:
            return before, target, rows
    if append_dim and "unfinished" in before.attrs:
        raise IncompleteFeaturesError(
            f"expected no unfinished append in the store {before.folder.url!r}: "
            f"{about_unfinished(before)}"
        )
    # More samples come with all checkpoints; more checkpoints of samples are to be asked for.
    may_differ, sources = append_dim == CHECKPOINT, [*target.attrs["sources"]]
    if rows is None:
        rows = range(target.n_samples, target.n_samples + features.sizes[SAMPLE])
        source = [str(ours.get("source", "")), len(rows)]
        if len(sources) > 1 and append_dim == CHECKPOINT:
            raise StoreMismatchError(
                f"expected all {before.n_samples} samples of the store, dropped ones among them, "
                f"or one of its sets {sources}, got {source}; try the features of all samples in "
                f"the order of the store, or one td.save(..., append_dim={CHECKPOINT!r}) per set"
            )
        if rows.start and append_dim != SAMPLE:
            require_same({"source": source}, {"source": sources}, what=what, names=("source",))
        sources.append(source)
        may_differ = not rows.start or {*names} == {*target.checkpoints}
    if not may_differ:
        require_same(ours, target.attrs, what=what, names=BY_CHECKPOINT)
    joined = " + ".join(name for name, _ in sources)
    unfinished = {"source": joined, "sources": sources, **checkpoints}
    noted = replace(before, attrs={**before.attrs, "unfinished": unfinished})
    return noted, noted.target(), rows


def _joined_checkpoints(
    target: Group, ours: Mapping[str, Any], what: str
) -> dict[str, dict[str, Any]]:
    """Return attrs of checkpoints of a store and of features that were made in the same way.

    ``ours`` says how, and which arrays a store of these features has.
    """
    array = target.arrays["feature"]
    joined = {
        name: {**target.attrs.get(name, {}), **ours[name]} for name in BY_CHECKPOINT if name in ours
    }
    common = {
        name: {key: value for key, value in values.items() if key in target.checkpoints}
        for name, values in joined.items()
    }
    layout = {
        "proj_dim": array["shape"][1],
        "stored_dtype": array["data_type"],
        "variables": sorted({*target.features} - {ERROR, SCALE}),
    }
    require_same(
        {**ours, **common}, {**target.attrs, **layout}, what=what,
        names=(*BY_CHECKPOINT, *_SAME, *layout),
    )  # fmt: skip
    return joined


def _known_rows(before: Group, features: xr.Dataset, append_dim: str | None) -> range | None:
    """Return where samples are that were begun before, None if these are others.

    Sets of as many samples of the same source, as two selections may be, are told apart by their
    features.
    """
    source, difference = features.attrs.get("source", ""), None
    for name, rows in before.target().rows_of_sources():
        if (name, len(rows)) == (source, features.sizes[SAMPLE]):
            difference = difference_of_block(before, features, rows)
            if difference is None:
                return rows
    if difference is not None and append_dim != SAMPLE:
        raise StoreMismatchError(difference)
    return None
