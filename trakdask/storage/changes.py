"""Change a store: leave samples out, choose λ anew, assign coords."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import xarray as xr

from trakdask.attribution.grams import require_calibration
from trakdask.files import Folder
from trakdask.samples import normalise_coords
from trakdask.storage.group import DROPPED, Group
from trakdask.storage.lock import lock
from trakdask.storage.matching import kind, require_names
from trakdask.storage.reading import dropped_mask, open, read_coords
from trakdask.storage.sums import update_derived, weights_of
from trakdask.variables import SAMPLE


@contextmanager
def changing(
    store: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, purpose: str
) -> Iterator[Group]:
    """Lock a store, read it, and let count what the block has changed, if that raises nothing."""
    folder = Folder.at(store, storage_options)
    Group.read(folder)  # nothing is written where there is no store, not even a lock
    with lock(folder, purpose) as require_held:
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
    with changing(store, storage_options, "td.drop") as group:
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
    with changing(store, storage_options, "td.calibrate") as group:
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
    with changing(store, storage_options, "td.assign_coords") as group:
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
    new = normalise_coords({name: values}, (), n_all if is_whole else n_shown)[name]
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
