"""What is wrong with a store: chunks that are lost or damaged, and what was left unfinished."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd
import zarr

from trakdask.attribution.grams import DERIVED
from trakdask.files import Folder
from trakdask.storage.changes import changing
from trakdask.storage.group import DROPPED, ERROR, Group, dims_of
from trakdask.storage.reading import VERIFIED
from trakdask.variables import CHECKPOINT

_REPAIR = "td.verify(store, repair=True)"
_REMEDY = f"{_REPAIR}, then td.save(features, store)"
Row = tuple[str, str, int, int, str]


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
    if not repair:
        return _table(_faults(Group.read(Folder.at(store, storage_options)), checksums=checksums))
    with changing(store, storage_options, "td.verify") as group:
        table = _table(_faults(group, checksums=checksums))
        if "unfinished" in group.attrs:
            _give_up(group)
        for path, _, block, checkpoint, _ in table.itertuples(index=False):
            _remove(group, path.partition("/")[0], block, checkpoint)
    return table


def _table(rows: Iterator[Row]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["path", "found", "block", "checkpoint", "remedy"])


def _faults(group: Group, *, checksums: bool) -> Iterator[Row]:
    VERIFIED.clear()  # bytes may have changed without a new time
    for name in group.arrays:
        stored = None if name == ERROR else group.stored_chunks(name)
        array = group.array(name, read_only=True)
        fault_of = functools.partial(_fault, group, array, stored, checksums)
        with ThreadPoolExecutor() as pool:
            yield from filter(None, pool.map(fault_of, group.chunk_indices(name)))
    if "unfinished" in group.attrs:
        yield "", group.about_unfinished(), -1, -1, "the same td.save(...) again"


def _fault(
    group: Group,
    array: zarr.Array[Any],
    stored: set[tuple[int, ...]] | None,
    checksums: bool,
    index: tuple[int, ...],
) -> Row | None:
    """Return the row of a chunk, if anything is wrong with it."""
    name, found = array.basename, ""
    path = f"{name}/{group.chunk_key(name, index)}"
    if stored is not None and index not in stored:
        found = "no such file"
    elif checksums:
        try:
            array.get_block_selection(index)
        except Exception as err:  # of zarr and its codecs, whatever is wrong
            found = f"{type(err).__name__}: {err!s:.200}"
    if not found:
        return None
    if name in group.features:
        return path, found, index[0], index[-1], _REMEDY
    if name in DERIVED:
        checkpoint = index[dims_of(group.arrays[name]).index(CHECKPOINT)]
        return path, found, -1, checkpoint, _REMEDY
    if name == DROPPED:
        remedy = f"{_REPAIR}, which shows all samples, then td.drop(store, ...)"
        return path, found, -1, -1, remedy
    return path, found, -1, -1, f"td.assign_coords(store, {{{name!r}: values}})"


def _remove(group: Group, name: str, block: int, checkpoint: int) -> None:
    """Remove a chunk, and let the store know what it lacks."""
    if name in group.features:
        for damaged in {name, "out_to_loss"}:  # without the latter a block does not count
            middle = (0,) * (len(group.arrays[damaged]["shape"]) - 2)
            (group.folder / damaged).remove(group.chunk_key(damaged, (block, *middle, checkpoint)))
        group.attrs["lacking"] = True
    elif name in (*DERIVED, DROPPED):
        # What is left would be of other samples, or of another gram matrix.
        for derived in (*DERIVED, *((DROPPED,) if name == DROPPED else ())):
            group.arrays.pop(derived, None)


def _give_up(group: Group) -> None:
    """Remove what an unfinished append has stored."""
    target, n, c = group.target(), group.n_samples, len(group.checkpoints)
    del group.attrs["unfinished"]
    first = -(-n // group.block)
    for name in group.features:
        for index in target.stored_chunks(name):
            if index[0] >= first or index[-1] >= c:
                (group.folder / name).remove(group.chunk_key(name, index))
        if n % group.block:  # rows beyond those that count, in the same chunk
            array = target.array(name)
            array[n : first * group.block, ..., :c] = "" if name == ERROR else np.nan
