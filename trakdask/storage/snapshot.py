"""What a store holds, from one look at it: its parts, and the edits that count."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr

from trakdask.errors import IncompleteFeaturesError
from trakdask.files import Folder
from trakdask.provenance import STORE_SPEC
from trakdask.storage.coords import DROPPED, by_source, opened_rows, sample_coords
from trakdask.storage.history import KINDS, Edit, has_ended, last_edit
from trakdask.storage.parts import (
    GRAM,
    LEASE,
    PARTS,
    RECORDS,
    UNFINISHED,
    Part,
)
from trakdask.storage.zarr_stores import read_attributes

__all__ = [
    "BLOCKS_AT_MOST",
    "BY_CHECKPOINT",
    "Snapshot",
    "completed",
    "count_blocks",
    "find_part",
    "part_folders",
    "require_completed",
    "require_ours",
    "require_settled",
    "snapshot",
    "unmade_folders",
    "with_all_checkpoints",
]

BLOCKS_AT_MOST = 10**7
BY_CHECKPOINT = ("checkpoints", "checkpoint_ids")
"""Fields of a spec that have a value for each checkpoint."""


@dataclass(frozen=True)
class Snapshot:
    """What a store holds; no parts if it is still to be made.

    Parameters
    ----------
    folder
        The store.
    parts
        The first lies at its root; each of the others was appended.
    drop, assigned, factors
        The last edits of these kinds, if any.
    unmade
        Where an append was cut short before anything in it counts.
    unfinished
        What is missing of an append that was cut short, and how to finish it; "" if nothing is.
    has_unfinished_blocks
        Whether that append has blocks already.
    """

    folder: Folder
    parts: Sequence[Part] = ()
    drop: Edit | None = None
    assigned: Edit | None = None
    factors: Edit | None = None
    unmade: Sequence[Folder] = ()
    unfinished: str = ""
    has_unfinished_blocks: bool = False

    @property
    def rows(self) -> list[list[Part]]:
        """The parts of the same samples together."""
        return by_source(self.parts)

    @property
    def n_samples(self) -> int:
        """Samples, those that were dropped among them."""
        return sum(row[0].layout["samples"] for row in self.rows)

    @property
    def checkpoints(self) -> list[str]:
        """Names of the checkpoints that all samples have."""
        rows = [[name for part in row for name in part.spec["checkpoints"]] for row in self.rows]
        return [name for name in rows[0] if all(name in row for row in rows)]

    def dropped(self) -> np.ndarray:
        """Return which samples are dropped; none that were appended since."""
        mask = np.zeros(self.n_samples, bool)
        if self.drop is not None:
            covered = np.asarray(self.drop.store().array(DROPPED)[:], bool)
            mask[: len(covered)] = covered
        return mask

    def dropped_of(self, part: Part) -> np.ndarray:
        """Return which samples of a part are dropped; the part may be new."""
        rows = self._samples_of(part)
        return np.zeros(part.layout["samples"], bool) if rows is None else self.dropped()[rows]

    def coords(self, only: Collection[str] | None = None) -> dict[str, xr.Variable]:
        """Return the coords of all samples, or those that are named, in memory."""
        if only is not None and not only:
            return {}
        rows = opened_rows(self.parts, self.assigned, only=only)
        return sample_coords(self.parts, self.assigned, rows, only=only)

    def coords_of(self, part: Part, only: Collection[str]) -> dict[str, xr.Variable] | None:
        """Return the named coords of a part's samples; None if the store has no such samples."""
        rows = self._samples_of(part)
        if rows is None:
            return None
        return {name: variable[rows] for name, variable in self.coords(only).items()}

    def _samples_of(self, part: Part) -> slice | None:
        start = 0
        for row in self.rows:
            stop = start + row[0].layout["samples"]
            if row[0].source == part.source:
                return slice(start, stop)
            start = stop
        return None


# ----------------------------------------------------------------------------------- looking at it


def snapshot(folder: Folder) -> Snapshot:
    """Look at a store.

    Raises
    ------
    FileNotFoundError
        If there is no such store.
    """
    first, names = find_part(folder), folder.names()
    appended = _appended(folder) if PARTS in names else []
    made = [each for each in appended if _is_made(each)]
    drop, assigned, factors = (last_edit(folder, k) if k in names else None for k in KINDS)
    unmade = [each for each in appended if each not in made]
    return Snapshot(folder, [first, *map(find_part, made)], drop, assigned, factors, unmade)


def part_folders(folder: Folder) -> list[Folder]:
    """Return where the parts of a store are; one that is being made is not there yet."""
    return [folder, *(each for each in _appended(folder) if _is_made(each))]


