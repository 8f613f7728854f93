"""What is wrong with a store: torn, changed, lost and foreign files, each with its remedy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import pandas as pd

from trakdask.files import Folder, is_partial
from trakdask.storage.history import (
    KINDS,
    RUNS,
    damaged_files,
    last_edit,
    obsolete_edits,
)
from trakdask.storage.lease import lease
from trakdask.storage.parts import (
    ASSIGNED,
    DROPS,
    FACTORS,
    GRAM,
    LEASE,
    METADATA,
    PARTS,
    RECORDS,
    TEMPLATE,
    UNFINISHED,
    ChunkFiles,
    Part,
)
from trakdask.storage.snapshot import find_part, part_folders, unmade_folders
from trakdask.storage.zarr_stores import checksum

__all__ = ["completed_blocks", "faults", "inventory", "verify", "withdraw"]

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
    folder = Folder.at(store, storage_options)
    for name, value in {"checksums": checksums, "repair": repair}.items():
        if not isinstance(value, bool):
            raise TypeError(f"expected {name}=True or False, got {value!r:.60}; try {name}=True")
    if RECORDS not in folder.names():
        _template(folder)  # says what is there instead; a lease would make a folder
    if not repair:
        return _table(folder, _all_faults(folder, checksums, repair=False))
    with lease(folder, "td.verify"):
        before = _all_faults(folder, checksums, repair=True)
        edits = [edited for kind in KINDS for edited in _obsolete(folder, kind)]
        for unused in [*unmade_folders(folder), *edits]:
            unused.remove()
        folder.sweep()
        return _table(folder, before)


@dataclass(frozen=True)
class Fault:
    """A file that is not what it should be."""

    path: str
    found: str
    block: str = ""
    checkpoint: int = -1
    remedy: str = _SAVE


def faults(
    part: Part, sizes: Mapping[str, int], done: Sequence[set[str]], *, checksums: bool = False
) -> list[Fault]:
    """Return the damaged files of the blocks that are done, by a listing of the part."""
    files = ChunkFiles(part)
    return [
        fault
        for index, blocks in enumerate(done)
        for block in sorted(blocks)
        for fault in _block_faults(part, files, sizes, block, index, checksums)
    ]


def completed_blocks(part: Part, files: Iterable[str]) -> list[set[str]]:
    """Return what :meth:`Part.done` returns of each checkpoint, by a listing of the part."""
    prefix = f"{RECORDS}/{part.digest[:16]}/"
    done: dict[str, set[str]] = {name: set() for name in part.checkpoints}
    for path in files:
        name, _, block = path.removeprefix(prefix).rpartition("/")
        if path.startswith(prefix) and name in done and block.endswith(".json"):
            done[name].add(block.removesuffix(".json"))
    return [done[name] for name in part.checkpoints]


def withdraw(part: Part, fault: Fault) -> None:
    """Remove the record of a damaged block: it does not count until it is computed again."""
    if fault.checkpoint >= 0:
        part.records.remove(part.record(fault.checkpoint, fault.block))


def _all_faults(folder: Folder, checksums: bool, repair: bool) -> list[tuple[Folder, Fault]]:
    of_parts = [
        (part, fault)
        for part, assigned in _parts_with_assigned(folder)
        for fault in _faults_of(part, checksums, repair, assigned)
    ]
    partial = (path for path in folder.sizes() if is_partial(path))
    text = "left half written by a writer that was killed"
    of_writers = [(folder, Fault(path, text, remedy=_REPAIR)) for path in partial]
    return of_parts + _edit_faults(folder, checksums) + _unused_faults(folder) + of_writers


def _parts_with_assigned(folder: Folder) -> list[tuple[Folder, set[str]]]:
    """Return where the parts are, and the coords of each that were assigned anew since."""
    try:
        edit = last_edit(folder, ASSIGNED)
    except ValueError:
        edit = None  # reported where edits are
    names, covered = (set[str](), 0) if edit is None else (set(edit.attrs["coords"]), edit.n_parts)
    return [(part, names if n < covered else set()) for n, part in enumerate(part_folders(folder))]


def _faults_of(folder: Folder, checksums: bool, repair: bool, assigned: set[str]) -> list[Fault]:
    """Return what is wrong with the part in a folder; if asked for, repair what can be."""
    of_metadata = _metadata_faults(folder)
    if of_metadata and not repair:
        return of_metadata  # what they describe cannot be known
    for fault in of_metadata:
        restore(folder, fault.path)
    part = find_part(folder)
    others = list(_part_faults(part, checksums, assigned))
    for fault in others if repair else ():
        withdraw(part, fault)
    return of_metadata + others


def _edit_faults(folder: Folder, checksums: bool) -> list[tuple[Folder, Fault]]:
    """Return what is wrong with the last edit of each kind."""
    faults = []
    for kind in KINDS:
        try:
            edit = last_edit(folder, kind)
        except ValueError as err:
            faults.append((folder, Fault(kind, "damaged metadata", remedy=str(err))))
            continue
        if edit is None:
            continue
        for path in damaged_files(edit, checksums=checksums):
            # A drop would start from what is damaged.
            first = f"delete {edit.folder.url}, then " if kind == DROPS else ""
            remedy = f"{first}{_AGAIN[kind]} again"
            faults.append((edit.folder, Fault(path, "damaged or missing", remedy=remedy)))
    return faults


def _unused_faults(folder: Folder) -> list[tuple[Folder, Fault]]:
    """Return what was left of appends and edits that were cut short before they counted."""
    text = "left of an append that was cut short before its first block"
    faults = [(part, Fault("", text, remedy=_REPAIR)) for part in unmade_folders(folder)]
    for kind in KINDS:
        text = f"left of {_AGAIN[kind]} that was cut short, or that a later one replaced"
        for edited in _obsolete(folder, kind):
            faults.append((edited, Fault("", text, remedy=_REPAIR)))
    return faults


def _obsolete(folder: Folder, kind: str) -> list[Folder]:
    try:
        return obsolete_edits(folder, kind)
    except ValueError:  # damaged: reported, and nothing of its kind is removed
        return []


def _table(store: Folder, faults: list[tuple[Folder, Fault]]) -> pd.DataFrame:
    """Return faults as rows, with paths in the store, not in the part."""
    columns = [field.name for field in fields(Fault)]
    prefixes = [folder.url[len(store.url) + 1 :] for folder, _ in faults]
    rows = [
        {**asdict(fault), "path": "/".join(filter(None, (prefix, fault.path)))}
        for prefix, (_, fault) in zip(prefixes, faults, strict=True)
    ]
    return pd.DataFrame(rows, columns=columns)


def _block_faults(
    part: Part,
    files: ChunkFiles,
    sizes: Mapping[str, int],
    block: str,
    index: int,
    checksums: bool,
) -> Iterator[Fault]:
    needed = files.of(block, index)
    if checksums:
        try:
            record = part.records.read_json(part.record(index, block))
            needed = {path: size for path, (size, _) in record["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            path = f"{RECORDS}/{part.digest[:16]}/{part.record(index, block)}"
            yield Fault(path, "a record that cannot be read", block, index)
            return
    for path, size in needed.items():
        if path not in sizes:
            yield Fault(path, _LOST, block, index)
        elif size is not None and sizes[path] != size:
            yield Fault(path, f"{sizes[path]} bytes instead of {size}", block, index)
        elif checksums and checksum(part.folder.read(path)) != record["files"][path][1]:
            yield Fault(path, "other bytes than were written", block, index)


def _template(folder: Folder) -> dict[str, Any]:
    """Return the inventory of a store by looking for it: its own metadata may be damaged."""
    try:
        return inventory(folder)
    except ValueError as err:
        find_part(folder)  # says what is there instead
        raise FileNotFoundError(
            f"expected a readable {TEMPLATE}, the list of its files, among the records of the "
            f"store {folder.url!r}, got none; try saving the features to a new store"
        ) from err


def _metadata_faults(folder: Folder) -> list[Fault]:
    faults = []
    for path, known in _template(folder).items():
        if not path.endswith(METADATA):
            continue
        try:
            is_same = checksum(folder.read(path)) == known["checksum"]
        except FileNotFoundError:
            is_same = False
        if not is_same:
            faults.append(Fault(path, "damaged or missing metadata", remedy=_REPAIR))
    return faults


def _part_faults(part: Part, checksums: bool, assigned: set[str]) -> Iterator[Fault]:
    sizes = part.folder.sizes()
    yield from faults(part, sizes, completed_blocks(part, sizes), checksums=checksums)
    yield from _other_faults(part, sizes, checksums, assigned)


def _other_faults(
    part: Part, sizes: Mapping[str, int], checksums: bool, assigned: set[str]
) -> Iterator[Fault]:
    """Yield coords that are damaged, and files that nobody asked for."""
    template = _template(part.folder)
    for path, known in template.items():
        if path.endswith(METADATA) or path.partition("/")[0] in assigned:
            continue
        is_there = sizes.get(path) == known["bytes"]
        if is_there and checksums:
            is_there = checksum(part.folder.read(path)) == known["checksum"]
        if not is_there:
            remedy = _COORD.format(name=path.partition("/")[0])
            yield Fault(path, "a damaged or missing coord", remedy=remedy)
    own = {*template, *_possible(part)}
    for path in sizes:
        is_elsewhere = path.startswith(tuple(f"{folder}/" for folder in (PARTS, *KINDS)))
        if is_elsewhere or is_partial(path) or path in own or _is_control(part, path):
            continue
        yield Fault(path, "a foreign file", remedy=f"delete {part.folder.url}/{path}")


def _possible(part: Part) -> Iterator[str]:
    """Yield all files that a complete part may have."""
    record, files = f"{RECORDS}/{part.digest[:16]}", ChunkFiles(part)
    for index, name in enumerate(part.checkpoints):
        for block in (*map(str, range(part.n_blocks)), GRAM):
            yield f"{record}/{name}/{block}.json"
            yield from files.of(block, index, optional=True)


def _is_control(part: Part, path: str) -> bool:
    folder, _, name = path.rpartition("/")
    if folder == RECORDS:
        return name.startswith(LEASE) or name == UNFINISHED
    own = f"{RECORDS}/{part.digest[:16]}"
    return folder == f"{own}/{RUNS}" or path == f"{own}/{TEMPLATE}"


# ------------------------------------------------------------------ the files that it was made with


def inventory(folder: Folder) -> dict[str, Any]:
    """Return the files that a part was made with, found without its own metadata.

    Raises
    ------
    ValueError
        If there is no such list, or it is damaged.
    """
    for name in (folder / RECORDS).names():
        if TEMPLATE in (folder / RECORDS / name).names():
            files = (folder / RECORDS / name).read_json(TEMPLATE)
            if not isinstance(files, dict) or not all(map(_is_described, files.items())):
                raise ValueError(f"{TEMPLATE} of {folder.url!r} is no list of files")
            for path in files:
                if path.startswith("/") or ".." in path.split("/") or "\\" in path:
                    raise ValueError(f"{TEMPLATE} names {path!r}, outside of {folder.url!r}")
            return files
    raise ValueError(f"there is no {TEMPLATE} in {folder.url!r}")


def _is_described(item: tuple[str, Any]) -> bool:
    path, about = item
    fields = {"bytes", "checksum"} | ({"content"} if path.endswith(METADATA) else set())
    return isinstance(about, dict) and fields <= set(about)


def restore(folder: Folder, path: str) -> None:
    """Write metadata again that was damaged, from the copy among the records.

    Raises
    ------
    ValueError
        If the copy is damaged, too.
    """
    copy = inventory(folder)[path]
    data = copy["content"].encode()
    if checksum(data) != copy["checksum"]:
        raise ValueError(
            f"expected a copy of {path!r} in the {TEMPLATE} of {folder.url!r} as it was written, "
            "got other bytes; try restoring both from a backup"
        )
    folder.write(path, data)
