"""What is wrong with a store: torn, changed, lost and foreign files, each with its remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import pandas as pd

from trakdask.files import Folder, is_partial
from trakdask.storage import edits
from trakdask.storage.edits import KINDS, latest
from trakdask.storage.lease import PREFIX, lease
from trakdask.storage.parts import places, unmade
from trakdask.storage.piece import ASSIGNED, DROPS, FACTORS, GRAM, PARTS, RECORDS, Files, Piece
from trakdask.storage.reading import find
from trakdask.storage.runs import RUNS
from trakdask.storage.template import METADATA, TEMPLATE, UNFINISHED, inventory, restore
from trakdask.storage.zarr_stores import checksum

__all__ = ["faults", "verify", "withdraw"]

_SAVE = "td.verify(store, repair=True), then td.save(features, store)"
_LOST = "no such file"
_REPAIR = "td.verify(store, repair=True)"
_COORD = (
    "td.save(features, store) with these coords, or td.assign_coords(store, {{{name!r}: values}})"
)
_AGAIN = {
    DROPS: "td.drop(store, where=...)",
    ASSIGNED: "td.assign_coords(store, coords)",
    FACTORS: "td.calibrate(store)",
}


def verify(
    store: str | os.PathLike[str],
    *,
    checksums: bool = False,
    repair: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Look for files of a store that are damaged, lost, or not its own.

    Parameters
    ----------
    store
        Folder or fsspec URL that :func:`save` wrote.
    checksums
        Read every file and compare its CRC-32 with the one recorded when it was written. Else only
        the sizes are compared.
    repair
        Restore damaged metadata, remove what writers left half done, and withdraw the records of
        damaged blocks, so that :func:`save` computes these again, and no other. Foreign files stay.
        Damaged coords stay, too, until :func:`save` is given features that have them, or
        :func:`assign_coords` their values.
    storage_options
        Given to fsspec with a URL, as xarray does.

    Returns
    -------
    DataFrame with one row per fault: ``path`` in the store, what was ``found``, ``block`` and
    ``checkpoint`` (their numbers; -1 if it belongs to none), and the ``remedy`` to type. Empty if
    nothing is wrong. Blocks that were never completed are no faults.

    Raises
    ------
    FileNotFoundError
        If there is no such store, or nothing left to know it by.
    StoreBusyError
        With ``repair``, if another process writes the store.
    ValueError
        With ``repair``, if there are symbolic links in the store, through which nothing is written;
        or if the copy of damaged metadata is damaged, too.

    Notes
    -----
    One listing of the store; with ``checksums``, one pass over its bytes, file by file.
    """
    place = Folder.at(store, storage_options)
    for name, value in {"checksums": checksums, "repair": repair}.items():
        if not isinstance(value, bool):
            raise TypeError(f"expected {name}=True or False, got {value!r:.60}; try {name}=True")
    if RECORDS not in place.names():
        _template(place)  # says what is there instead; a lease would make a folder
    if not repair:
        return _table(place, _all_faults(place, checksums, repair=False))
    with lease(place, "td.verify"):
        found = _all_faults(place, checksums, repair=True)
        for at in [*unmade(place), *(left for kind in KINDS for left in _left(place, kind))]:
            place.remove(at.url[len(place.url) + 1 :])
        place.sweep()
        return _table(place, found)


@dataclass(frozen=True)
class Fault:
    """A file that is not what it should be."""

    path: str
    found: str
    block: str = ""
    checkpoint: int = -1
    remedy: str = _SAVE


def faults(piece: Piece, sizes: Mapping[str, int], *, checksums: bool = False) -> list[Fault]:
    """Return the damaged files of completed blocks, by a listing of the piece."""
    files, found = Files(piece), list[Fault]()
    for index, names in enumerate(piece.done(index) for index in range(len(piece.checkpoints))):
        for block in sorted(names):
            found += _block_faults(piece, files, sizes, block, index, checksums)
    return found


def withdraw(piece: Piece, fault: Fault) -> None:
    """Remove the record of a damaged block: it does not count until it is computed again."""
    if fault.checkpoint >= 0:
        piece.folder(fault.checkpoint).remove(f"{fault.block}.json")


def _all_faults(place: Folder, checksums: bool, repair: bool) -> list[tuple[Folder, Fault]]:
    found = []
    for at, assigned in _pieces_with_assigned(place):
        found += [(at, fault) for fault in _faults_at(at, checksums, repair, assigned)]
    found += _edit_faults(place, checksums) + _left_faults(place)
    partial = (path for path in place.sizes() if is_partial(path))
    text = "left half written by a writer that was killed"
    return found + [(place, Fault(path, text, remedy=_REPAIR)) for path in partial]


def _pieces_with_assigned(place: Folder) -> list[tuple[Folder, set[str]]]:
    """Return where the pieces are, and the coords of each that were assigned anew since."""
    try:
        edit = latest(place, ASSIGNED)
    except ValueError:
        edit = None  # reported where edits are
    names, covered = (set[str](), 0) if edit is None else (set(edit.attrs["coords"]), edit.pieces)
    return [(at, names if n < covered else set()) for n, at in enumerate(places(place))]


def _faults_at(place: Folder, checksums: bool, repair: bool, assigned: set[str]) -> list[Fault]:
    found = _metadata_faults(place)
    if found and not repair:
        return found  # what they describe cannot be known
    for fault in found:
        restore(place, fault.path)
    piece = find(place)
    others = list(_piece_faults(piece, checksums, assigned))
    for fault in others if repair else ():
        withdraw(piece, fault)
    return found + others


