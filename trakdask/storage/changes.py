"""Change a store: leave samples out, choose λ anew, assign coords, find and remove damage."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
import zarr

from trakdask.attribution.grams import DERIVED, require_calibration
from trakdask.files import Folder, naming
from trakdask.samples import normalise_coords
from trakdask.storage.group import DROPPED, ERROR, Group, kind
from trakdask.storage.lock import lock
from trakdask.storage.reading import VERIFIED, dropped_mask, open, read_coords
from trakdask.storage.saving import require_names
from trakdask.storage.sums import update_derived, weights_of
from trakdask.variables import SAMPLE

_REPAIR = "td.verify(store, repair=True)"
_REMEDY = f"{_REPAIR}, then td.save(features, store)"
Row = tuple[str, str, int, int, str]


@contextmanager
def _changing(
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


def drop(
    store: str | os.PathLike[str],
    *,
    where: xr.DataArray | Callable[[xr.Dataset], xr.DataArray],
    storage_options: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Leave samples out of a store from now on, and out of the gram matrix that it keeps.

    Parameters
    ----------
    store
        Folder or fsspec URL that :func:`save` wrote, complete.
    where
        True for the samples to drop: boolean (sample), along what :func:`open` returns; or a
        function of that Dataset, as in ``where=lambda ds: ds.source == "spam"``.
    storage_options
        Given to fsspec with a URL, as xarray does.

    Returns
    -------
    What :func:`open` returns from now on.

    Raises
    ------
    ValueError
        If ``where`` is no boolean (sample), or drops all.
    IncompleteFeaturesError
        If the store is not complete.
    StoreBusyError
        If another process writes the store.

    Notes
    -----
    The features stay on the disk; ``td.open(store, dropped=True)`` shows and marks them. What is
    kept beside them is reduced again from what is left, in one pass over the features. Where λ and
    the eigenvectors of the gram matrix are stored, they are computed again, with λ chosen by
    training samples.

    Examples
    --------
    >>> import tempfile
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = td.save(features, f"{folder}/f.zarr", progress=False)
    ...     left = td.drop(f"{folder}/f.zarr", where=saved.label == 1)
    ...     left.sizes["sample"]
    4
    """
    with _changing(store, storage_options, "td.drop") as group:
        group.require_complete()
        chosen = _chosen(open(store, storage_options=storage_options), where)
        if chosen.any():
            before, mask = copy.deepcopy(group), dropped_mask(group)
            mask[np.flatnonzero(~mask)[chosen]] = True
            group.write_small({DROPPED: xr.Variable(SAMPLE, mask)})
            update_derived(before, group, weights_of(before))
    return open(store, storage_options=storage_options)


def _chosen(ds: xr.Dataset, where: Any) -> np.ndarray:
    """Return which of the samples are to be dropped."""
    mask = where(ds) if callable(where) else where
    content = f"{mask!r:.60} ({type(mask).__name__})"
    if isinstance(mask, xr.DataArray):
        content = f"{mask.dtype} {dict(mask.sizes)}"
        if mask.dtype == bool and dict(mask.sizes) == {SAMPLE: ds.sizes[SAMPLE]}:
            chosen = np.asarray(mask.values)
            if not chosen.all():
                return chosen
            content = f"true for all {len(chosen)}"
    raise ValueError(
        f"expected where= as a boolean DataArray ({SAMPLE}: {ds.sizes[SAMPLE]}), true for some "
        f"samples, or a function that returns one, got {content}; try "
        "where=lambda ds: ds.source == 'spam', with a coord of yours"
    )


