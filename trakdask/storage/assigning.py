"""Metadata of saved samples that is corrected, or added, without computing anything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from trakdask.files import Folder
from trakdask.samples import normalise_coords
from trakdask.storage.coords import kind_of, require_names
from trakdask.storage.history import write_edit
from trakdask.storage.lease import lease
from trakdask.storage.opening import open
from trakdask.storage.parts import ASSIGNED, write_coords
from trakdask.storage.snapshot import Snapshot, completed, require_settled, snapshot
from trakdask.variables import SAMPLE

__all__ = ["assign_coords"]


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
        Folder or fsspec URL that :func:`save` wrote, complete.
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
        If the store is not complete, or an append to it was cut short: finish that first.
    StoreBusyError
        If another process writes the store.

    Notes
    -----
    The values lie beside the features, with checksums, and count all at once or not at all,
    whatever is killed. Nothing is computed, so a coord that the model read (such as the label)
    changes in the metadata only: its gradients are those of the old values. Cost: all coords that
    were ever assigned are written again.

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
    folder = Folder.at(store, storage_options)
    if not isinstance(coords, Mapping) or not coords:
        raise TypeError(
            f"expected coords as a mapping from names to values, got {coords!r:.60} "
            f"({type(coords).__name__}); try td.assign_coords(store, {{'label': labels}})"
        )
    require_names(coords)
    snapshot(folder)  # nothing is written where there is no store
    with lease(folder, "td.assign_coords"):
        before = completed(snapshot(folder))
        require_settled(before, "td.assign_coords")
        values = _all_values(before, coords)
        names = sorted(values)
        write_edit(
            folder, ASSIGNED, {"pieces": len(before.parts), "coords": names},
            lambda _, store: write_coords(store, xr.Dataset(coords=values)),
        )  # fmt: skip
        folder.sweep()
    return open(store, storage_options=storage_options)


def _all_values(before: Snapshot, coords: Mapping[str, Any]) -> dict[str, xr.Variable]:
    """Return the values of all samples, of what is assigned now and of what was before."""
    dropped = before.dropped()
    names = [] if before.assigned is None else list(before.assigned.attrs["coords"])
    # Nothing else is read: what is damaged can be assigned anew.
    values = before.coords(set(names) - set(coords))
    for name, given in coords.items():
        values[name] = _whole(name, given, dropped, before)
    return values


def _whole(name: str, given: Any, dropped: np.ndarray, store: Snapshot) -> xr.Variable:
    """Return values of all samples: dropped ones keep theirs where none are given."""
    if isinstance(given, xr.DataArray) and given.dims != (SAMPLE,):
        raise ValueError(
            f"expected the coord {name!r} along ({SAMPLE!r},), got the dimensions {given.dims}; "
            "try .values if it has one value per sample"
        )
    n_all, n_shown = len(dropped), int((~dropped).sum())
    is_whole = not dropped.any() or (hasattr(given, "__len__") and len(given) == n_all)
    new = normalise_coords({name: given}, (), n_all if is_whole else n_shown)[name]
    if is_whole:
        return xr.Variable((SAMPLE,), new)
    before = store.coords({name}).get(name)
    if before is None or kind_of(before.dtype) != kind_of(new.dtype):
        was = "new" if before is None else f"{kind_of(before.dtype)} so far"
        raise ValueError(
            f"expected values of all {n_all} samples for the coord {name!r}, which is {was}, since "
            f"{n_all - n_shown} of them were dropped, got {n_shown}; try values along "
            "td.open(store, dropped=True)"
        )
    values = before.values.astype(np.result_type(before.dtype, new.dtype))
    values[~dropped] = new
    return xr.Variable((SAMPLE,), values, before.attrs)