def unmade_folders(folder: Folder) -> list[Folder]:
    """Return where an append was cut short before anything in it counts."""
    return [each for each in _appended(folder) if not _is_made(each)]


def _appended(folder: Folder) -> list[Folder]:
    names = sorted((name for name in (folder / PARTS).names() if name.isdigit()), key=int)
    return [folder / PARTS / name for name in names]


def _is_made(folder: Folder) -> bool:
    control = (folder / RECORDS).names()
    return bool(control) and UNFINISHED not in control


def find_part(folder: Folder) -> Part:
    """Return the part that is in a folder, according to its metadata."""
    try:
        attrs = read_attributes(folder)
    except (FileNotFoundError, NotADirectoryError, ValueError) as err:
        raise FileNotFoundError(_no_store(folder)) from err
    if "layout" not in attrs:
        raise FileNotFoundError(
            f"expected a store that td.save wrote, got the zarr store {folder.url!r} without "
            "features; try xarray.open_zarr(store)"
        )
    spec = {name: attrs[name] for name in STORE_SPEC if name in attrs}
    layout: Any = attrs["layout"]
    _require_integers(folder, spec, layout)
    return Part(folder, spec, layout)


def _require_integers(folder: Folder, spec: Mapping[str, Any], layout: Any) -> None:
    """Reject metadata values that are not plain integers: they name folders and bound loops."""
    ids = spec.get("checkpoint_ids")
    if isinstance(ids, Mapping) and isinstance(layout, Mapping):
        numbers = [*ids.values(), layout.get("samples"), layout.get("block")]
        is_plain = all(type(number) is int and number >= 0 for number in numbers)
        if is_plain and layout["samples"] <= BLOCKS_AT_MOST * max(layout["block"], 1):
            return
    raise ValueError(
        f"expected whole numbers in the metadata of the store {folder.url!r}, and no more than "
        f"{BLOCKS_AT_MOST:,} blocks, got checkpoint_ids={ids!r:.60} and layout={layout!r:.60}; "
        "they are damaged: try td.verify(store)"
    )


def _no_store(folder: Folder) -> str:
    names = folder.names()
    if not names:
        return (
            f"expected a folder that td.save wrote, but there is no store {folder.url!r}; try "
            "another path"
        )
    if {".zgroup", ".zarray", ".zmetadata"} & set(names):
        return (
            f"expected a folder that td.save wrote, got {folder.url!r} in the older zarr format 2; "
            "try xarray.open_zarr(store), or another path"
        )
    return (
        f"expected a folder that td.save wrote, got {folder.url!r} with {names[:5]} and no "
        "readable zarr v3 group; try another path, or td.verify(store) if it was one"
    )


def with_all_checkpoints(parts: Sequence[Part]) -> Part:
    """Return the first of some parts as if it had the checkpoints of all."""
    merged = {
        field: {name: value for part in parts for name, value in part.spec[field].items()}
        for field in BY_CHECKPOINT
    }
    return Part(parts[0].folder, {**parts[0].spec, **merged}, parts[0].layout)


def require_ours(folder: Folder) -> bool:
    """Reject a folder with something else in it; return whether a store is there.

    Raises
    ------
    FileExistsError
        If there is something else, or what is left of a store is damaged.
    """
    names, control = folder.names(), (folder / RECORDS).names()
    is_new = names in ([], [RECORDS]) and all(name.startswith(LEASE) for name in control)
    if is_new or UNFINISHED in control:
        return False
    try:
        attrs = read_attributes(folder)
    except (FileNotFoundError, ValueError) as err:
        raise FileExistsError(_not_ours(folder, names)) from err
    if "layout" not in attrs:
        raise FileExistsError(
            f"expected a new path, or a feature store to resume, got the zarr store {folder.url!r} "
            "without features; try another path"
        )
    if all(name.startswith(LEASE) for name in control):
        raise FileExistsError(
            f"expected the records of the store {folder.url!r}, which say what blocks are "
            "complete, but it has lost them; try restoring its folder 'records', or another path"
        )
    return True


def _not_ours(folder: Folder, names: list[str]) -> str:
    if RECORDS in names:
        return (
            f"expected metadata that can be read, but those of the store {folder.url!r} are "
            "damaged; try td.verify(store, repair=True)"
        )
    older = " in the older zarr format 2" if ".zgroup" in names else ""
    return (
        f"expected a new path, or a feature store to resume, got {folder.url!r}, which holds "
        f"{names[:3]}{older}; try another path"
    )