def _edit_faults(place: Folder, checksums: bool) -> list[tuple[Folder, Fault]]:
    """Return what is wrong with the last edit of each kind."""
    found = []
    for kind in KINDS:
        try:
            edit = latest(place, kind)
        except ValueError as err:
            found.append((place, Fault(kind, "damaged metadata", remedy=str(err))))
            continue
        if edit is None:
            continue
        for path in edits.damaged(edit, checksums=checksums):
            # A drop would start from what is damaged.
            first = f"delete {edit.place.url}, then " if kind == DROPS else ""
            remedy = f"{first}{_AGAIN[kind]} again"
            found.append((edit.place, Fault(path, "damaged or missing", remedy=remedy)))
    return found


def _left_faults(place: Folder) -> list[tuple[Folder, Fault]]:
    """Return what was left of appends and edits that were cut short before they counted."""
    text = "left of an append that was cut short before its first block"
    found = [(part, Fault("", text, remedy=_REPAIR)) for part in unmade(place)]
    for kind in KINDS:
        text = f"left of {_AGAIN[kind]} that was cut short, or that a later one replaced"
        for at in _left(place, kind):
            found.append((at, Fault("", text, remedy=_REPAIR)))
    return found


def _left(place: Folder, kind: str) -> list[Folder]:
    try:
        return edits.left(place, kind)
    except ValueError:  # damaged: reported, and nothing of its kind is removed
        return []


def _table(root: Folder, found: list[tuple[Folder, Fault]]) -> pd.DataFrame:
    """Return faults as rows, with paths in the store, not in the piece."""
    columns = [field.name for field in fields(Fault)]
    prefixes = [place.url[len(root.url) + 1 :] for place, _ in found]
    rows = [
        {**asdict(fault), "path": "/".join(filter(None, (prefix, fault.path)))}
        for prefix, (_, fault) in zip(prefixes, found, strict=True)
    ]
    return pd.DataFrame(rows, columns=columns)


def _block_faults(
    piece: Piece,
    files: Files,
    sizes: Mapping[str, int],
    block: str,
    index: int,
    checksums: bool,
) -> Iterator[Fault]:
    needed = files.of(block, index)
    if checksums:
        try:
            record = piece.folder(index).read_json(f"{block}.json")
            needed = {path: size for path, (size, _) in record["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            path = f"{RECORDS}/{piece.digest[:16]}/{piece.checkpoints[index]}/{block}.json"
            yield Fault(path, "a record that cannot be read", block, index)
            return
    for path, size in needed.items():
        if path not in sizes:
            yield Fault(path, _LOST, block, index)
        elif size is not None and sizes[path] != size:
            yield Fault(path, f"{sizes[path]} bytes instead of {size}", block, index)
        elif checksums and checksum(piece.place.read(path)) != record["files"][path][1]:
            yield Fault(path, "other bytes than were written", block, index)


def _template(place: Folder) -> dict[str, Any]:
    """Return the inventory of a store by looking for it: its own metadata may be damaged."""
    try:
        return inventory(place)
    except ValueError as err:
        find(place)  # says what is there instead
        raise FileNotFoundError(
            f"expected a readable {TEMPLATE}, the list of its files, among the records of the "
            f"store {place.url!r}, got none; try saving the features to a new store"
        ) from err


def _metadata_faults(place: Folder) -> list[Fault]:
    found = []
    for path, known in _template(place).items():
        if not path.endswith(METADATA):
            continue
        try:
            is_same = checksum(place.read(path)) == known["checksum"]
        except FileNotFoundError:
            is_same = False
        if not is_same:
            found.append(Fault(path, "damaged or missing metadata", remedy=_REPAIR))
    return found


def _piece_faults(piece: Piece, checksums: bool, assigned: set[str]) -> Iterator[Fault]:
    sizes = piece.place.sizes()
    yield from faults(piece, sizes, checksums=checksums)
    yield from _other_faults(piece, sizes, checksums, assigned)


def _other_faults(
    piece: Piece, sizes: Mapping[str, int], checksums: bool, assigned: set[str]
) -> Iterator[Fault]:
    """Yield coords that are damaged, and files that nobody asked for."""
    template = _template(piece.place)
    for path, known in template.items():
        if path.endswith(METADATA) or path.partition("/")[0] in assigned:
            continue
        is_there = sizes.get(path) == known["bytes"]
        if is_there and checksums:
            is_there = checksum(piece.place.read(path)) == known["checksum"]
        if not is_there:
            remedy = _COORD.format(name=path.partition("/")[0])
            yield Fault(path, "a damaged or missing coord", remedy=remedy)
    own = {*template, *_possible(piece)}
    for path in sizes:
        is_elsewhere = path.startswith(tuple(f"{folder}/" for folder in (PARTS, *KINDS)))
        if is_elsewhere or is_partial(path) or path in own or _is_control(piece, path):
            continue
        yield Fault(path, "a foreign file", remedy=f"delete {piece.place.url}/{path}")


def _possible(piece: Piece) -> Iterator[str]:
    """Yield all files that a complete piece may have."""
    record, files = f"{RECORDS}/{piece.digest[:16]}", Files(piece)
    for index, name in enumerate(piece.checkpoints):
        for block in (*map(str, range(piece.n_blocks)), GRAM):
            yield f"{record}/{name}/{block}.json"
            yield from files.of(block, index, optional=True)


def _is_control(piece: Piece, path: str) -> bool:
    folder, _, name = path.rpartition("/")
    if folder == RECORDS:
        return name.startswith(PREFIX) or name == UNFINISHED
    own = f"{RECORDS}/{piece.digest[:16]}"
    return folder == f"{own}/{RUNS}" or path == f"{own}/{TEMPLATE}"
