"""What is wrong with a store: torn, changed, lost and foreign files, each with its remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import pandas as pd

from trakdask.locations import location
from trakdask.storage.drops import DROPS, latest
from trakdask.storage.lease import PREFIX, lease
from trakdask.storage.parts import PARTS, places
from trakdask.storage.piece import GRAM, RECORDS, Files, Piece
from trakdask.storage.place import PARTIAL, Place, checksum
from trakdask.storage.reading import find
from trakdask.storage.runs import RUNS
from trakdask.storage.template import METADATA, TEMPLATE, UNFINISHED, inventory, restore

__all__ = ["faults", "sweep", "verify", "withdraw"]

_SAVE = "td.verify(store, repair=True), then td.save(features, store)"
_LOST = "no such file"
_REPAIR = "td.verify(store, repair=True)"


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

    Notes
    -----
    One listing of the store; with ``checksums``, one pass over its bytes, file by file.
    """
    place = Place(location(store), storage_options or {})
    if not repair:
        found = [each for at in places(place) for each in _faults_at(at, checksums)]
        return _table(place, [*found, *_drop_faults(place, checksums)])
    with lease(place, "td.verify"):
        found = [each for at in places(place) for each in _mend(at, checksums)]
        return _table(place, [*found, *_drop_faults(place, checksums)])


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


def sweep(piece: Piece, sizes: Mapping[str, int]) -> None:
    """Remove what writers that were killed left half written."""
    for path in sizes:
        if path.endswith(PARTIAL):
            piece.place.remove(path)


def withdraw(piece: Piece, fault: Fault) -> None:
    """Remove the record of a damaged block: it does not count until it is computed again."""
    if fault.checkpoint >= 0:
        piece.folder(fault.checkpoint).remove(f"{fault.block}.json")
    if fault.checkpoint >= 0 and fault.found == _LOST:  # sums may have read it as NaN
        for index in range(len(piece.checkpoints)):
            piece.folder(index).remove(f"{GRAM}.json")


def _faults_at(place: Place, checksums: bool) -> list[tuple[Place, Fault]]:
    found = _metadata_faults(place) or _piece_faults(find(place), checksums)
    return [(place, fault) for fault in found]


def _mend(place: Place, checksums: bool) -> list[tuple[Place, Fault]]:
    found = _metadata_faults(place)
    for fault in found:
        restore(place, fault.path)
    piece = find(place)
    sweep(piece, piece.place.sizes())
    for fault in _piece_faults(piece, checksums):
        withdraw(piece, fault)
        found.append(fault)
    return [(place, fault) for fault in found]


def _drop_faults(place: Place, checksums: bool) -> list[tuple[Place, Fault]]:
    if (drop := latest(place)) is None:
        return []
    sizes, found = drop.place.sizes(), []
    remedy = f"delete {drop.place.url}, then td.drop(store, where=...) again"
    for path, (size, known) in drop.attrs["files"].items():
        if path == METADATA:  # its attrs tell of the files: written after them
            continue
        if sizes.get(path) != size or (checksums and checksum(drop.place.read(path)) != known):
            found.append((drop.place, Fault(path, "damaged or missing", remedy=remedy)))
    return found


def _table(root: Place, found: list[tuple[Place, Fault]]) -> pd.DataFrame:
    """Return faults as rows, with paths in the store, not in the piece."""
    columns = [field.name for field in fields(Fault)]
    prefixes = [place.url[len(root.url) + 1 :] for place, _ in found]
    rows = [
        {**asdict(fault), "path": f"{prefix}/{fault.path}" if prefix else fault.path}
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
        except ValueError:
            path = f"{RECORDS}/{piece.digest[:16]}/{piece.checkpoints[index]}/{block}.json"
            yield Fault(path, "a record that is no JSON", block, index)
            return
        needed = {path: size for path, (size, _) in record["files"].items()}
    for path, size in needed.items():
        if path not in sizes:
            yield Fault(path, _LOST, block, index)
        elif size is not None and sizes[path] != size:
            yield Fault(path, f"{sizes[path]} bytes instead of {size}", block, index)
        elif checksums and checksum(piece.place.read(path)) != record["files"][path][1]:
            yield Fault(path, "other bytes than were written", block, index)


def _template(place: Place) -> dict[str, Any]:
    """Return the inventory of a store by looking for it: its own metadata may be damaged."""
    try:
        return inventory(place)
    except ValueError as err:
        find(place)  # says what is there instead
        raise FileNotFoundError(
            f"the store {place.url!r} has no readable {TEMPLATE} among its records; needed the "
            "list of its files. Save the features to a new store."
        ) from err


def _metadata_faults(place: Place) -> list[Fault]:
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


def _piece_faults(piece: Piece, checksums: bool) -> Iterator[Fault]:
    sizes = piece.place.sizes()
    yield from faults(piece, sizes, checksums=checksums)
    yield from _other_faults(piece, sizes, checksums)


def _other_faults(piece: Piece, sizes: Mapping[str, int], checksums: bool) -> Iterator[Fault]:
    """Yield coords that are damaged, and files that nobody asked for."""
    template = _template(piece.place)
    for path, known in template.items():
        if path.endswith(METADATA):
            continue
        is_there = sizes.get(path) == known["bytes"]
        if is_there and checksums:
            is_there = checksum(piece.place.read(path)) == known["checksum"]
        if not is_there:
            yield Fault(path, "a damaged or missing coord", remedy="td.save(features, new_store)")
    own = {*template, *_possible(piece)}
    for path in sizes:
        if path.startswith((f"{PARTS}/", f"{DROPS}/")):
            continue  # told of by themselves
        if path.endswith(PARTIAL):
            yield Fault(path, "left half written by a writer that was killed", remedy=_REPAIR)
        elif path not in own and not _is_control(piece, path):
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