# ----------------------------------------------------------------------------------- is it complete


def completed(store: Snapshot) -> Snapshot:
    """Return a store as it was before an append that was cut short, if one was.

    Raises
    ------
    IncompleteFeaturesError
        If blocks are missing that do not belong to such an append.
    """
    shown = replace(store, parts=_complete_parts(store))
    missing = ""
    if len(shown.parts) < len(store.parts):
        missing = _missing_blocks(store, store.parts[len(shown.parts)])
    if missing := missing or _missing_checkpoints(shown):
        return replace(shown, unfinished=missing, has_unfinished_blocks=True)
    if store.unmade:
        text = (
            f"the append in {store.unmade[0].url!r} has no blocks yet. Try the td.save(..., "
            "append_dim=...) that began it, or td.verify(store, repair=True) to give it up"
        )
        return replace(shown, unfinished=text)
    return shown


def require_settled(store: Snapshot, what: str) -> None:
    """Reject edits of a store while an append to it has blocks, but not all.

    Raises
    ------
    IncompleteFeaturesError
        With what to do first.
    """
    if store.has_unfinished_blocks:
        raise IncompleteFeaturesError(
            f"expected a store without unfinished appends for {what}, got {store.folder.url!r}, "
            f"where {store.unfinished}"
        )


def require_completed(store: Snapshot) -> None:
    """Reject appends to a store that lacks blocks of something else.

    Raises
    ------
    IncompleteFeaturesError
        With what to do first.
    """
    for part in store.parts:
        done, total = count_blocks(part)
        if done < total:
            is_first = part is store.parts[0]
            or_give_up = "" if is_first else f", or delete {part.folder.url!r} to give them up"
            raise IncompleteFeaturesError(
                f"expected a complete store to append to, got {done} of {total} blocks in "
                f"{part.folder.url!r}, of the source {part.source!r:.60} at the "
                f"checkpoints {list(part.spec['checkpoints'])}; try td.save of these features "
                f"first{or_give_up}"
            )


def count_blocks(part: Part) -> tuple[int, int]:
    """Return how many blocks of a part are complete, and how many there should be."""
    if UNFINISHED in (part.folder / RECORDS).names():
        return 0, len(part.checkpoints) * part.n_blocks
    has_gram = GRAM in part.arrays
    return part.count_done(), len(part.checkpoints) * (part.n_blocks + has_gram)


def _complete_parts(store: Snapshot) -> list[Part]:
    """Return the parts before the first that lacks blocks, if that is one being appended.

    Nothing is appended after an append that was cut short, and no edit covers it.
    """
    counts = [count_blocks(part) for part in store.parts]
    lacking = [number for number, (done, total) in enumerate(counts) if done < total]
    if not lacking:
        return list(store.parts)
    first = lacking[0]
    covered = max(1, *(edit.n_parts for edit in (store.drop, store.assigned) if edit), 1)
    is_append = first >= covered and lacking == list(range(first, len(store.parts)))
    if not is_append or any(has_ended(part) for part in store.parts[first:]):
        done, total = (sum(numbers) for numbers in zip(*counts, strict=True))
        url, dim = store.folder.url, ", append_dim=..." if first else ""
        raise IncompleteFeaturesError(
            f"expected a complete store, got {done} of {total} blocks in {url!r} (some are missing "
            f"in {store.parts[first].folder.url!r}), and the rest would read as NaN; try "
            f"td.save(features, {url!r}{dim}) to compute what is missing, or td.open({url!r}, "
            "require_complete=False) to look at it"
        )
    return list(store.parts[:first])


def _missing_blocks(store: Snapshot, part: Part) -> str:
    done, total = count_blocks(part)
    return (
        f"the append in {part.folder.url!r}, of the source {part.source!r:.60} at the "
        f"checkpoints {list(part.spec['checkpoints'])}, has {done} of {total} blocks. Try "
        f"td.save(features, {store.folder.url!r}, append_dim=...) with these features to finish "
        f"it, or delete {part.folder.url!r} to give it up"
    )


def _missing_checkpoints(store: Snapshot) -> str:
    every = list(dict.fromkeys(name for part in store.parts for name in part.spec["checkpoints"]))
    for row in store.rows:
        here = {name for part in row for name in part.spec["checkpoints"]}
        if missing := [name for name in every if name not in here]:
            return (
                f"the samples of the source {row[0].source!r:.60} have no features of the "
                f"checkpoints {missing}. Try td.save(td.featurize(samples, model), "
                f"{store.folder.url!r}, append_dim='checkpoint') with these samples"
            )
    return ""
