"""Change a store: assign coords, find and remove damage."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import dask
import numpy as np
import pandas as pd
import xarray as xr
import zarr

from trakdask.arrays.memory import verified
from trakdask.checks import require_flags, shown
from trakdask.execution import memory_limit, run
from trakdask.files import Folder, naming
from trakdask.samples.coords import by_name, normalise_coords
from trakdask.storage.coords import joined_exactly, require_names
from trakdask.storage.group import DROPPED, ERROR, Group, chunks_of
from trakdask.storage.lock import lock
from trakdask.storage.reading import VERIFIED, dropped_mask, open, read_coords
from trakdask.storage.unfinished import about_unfinished, pack, packed_rows, path_of, stored_records
from trakdask.variables import (
    CHECKPOINT,
    DERIVED,
    FITTED,
    SAMPLE,
    TRAINED_ON,
    aligned,
    require_alike,
)

_REPAIR = "td.verify(store, repair=True)"
_REMEDY = f"{_REPAIR}, then td.save(features, store)"
_READERS = 8
"""Chunks that are read at once, where the machine has the memory."""


@contextmanager
def changing(
    store: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, purpose: str
) -> Iterator[Group]:
    """Lock a store, read it, and let count what the block has changed, if that raises nothing."""
    folder = Folder.at(store, storage_options)
    Group.read(folder)  # nothing is written where there is no store, not even a lock
    remedy = f"the store is as it was before: try {purpose} again when the cause is gone"
    with naming(folder.url, remedy), lock(folder, purpose) as require_held:
        group = Group.read(folder)  # again: another writer may have just finished
        yield group
        require_held()  # while this process slept, another one may have taken it for dead
        group.commit()
        group.sweep()


def assign_coords(
    store: str | os.PathLike[str],
    coords: Mapping[str, Any],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Change the metadata of the samples in a store, or add some; features stay as they are.

    Parameters
    ----------
    store
        Folder or fsspec URL that :func:`save` wrote.
    coords
        Name -> values (sample,), as of :func:`from_arrays`: numbers, booleans, text or times, along
        what :func:`open` returns; or along ``td.open(store, dropped=True)``, with the samples that
        :func:`drop` left out. Coords of other names stay as they are.
    storage_options
        As in :func:`save`.

    Returns
    -------
    What :func:`open` returns from now on.

    Raises
    ------
    TypeError, ValueError
        If a name cannot be used, or values are not one per sample; also if a coord is new, or of
        another kind, and values of dropped samples are missing.
    FileNotFoundError
        If there is no such store.
    IncompleteFeaturesError
        If the store is not complete.
    StoreBusyError
        If another process writes the store.

    Warns
    -----
    UserWarning
        If the model has read a variable or coord of this name, such as the label: its gradients
        stay as they were.

    Notes
    -----
    The values count all at once or not at all, whatever is killed. Nothing is computed. Cost:
    the named coords are written.

    Examples
    --------
    >>> import tempfile
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=4, proj_dim=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = td.save(features, f"{folder}/f.zarr", progress=False)
    ...     opened = td.assign_coords(f"{folder}/f.zarr", {"animal": ["cat", "dog", "dog", "cat"]})
    ...     opened.animal.values.tolist()
    ['cat', 'dog', 'dog', 'cat']
    """
    require_names({*by_name(coords)} - {TRAINED_ON})
    with changing(store, storage_options, "td.assign_coords") as group:
        group.require_complete()
        dropped = dropped_mask(group)
        small = {name: values for name, values in coords.items() if name != TRAINED_ON}
        if read := sorted({*json.loads(group.attrs.get("inputs", "[]"))} & {*small}):
            warnings.warn(
                f"expected coords that the model has not read, got {read}, which it has: features, "
                "and so scores, are still of the values that it has read; try features of the "
                "changed samples in another store, where they matter",
                stacklevel=2,
            )
        if TRAINED_ON in coords:
            _write_trained_on(group, coords[TRAINED_ON], dropped)
        group.write_variables(
            {name: _of_all(name, values, dropped, group, small) for name, values in small.items()}
        )
    return open(store, storage_options=storage_options)


def _write_trained_on(group: Group, values: Any, dropped: np.ndarray) -> None:
    """Write which checkpoints were trained on which samples, beside what counts so far.

    Dropped samples keep theirs, unless there are values of all samples.
    """
    is_whole = getattr(values, "sizes", {}).get(SAMPLE, -1) == len(dropped)
    ds = open(group.folder.url, storage_options=group.folder.options, dropped=is_whole)
    sizes = {dim: ds.sizes[dim] for dim in (SAMPLE, CHECKPOINT)}
    if isinstance(values, xr.DataArray) and set(values.dims) == set(sizes):
        values = aligned(values, ds, what=TRAINED_ON)
    if not isinstance(values, xr.DataArray) or values.dtype != bool or values.sizes != sizes:
        raise ValueError(
            f"expected {TRAINED_ON!r} as a bool DataArray {sizes}, got {shown(values)}; try "
            "masks.rename(subset='checkpoint'), with masks of td.evaluate.subsets"
        )
    # As a store without these masks is read: all were trained on all.
    mask = np.ones((len(dropped), len(group.checkpoints)), bool)
    is_whole = sizes[SAMPLE] == len(dropped)
    if not is_whole and TRAINED_ON in group.arrays:
        group.require_chunks(TRAINED_ON)
        mask = np.asarray(group.array(TRAINED_ON, read_only=True)[...])
    mask[slice(None) if is_whole else ~dropped] = values.transpose(SAMPLE, CHECKPOINT).values
    group.add(TRAINED_ON, sizes | {SAMPLE: len(mask)}, bool, block=packed_rows(group))
    group.array(TRAINED_ON)[:] = mask