def calibrate(
    store: str | os.PathLike[str],
    held_out: xr.Dataset | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Store λ and the eigenvectors of the gram matrix, so that no query computes them.

    :func:`save` does this, too; this is to choose λ anew, and for a proj_dim above 8192.

    Parameters
    ----------
    store
        Folder or fsspec URL that :func:`save` wrote, complete, with its gram matrix.
    held_out
        Features of 50 or more held-out samples whose outputs choose λ, as ``calibrate=`` of
        :func:`damping`; by default training samples choose.
    storage_options
        Given to fsspec with a URL, as xarray does.

    Returns
    -------
    What :func:`open` returns from now on.

    Raises
    ------
    ValueError
        If the store has no gram matrix, or ``held_out`` cannot choose λ for its estimator.
    StoreMismatchError
        If ``held_out`` was featurized in another way.
    IncompleteFeaturesError
        If the store is not complete.
    StoreBusyError
        If another process writes the store.

    Notes
    -----
    Cost: one eigendecomposition per checkpoint, about 9 p³ flops and 32 p² bytes in a task, unless
    the store has it already; the features of up to 1000 training samples are read to choose λ. For
    a store of ``estimator="trak"`` whose λ is chosen by outputs (classification), one pass over the
    features as well. Features are not computed again.

    Examples
    --------
    >>> import tempfile
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = td.save(features, f"{folder}/f.zarr", progress=False)
    ...     td.calibrate(f"{folder}/f.zarr").damping.attrs["rule"]
    '0.03 tr(K^2)/tr(K)'
    """
    with _changing(store, storage_options, "td.calibrate") as group:
        group.require_complete()
        weights = weights_of(group)
        if weights is None:
            raise ValueError(
                f"expected a store with a gram matrix, got {group.folder.url!r} with "
                f"{sorted(group.arrays)}; try td.save(features, store) with gram=True"
            )
        if held_out is not None:
            require_calibration(open(store, storage_options=storage_options), held_out)
        update_derived(copy.deepcopy(group), group, weights, held_out, anew=True)
    return open(store, storage_options=storage_options)


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
        Given to fsspec with a URL, as xarray does.

    Returns
    -------
    What :func:`open` returns from now on.

    Raises
    ------
    TypeError, ValueError
        If a name cannot be used, or values are not one per sample; also if a coord is new, or of
        another kind, and values of dropped samples are not given.
    IncompleteFeaturesError
        If the store is not complete.
    StoreBusyError
        If another process writes the store.

    Notes
    -----
    The values count all at once or not at all, whatever is killed. Nothing is computed, so a coord
    that the model read (such as the label) changes in the metadata only: its gradients are those of
    the old values. Cost: the named coords are written.

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
    require_names(coords)
    with _changing(store, storage_options, "td.assign_coords") as group:
        group.require_complete()
        dropped = dropped_mask(group)
        group.write_small(
            {name: _of_all(name, values, dropped, group) for name, values in coords.items()}
        )
    return open(store, storage_options=storage_options)


def _of_all(name: str, values: Any, dropped: np.ndarray, group: Group) -> xr.Variable:
    """Return values of all samples: dropped ones keep theirs that have none here."""
    if isinstance(values, xr.DataArray) and values.dims != (SAMPLE,):
        raise ValueError(
            f"expected the coord {name!r} along ({SAMPLE!r},), got the dimensions {values.dims}; "
            "try .values if it has one value per sample"
        )
    n_all, n_shown = len(dropped), int((~dropped).sum())
    is_whole = not dropped.any() or (hasattr(values, "__len__") and len(values) == n_all)
    new = normalise_coords({name: values}, n_all if is_whole else n_shown)[name]
    if is_whole:
        return xr.Variable((SAMPLE,), new)
    before = read_coords(group, {name}).get(name)  # only here: what is damaged can be assigned anew
    if before is None or kind(before.dtype) != kind(new.dtype):
        was = "new" if before is None else f"{kind(before.dtype)} so far"
        raise ValueError(
            f"expected values of all {n_all} samples for the coord {name!r}, which is {was}, since "
            f"{n_all - n_shown} of them were dropped, got {n_shown}; try values along "
            "td.open(store, dropped=True)"
        )
    joint = before.values.astype(np.result_type(before.dtype, new.dtype))
    joint[~dropped] = new
    return xr.Variable((SAMPLE,), joint, before.attrs)


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
    with _changing(store, storage_options, "td.verify") as group:
        table = _table(_faults(group, checksums=checksums))
        if "unfinished" in group.attrs:
            _give_up(group)
        for path, _, block, checkpoint, _ in table.itertuples(index=False):
            _remove(group, path, block, checkpoint)
    return table


def _table(rows: Iterator[Row]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["path", "found", "block", "checkpoint", "remedy"])


def _faults(group: Group, *, checksums: bool) -> Iterator[Row]:
    VERIFIED.clear()  # bytes may have changed without a new time
    for name in group.arrays:
        array, indices = group.array(name, read_only=True), [*group.chunk_indices(name)]
        stored = {*indices} if name == ERROR else group.stored_chunks(name)
        faults = {index: "no such file" for index in indices if index not in stored}
        if checksums:
            with ThreadPoolExecutor() as pool:
                damage = pool.map(functools.partial(_damage, array), stored)
                faults |= zip(stored, damage, strict=True)
        (block, checkpoint), remedy = _about(group, name)
        for index in filter(faults.get, indices):
            path = f"{name}/{group.chunk_key(name, index)}"
            numbers = (-1, *index)
            yield path, faults[index], numbers[block], numbers[checkpoint], remedy
    if "unfinished" in group.attrs:
        yield "", group.about_unfinished(), -1, -1, "the same td.save(...) again"


def _damage(array: zarr.Array[Any], index: tuple[int, ...]) -> str:
    """Return what is wrong with a chunk; nothing if it can be read."""
    try:
        array.get_block_selection(index)
    except Exception as err:  # of zarr and its codecs, whatever is wrong
        return f"{type(err).__name__}: {err!s:.200}"
    return ""


def _about(group: Group, name: str) -> tuple[tuple[int, int], str]:
    """Return where in (-1, *index) block and checkpoint of a chunk are, and how to restore it."""
    if name in group.features:
        return (1, -1), _REMEDY
    if name in DERIVED:
        return (0, -1), _REMEDY
    if name == DROPPED:
        return (0, 0), f"{_REPAIR}, which shows all samples, then td.drop(store, ...)"
    return (0, 0), f"td.assign_coords(store, {{{name!r}: values}})"


def _remove(group: Group, path: str, block: int, checkpoint: int) -> None:
    """Remove a chunk, and let the store know what it lacks."""
    name = path.partition("/")[0]
    if name in group.features:
        group.folder.remove(path)
        # Without this chunk a block does not count.
        (group.folder / "out_to_loss").remove(group.chunk_key("out_to_loss", (block, checkpoint)))
        group.attrs["lacking"] = True
    elif name in (*DERIVED, DROPPED):
        # What is left would be of other samples, or of another gram matrix.
        for derived in {*DERIVED, name}:
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
