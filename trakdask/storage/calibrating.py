"""Choose λ of a store that exists, and decompose its gram matrix, once for all queries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import xarray as xr

from trakdask.attribution.dampings import require_calibration
from trakdask.files import Folder
from trakdask.storage.group import Group
from trakdask.storage.lock import lock
from trakdask.storage.opening import open
from trakdask.storage.sums import update_factors, weights_of
from trakdask.variables import validate

__all__ = ["calibrate"]


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
    if held_out is not None:
        validate(held_out, ["feature", "output"], what="held_out")
    if held_out is not None:
        validate(held_out, ["feature", "output"], what="held_out")
    folder = Folder.at(store, storage_options)
    Group.read(folder)  # nothing is written where there is no store
    with lock(folder, "td.calibrate") as require_held:
        before, group = Group.read(folder), Group.read(folder)
        before.require_complete()
        if weights_of(before) is None:
            raise ValueError(
                f"expected a store with a gram matrix, got {folder.url!r} with "
                f"{sorted(before.arrays)}; try td.save(features, store) with gram=True"
            )
        if held_out is not None:
            require_calibration(open(store, storage_options=storage_options), held_out)
        update_factors(before, group, held_out, again=True)
        require_held()
        group.commit()
        group.sweep()
    return open(store, storage_options=storage_options)