def _of_all(
    name: str, values: Any, dropped: np.ndarray, group: Group, changed: Collection[str]
) -> xr.Variable:
    """Return values of all samples: dropped ones keep theirs that have none here."""
    if isinstance(values, xr.DataArray) and values.dims != (SAMPLE,):
        raise ValueError(
            f"expected the coord {name!r} along ({SAMPLE!r},), got the dimensions {values.dims}; "
            "try .values if it has one value per sample"
        )
    n_all, n_shown = len(dropped), int((~dropped).sum())
    is_whole = not dropped.any() or (hasattr(values, "__len__") and len(values) == n_all)
    if isinstance(values, xr.DataArray):
        # Its own coords say to which samples values belong, but for those that this call changes.
        others = xr.Dataset(coords=read_coords(group, {*map(str, values.coords)} - {*changed}))
        rows = slice(None) if is_whole else ~dropped
        require_alike(values, others.isel({SAMPLE: rows}, missing_dims="ignore"), what=name)
    new = normalise_coords({name: values}, n_all if is_whole else n_shown)[name]
    if is_whole:
        return xr.Variable((SAMPLE,), new)
    before = read_coords(group, {name}).get(name)  # only here: a damaged coord can be assigned anew
    # Old values and new ones have to fit into one dtype, of which then those rows are taken that
    # were not dropped.
    joint = None if before is None else joined_exactly(before, xr.Variable((SAMPLE,), new), SAMPLE)
    if before is None or joint is None:
        was = "new" if before is None else f"{before.dtype} so far, and now {new.dtype}"
        raise ValueError(
            f"expected values of all {n_all} samples for the coord {name!r}, which is {was}, since "
            f"{n_all - n_shown} of them were dropped, got {n_shown}; try values along "
            "td.open(store, dropped=True)"
        )
    values = joint[:n_all].values
    values[~dropped] = joint[n_all:].values
    return xr.Variable((SAMPLE,), values, before.attrs)


# ------------------------------------------------------------------------------------------- erase


def erase_dropped(group: Group) -> None:
    """Overwrite whatever a store has of its dropped samples; the same call goes on after a kill.

    Chunks of features are replaced where they are, each as a whole, since their other rows stay:
    it does no harm that some are before the commit, because dropped rows count no more. Other
    arrays get the names of chunks that do not count yet.
    """
    dropped, before = dropped_mask(group), copy.deepcopy(group)
    if not dropped.any():
        return
    # 1. Features.
    feature, block = group.array("feature"), group.block
    bounds = [(start, min(start + block, len(dropped))) for start in range(0, len(dropped), block)]
    # Only blocks with a dropped sample, each at all checkpoints.
    tasks = [
        dask.delayed(_erase_rows)(feature, slice(*rows), index, dropped[slice(*rows)])
        for rows in bounds
        if dropped[slice(*rows)].any()
        for index in range(len(group.checkpoints))
    ]
    run(lambda: tasks, retries=0)
    # 2. Numbers.
    pack(before, group, dropped)
    # 3. Coords, in which dropped samples then have a value that says nothing.
    coords = read_coords(group, {*group.coords} - {CHECKPOINT, DROPPED})
    erased: dict[str, xr.Variable] = {}
    for name, coord in coords.items():
        if SAMPLE in coord.dims:
            nothing: dict[str, Any] = {"f": np.nan, "T": "", "U": "", "O": ""}
            times = np.array("NaT", coord.dtype) if coord.dtype.kind in "mM" else 0
            values = coord.values.copy()
            gone = tuple(dropped if dim == SAMPLE else slice(None) for dim in coord.dims)
            values[gone] = nothing.get(coord.dtype.kind, times)
            erased[name] = xr.Variable(coord.dims, values, coord.attrs)
    group.write_variables(erased)
    group.attrs["erased"] = True  # so that no later call of save brings any of them back


def _erase_rows(feature: zarr.Array[Any], rows: slice, index: int, gone: np.ndarray) -> None:
    region = (rows, slice(None), slice(index, index + 1))
    values = np.asarray(feature[region])
    # A call that goes on after a kill need not write what is done.
    if not np.isnan(values[gone]).all():
        values[gone] = np.nan
        feature[region] = values


