"""What is wrong with a store: chunks that are lost or damaged, and what was left unfinished."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from trakdask.files import Folder
from trakdask.storage.group import DERIVED, DROPPED, ERROR, Group, chunks_of, dims_of
from trakdask.storage.lock import lock
from trakdask.variables import CHECKPOINT

__all__ = ["verify"]

_REMEDY = "td.verify(store, repair=True), then td.save(features, store)"


def verify(
    store: str | os.PathLike[str],
    *,
    checksums: bool = False,
    repair: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Look for chunks of a store that are damaged or lost.

    Parameters
    ----------
    store
        Folder or fsspec URL that :func:`save` wrote.
    checksums
        Read every chunk, which compares its CRC-32C. Else only look whether it is there.
    repair
        Remove what cannot be read, so that :func:`save` computes these blocks again, and no other.
        Damaged coords stay, until :func:`assign_coords` is given their values; sums are removed,
        until :func:`save` reduces them again; without a readable mask of dropped samples, these are
        shown again. An append that was cut short is given up.
    storage_options
        Given to fsspec with a URL, as xarray does.

    Returns
    -------
    DataFrame with one row per fault: ``path`` in the store, what was ``found``, ``block`` and
    ``checkpoint`` (their numbers; -1 if it belongs to none), and the ``remedy`` to type. Empty if
    nothing is wrong.

    Raises
    ------
    FileNotFoundError
        If there is no such store.
    StoreBusyError
        With ``repair``, if another process writes the store.

    Notes
    -----
    One listing of each array; with ``checksums``, one pass over its bytes, chunk by chunk.
    """
    folder = Folder.at(store, storage_options)
    for name, value in {"checksums": checksums, "repair": repair}.items():
        if not isinstance(value, bool):
            raise TypeError(f"expected {name}=True or False, got {value!r:.60}; try {name}=True")
    group = Group.read(folder)
    if not repair:
        return _table(_faults(group, checksums=checksums))
    with lock(folder, "td.verify") as require_held:
        group = Group.read(folder)
        found = list(_faults(group, checksums=checksums))
        if group.attrs.get("unfinished"):
            _give_up(group)
        for fault in found:
            _remove(group, fault)
        require_held()
        group.commit()
        group.sweep()
    return _table(found)


@dataclass(frozen=True)
class _Fault:
    """A chunk that is not what it should be."""

    path: str
    found: str
    block: int = -1
    checkpoint: int = -1
    remedy: str = _REMEDY


def _table(faults: Any) -> pd.DataFrame:
    columns = [field.name for field in fields(_Fault)]
    return pd.DataFrame([asdict(fault) for fault in faults], columns=columns)


def _faults(group: Group, *, checksums: bool) -> Iterator[_Fault]:
    for name in group.arrays:
        lost = {*(() if name == ERROR else group.absent_chunks(name))}
        for index in np.ndindex(*_counts(group, name)):
            path = group.chunk_path(name, index)
            found = "no such file" if path in lost else ""
            if checksums and not found:
                found = _unreadable(group, name, index)
            if found:
                yield _described(group, name, path, found, index)
    if "unfinished" in group.attrs:
        yield _Fault("", group.about_unfinished(), remedy="the same td.save(...) again")


def _counts(group: Group, name: str) -> list[int]:
    metadata = group.arrays[name]
    pairs = zip(metadata["shape"], chunks_of(metadata), strict=True)
    return [-(-size // chunk) for size, chunk in pairs]


def _unreadable(group: Group, name: str, index: tuple[int, ...]) -> str:
    chunks = chunks_of(group.arrays[name])
    at = tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, chunks, strict=True))
    try:
        group.array(name)[at]
    except Exception as err:  # of zarr and its codecs, whatever is wrong
        return f"{type(err).__name__}: {err!s:.200}"
    return ""


def _described(group: Group, name: str, path: str, found: str, index: tuple[int, ...]) -> _Fault:
    if name in group.features:
        return _Fault(path, found, index[0], index[-1])
    if name in DERIVED:
        at = index[dims_of(group.arrays[name]).index(CHECKPOINT)]
        return _Fault(path, found, checkpoint=at)
    if name == DROPPED:
        again = "td.verify(store, repair=True), which shows all samples, then td.drop(store, ...)"
        return _Fault(path, found, remedy=again)
    return _Fault(path, found, remedy=f"td.assign_coords(store, {{{name!r}: values}})")


def _remove(group: Group, fault: _Fault) -> None:
    """Remove a chunk, and let the store know what it lacks."""
    name = fault.path.partition("/")[0]
    if name in group.features:
        for each in group.features:
            middle = (0,) * (len(group.arrays[each]["shape"]) - 2)
            index = (fault.block, *middle, fault.checkpoint)
            if each == name or each == "out_to_loss":  # without that a block does not count
                group.folder.remove(group.chunk_path(each, index))
        group.attrs["lacking"] = True
    elif name in (*DERIVED, DROPPED):
        # What is left would be of other samples, or of another gram matrix.
        for each in (*DERIVED, *((DROPPED,) if name == DROPPED else ())):
            group.arrays.pop(each, None)


def _give_up(group: Group) -> None:
    """Remove what an unfinished append has stored."""
    target, n, c = group.target(), group.n_samples, len(group.checkpoints)
    del group.attrs["unfinished"]
    first = -(-n // group.block)
    for name in group.features:
        for file in (group.folder / name).names():
            index = file.split(".")[1:]
            if file[:2] == "c." and (int(index[0]) >= first or int(index[-1]) >= c):
                group.folder.remove(f"{name}/{file}")
        if n % group.block:  # rows beyond those that count, in the same chunk
            array = target.array(name, sparse=name == ERROR)
            array[n : first * group.block, ..., :c] = "" if name == ERROR else np.nan