# ------------------------------------------------------------------------------------------ damage


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
        Remove what cannot be read, so that :func:`save` computes these blocks again, and no other;
        of outputs, weights and norms, a chunk has many blocks.
        Damaged coords stay, until :func:`assign_coords` is given their values; sums are removed,
        until :func:`save` reduces them again; without a readable mask of dropped samples, these are
        shown again. An append that was cut short is given up.
    storage_options
        As in :func:`save`.

    Returns
    -------
    DataFrame with one row per fault: ``path`` in the store, the fault ``found``, ``block`` and
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
    One listing of each array; with ``checksums``, one pass over its bytes, up to 8 chunks at once,
    and fewer where memory for 8 is lacking.
    """
    require_flags(checksums=checksums, repair=repair)
    # Whoever only looks needs no lock, and may look while another process writes.
    if not repair:
        group = Group.read(Folder.at(store, storage_options))
        return _table(group, [*_faults(group, checksums=checksums)])
    with changing(store, storage_options, "td.verify") as group:
        faults = [*_faults(group, checksums=checksums)]
        table = _table(group, faults)
        if "unfinished" in group.attrs:  # what this append has stored is removed
            # Its records would be taken for blocks of whatever is appended next.
            target, n, c = group.target(), group.n_samples, len(group.checkpoints)
            for record in stored_records(group):
                if record[0] >= n or record[1] >= c:
                    group.folder.remove(path_of(record))
            del group.attrs["unfinished"]
            for chunk in target.stored_chunks("feature"):
                # The last block that counts may have rows of the append, too: no one reads these.
                if chunk[0] >= -(-n // group.block) or chunk[-1] >= c:
                    (group.folder / "feature").remove(group.chunk_key("feature", chunk))
        for name, index, _ in faults:
            _remove(group, name, index)
    return table


def _table(group: Group, faults: list[tuple[str, tuple[int, ...], str]]) -> pd.DataFrame:
    """Return faults with block and checkpoint of their chunks, and how to restore these."""
    rows = []
    for name, index, what in faults:
        block, checkpoint, remedy = -1, -1, f"td.assign_coords(store, {{{name!r}: values}})"
        if name in (*group.features, *FITTED, *DERIVED):
            block = index[0] if name == "feature" else -1
            checkpoint, remedy = index[-1], _REMEDY
        elif name == DROPPED:
            remedy = f"{_REPAIR}, which shows all samples, then td.drop(store, ...)"
        rows.append((f"{name}/{group.chunk_key(name, index)}", what, block, checkpoint, remedy))
    if "unfinished" in group.attrs:
        rows.append(("", about_unfinished(group), -1, -1, "the same td.save(...) again"))
    return pd.DataFrame(rows, columns=["path", "found", "block", "checkpoint", "remedy"])


def _faults(group: Group, *, checksums: bool) -> Iterator[tuple[str, tuple[int, ...], str]]:
    VERIFIED.clear()  # bytes may have changed without a new time
    for name in group.arrays:
        array, indices = group.array(name, read_only=True), [*group.chunk_indices(name)]
        # Of texts, chunks where nothing failed are not stored.
        stored = {*indices} if name == ERROR else group.stored_chunks(name)
        faults = {index: "no such file" for index in indices if index not in stored}
        if checksums:
            chunk = math.prod(chunks_of(group.arrays[name])) * array.dtype.itemsize
            fit = int(memory_limit(here=True)) // verified(chunk, 1)
            with ThreadPoolExecutor(min(max(fit, 1), _READERS)) as pool:
                damage = pool.map(functools.partial(_damage, array), stored)
                faults |= zip(stored, damage, strict=True)
        for index in filter(faults.get, indices):
            yield name, index, faults[index]


def _damage(array: zarr.Array[Any], index: tuple[int, ...]) -> str:
    """Return the fault of a chunk; nothing if it can be read."""
    try:
        array.get_block_selection(index)
    except Exception as err:  # of zarr and its codecs, whatever is wrong
        return f"{type(err).__name__}: {err!s:.200}"
    return ""


def _remove(group: Group, name: str, index: tuple[int, ...]) -> None:
    """Remove a chunk, and let the store know which blocks it lacks."""
    if name in (*group.features, *FITTED):
        group.folder.remove(f"{name}/{group.chunk_key(name, index)}")
        lacking = group.attrs.setdefault("lacking", [])
        if name in group.features:
            size, b = chunks_of(group.arrays[name])[0], group.block
            rows = range(index[0] * size, min((index[0] + 1) * size, group.n_samples))
            blocks = range(rows.start // b, (rows.stop - 1) // b + 1)
            lacking += [[i, index[-1]] for i in blocks if [i, index[-1]] not in lacking]
            for record in stored_records(group):  # by which these blocks would count as stored
                if record[0] // b in blocks and record[1] == index[-1]:
                    group.folder.remove(path_of(record))
    elif name in (*DERIVED, DROPPED):
        # The other sums would be over other samples, or of another gram matrix.
        for derived in {*DERIVED, name}:
            group.arrays.pop(derived, None)
