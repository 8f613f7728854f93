"""Save features with all that their scores need; leave samples out; choose λ anew."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays.memory import Sizes
from trakdask.arrays.spectra import component_count
from trakdask.attribution.conditions import selection
from trakdask.attribution.damping_rules import require_calibration
from trakdask.attribution.estimators import EstimatorLike, Soft, with_gram
from trakdask.attribution.grams import require_eigenvectors, require_gram
from trakdask.attribution.protocol import GramEstimator
from trakdask.checks import require_choice, require_flags, require_integer
from trakdask.derived import MOST_DIM, estimator_of, update_derived
from trakdask.errors import IncompleteFeaturesError
from trakdask.execution import require_memory
from trakdask.files import Folder
from trakdask.provenance import REQUIRED_SPEC, as_values
from trakdask.storage.changes import changing, erase_dropped
from trakdask.storage.group import DROPPED, Group
from trakdask.storage.reading import dropped_mask, open
from trakdask.storage.unfinished import about_unfinished
from trakdask.storage.writing import by_sets, existing, kept_beside, storable, write
from trakdask.variables import (
    CHECKPOINT,
    FITTED,
    PROJ_DIM,
    PROJ_DIM_1,
    SAMPLE,
    WRONG_CLASSES,
    aligned,
    checkpoint_names,
    validate,
)


def save(
    features: xr.Dataset,
    store: str | os.PathLike[str],
    *,
    estimator: EstimatorLike | None = "auto",
    append_dim: Literal["sample", "checkpoint"] | None = None,
    dtype: Literal["float16"] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = True,
    retries: int = 0,
) -> xr.Dataset:
    """Compute features into a zarr store, block by block; go on where an earlier call stopped.

    Runs on the active Dask client, or on threads. Each checkpoint is one submission, and each task
    stores its block, so that killing anything loses the blocks in flight and nothing else, and
    calling again computes only the missing blocks.

    Parameters
    ----------
    features
        Lazy Dataset of :func:`featurize`.
    store
        Folder or fsspec URL; all workers must reach it.
    estimator
        As in :func:`score`. The store also keeps what scores with this estimator need of all of
        these (training) samples: the gram matrix of each checkpoint, λ as ``damping="auto"``
        chooses it, the only damping that is accepted here, and above proj_dim 1024 the
        eigenvectors of the gram matrix; for :class:`Soft` also the sum of the weighted features,
        ``loss_gradient``. Other estimators can still be used: they reduce theirs from the features.
        ``None`` stores features alone, which is enough for targets.
    append_dim
        ``"sample"`` adds these samples to a store, ``"checkpoint"`` these checkpoints of samples
        that it has, as xarray's ``append_dim`` does. Checkpoints that the store has already are
        left out. The gram matrix of the new samples is added to the stored one. A checkpoint is
        appended to samples that were saved one after another either at once, with features of all
        of them in the order of the store, which their coords have to confirm; or by one call for
        each set. Until the last, :func:`open` shows the store without it, with a warning. An append
        that was cut short has to be finished, by the same call, before another begins.
    dtype
        ``"float16"`` stores features in half the bytes, each row scaled by a power of two: no
        element is off by more than 2^-11 of the largest of its row. :func:`open` gives float32
        again.
    storage_options
        Given to fsspec with a URL, as xarray does.
    progress
        Show a bar of completed blocks.
    retries
        Further attempts at a block or a sum after an error, such as one of a network file system.

    Returns
    -------
    What :func:`open` returns: the saved features, lazy.

    Raises
    ------
    StoreMismatchError
        If the store holds features that were made differently, or coords with other values; the
        differing field or coord is named. :func:`assign_coords` changes coords of a store. Also if
        a block that is stored comes out differently when it is computed again.
    StoreBusyError
        If another process writes the store.
    FileExistsError
        If the store holds something else.
    IncompleteFeaturesError
        If an append is asked for while another is unfinished.
    ValueError
        If a coord has a name that a folder cannot have, or ``estimator`` another damping.
    TypeError
        If ``features`` is no Dataset, or a coord is of a kind that cannot be stored.
    BlockError
        If a block fails, or ends every worker process that it comes to; completed blocks stay.
    MemoryError
        If storing a block, a gram matrix or its eigenvectors would need more memory than any worker
        has; :func:`plan` shows how much. Gradients are not counted.
    OSError
        If a block cannot be stored, with the reason; completed blocks stay.

    Warns
    -----
    UserWarning
        If samples are appended that have the same coords as others in the store, and coords tell
        all samples apart.

    Notes
    -----
    zarr v3, one chunk of features per block, uncompressed (features do not compress), with a
    CRC-32C that every reader checks, NaN fill. Of symmetric matrices only the upper triangle takes
    space. When all blocks are stored, this process packs outputs, weights and norms into chunks of
    many blocks; an append packs them anew. So whoever has opened a store opens it again after an
    append.

    Resuming lists the store once. Any workers, scheduler, blocks and micro-batch may resume it. One
    block that is stored is computed again, the last, and compared: within 1 % of the length of its
    rows (10 % in 16 bits), because gradients may differ in their last digits between machines and
    batches. Chunks are not forced onto the disk: after a power failure, type
    ``td.verify(store, checksums=True)``.

    λ and the eigenvectors are computed once, after the gram matrices: one eigendecomposition per
    checkpoint, about 9 p³ flops and 40 p² bytes in a task (above proj_dim 8192 :func:`calibrate`
    makes them). So no query chooses λ anew. Above proj_dim 1024 the eigenvectors are stored, 4 p²
    bytes, and a query costs two small products; up to it, a factorization of p³/3 flops. An append
    or a drop renews them for the checkpoints that changed.

    Dask counts a worker's death against the task it was running, and gives the task up after
    ``distributed.scheduler.allowed-failures`` (3) of them. Where machines are taken away at any
    time, set it to 10 or more in the configuration of the scheduler, before that starts; setting it
    in a notebook does nothing for a scheduler that runs elsewhere.

    Examples
    --------
    >>> import tempfile
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = td.save(features, f"{folder}/train.zarr", progress=False)
    ...     saved.gram.dims, saved.damping.dims
    (('proj_dim', 'proj_dim_1', 'checkpoint'), ('checkpoint',))
    """
    # 1. What is to be stored, and whose sums.
    options = {"estimator": estimator, "append_dim": append_dim, "dtype": dtype}
    asked = checked_options(features, {**options, "progress": progress, "retries": retries})
    features = storable(features)
    if not (isinstance(asked, Soft) and asked.wrong_classes):  # they would be computed for nothing
        features = features.drop_vars(WRONG_CLASSES, errors="ignore")
    _require_memory(features.feature.data, asked, dtype)

    # 2. Blocks, and the sums once there are all. Nothing is written into other folders than stores,
    # not even a lock.
    folder = Folder.at(store, storage_options)
    there = existing(folder)

    def derive(before: Group, group: Group) -> None:
        is_same = (group.n_samples, group.checkpoints) == (before.n_samples, before.checkpoints)
        # With `estimator=None`, sums that are stored stay as long as they are of all samples.
        kept = asked or (estimator_of(before) if is_same else None)
        if isinstance(kept, Soft):  # features, appended or of the store, have none
            kept = replace(kept, wrong_classes=WRONG_CLASSES in group.arrays)
        update_derived(before, group, kept, retries=retries)

    for part in by_sets(there, features, append_dim) if there else [features]:
        lost = write(part, folder, derive, append_dim, dtype, progress=progress, retries=retries)
    if lost:
        raise IncompleteFeaturesError(
            f"expected all blocks in the store {folder.url!r}, but the samples of {lost} still "
            "lack some; these features were saved, now try td.save with the others"
        )
    # The store has the fit, so that the copy beside it is of no more use.
    if any(name in features for name in FITTED):
        kept_beside(folder).remove()
    return open(store, storage_options=storage_options)


def checked_options(features: xr.Dataset, options: Mapping[str, Any]) -> GramEstimator | None:
    """Refuse features that no store can hold, and options of :func:`save` that are none.

    Returns the estimator whose sums are to be stored.
    """
    estimator, append_dim, dtype = map(options.get, ("estimator", "append_dim", "dtype"))
    require_flags(progress=options.get("progress", True))
    require_integer("retries", options.get("retries", 0), 0, remedy="try retries=0")
    validate(features, ("feature", "out_to_loss"), what="features")
    if isinstance(estimator, GramEstimator) and estimator.rule != "auto":
        raise ValueError(
            f"expected an estimator with damping='auto', since appends choose the λ of a store "
            f"anew, got {estimator}; try {estimator.with_damping('auto')} here, and the damping "
            "in td.score"
        )
    # A selection of columns does not select those of square matrices, whose second axis has another
    # name.
    p = features.sizes[PROJ_DIM]
    if (both := features.sizes.get(PROJ_DIM_1, p)) != p:
        raise ValueError(
            f"expected features with all {both} columns of their fit, got {p}, beside matrices of "
            "all; try td.save before isel(proj_dim=...), or features.drop_dims('proj_dim_1')"
        )
    if dtype is not None:
        require_choice("dtype", dtype, ("float16",), remedy="try dtype=None to keep theirs")
        if features.feature.dtype != np.float32:
            raise ValueError(
                f"expected float32 features for dtype='float16', got {features.feature.dtype}; try "
                "features.assign(feature=features.feature.astype('float32'))"
            )
    if append_dim is not None:
        remedy = "try append_dim=None for a new store"
        require_choice("append_dim", append_dim, (SAMPLE, CHECKPOINT), remedy=remedy)
    if not all(features.sizes.values()):
        raise ValueError(
            f"expected features with samples and checkpoints, got {dict(features.sizes)}; try "
            "another selection"
        )
    if missing := [name for name in REQUIRED_SPEC if name not in features.attrs]:
        raise ValueError(
            f"expected attrs as td.featurize writes them, by which a store is known, got none of "
            f"{missing}; try features.assign_attrs(original.attrs)"
        )
    names, checkpoints = checkpoint_names(features), as_values(features.attrs)["checkpoints"]
    if len(set(names)) < len(names) or not set(names) <= set(checkpoints):
        raise ValueError(
            f"expected checkpoints of {list(checkpoints)} (attrs), each once, "
            f"got {names}; try another selection of checkpoints"
        )
    gram = None if estimator is None else with_gram(features, estimator)
    return gram and gram.of_sums().with_damping("auto")


def _require_memory(feature: da.Array, estimator: GramEstimator | None, dtype: str | None) -> None:
    """Refuse what does not fit, before hours of gradients and not after them."""
    sizes = Sizes.of(feature)
    require_memory(
        arrays.memory.stored(sizes, half=dtype is not None),
        f"a block of features of {sizes.rows} samples",
        "try smaller blocks: samples.chunk(sample=...)",
    )
    if estimator is not None:
        require_gram(sizes)
        if sizes.proj_dim <= MOST_DIM:
            k = component_count(sizes.n_samples, sizes.proj_dim, feature.dtype)
            require_eigenvectors(sizes.proj_dim, k)


def drop(
    store: str | os.PathLike[str],
    *,
    where: str | xr.DataArray | Callable[[xr.Dataset], xr.DataArray] | None = None,
    erase: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Leave samples out of a store from now on, and out of the gram matrix that it keeps.

    They stay on the disk, and ``td.open(store, dropped=True)`` shows them, unless ``erase=True``
    removes all that the store has of them.

    Parameters
    ----------
    store
        Folder or fsspec URL that :func:`save` wrote, complete.
    where
        Which samples to drop: a condition on their coords as text, such as ``'source == "spam"'``,
        as in :func:`top_k`; a boolean mask (sample), along what :func:`open` returns; or a function
        from that Dataset to a mask. With ``erase=True`` it may be left out, or true for none.
    erase
        Overwrite the features, outputs, weights, norms and coords of all samples that were ever
        dropped from the store, now or before. This cannot be undone.
    storage_options
        As in :func:`save`.

    Returns
    -------
    What :func:`open` returns from now on.

    Raises
    ------
    ValueError
        If ``where`` is no condition or boolean (sample), or drops all.
    IncompleteFeaturesError
        Also if samples are to be erased while an append is unfinished.
    FileNotFoundError, StoreBusyError
        As :func:`assign_coords`.

    Notes
    -----
    The sums in the store are reduced again from the remaining samples, in one pass over the
    features. If λ and the eigenvectors of the gram matrix are stored, they are computed again, with
    λ chosen by training samples.

    To erase samples, the chunks of features that have some are read and written once, on the active
    Dask client or on threads. Numbers become NaN, texts empty, and other coords 0 or false. Their
    places in the store stay, and later calls of :func:`save` store nothing there: a checkpoint is
    appended with features of as many samples as before, whatever stands at these places. After a
    kill the samples are dropped, and the same call goes on with erasing them. What was made of all
    samples still depends on them: the checkpoints, a fitted projector, and copies of the store.

    Examples
    --------
    >>> import tempfile
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = td.save(features, f"{folder}/f.zarr", progress=False)
    ...     left = td.drop(f"{folder}/f.zarr", where="label == 1")
    ...     left.sizes["sample"]
    4
    """
    require_flags(erase=erase)
    with changing(store, storage_options, "td.drop") as group:
        group.require_complete()
        if erase and "unfinished" in group.attrs:
            raise IncompleteFeaturesError(
                f"expected no unfinished append in the store {group.folder.url!r} before samples "
                f"are erased: {about_unfinished(group)}"
            )
        if where is not None or not erase:
            chosen = _chosen(open(store, storage_options=storage_options), where)
            before, mask = copy.deepcopy(group), dropped_mask(group)
            # `chosen` counts the samples that were left, and the mask all that the store has.
            mask[np.flatnonzero(~mask)[chosen]] = True
            if chosen.any():
                group.write_variables({DROPPED: xr.Variable(SAMPLE, mask)})
                update_derived(before, group, estimator_of(before))
    if erase:  # once they do not count any more
        with changing(store, storage_options, "td.drop") as group:
            erase_dropped(group)
    return open(store, storage_options=storage_options)


def _chosen(ds: xr.Dataset, where: Any) -> np.ndarray:
    """Return which of the samples are to be dropped."""
    if isinstance(where, str):
        where = selection(ds.feature, where)
    mask = where(ds) if callable(where) else where
    content = f"{mask!r:.60} ({type(mask).__name__})"
    if isinstance(mask, xr.DataArray):
        content = f"{mask.dtype} {dict(mask.sizes)}"
        if mask.dtype == bool and dict(mask.sizes) == {SAMPLE: ds.sizes[SAMPLE]}:
            chosen = np.asarray(aligned(mask, ds, what="where").values)
            if not chosen.all():
                return chosen
            content = f"true for all {len(chosen)}"
    raise ValueError(
        f"expected where= as a boolean DataArray ({SAMPLE}: {ds.sizes[SAMPLE]}), true for some "
        f"samples, or a condition, got {content}; try where=\"source == 'spam'\", with a coord "
        "of yours"
    )


def calibrate(
    store: str | os.PathLike[str],
    held_out: xr.Dataset | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Store λ, above proj_dim 1024 also the eigenvectors of the gram matrix, for all queries.

    :func:`save` does this, too; this is to choose λ anew, and for a proj_dim above 8192.

    Parameters
    ----------
    store
        Folder or fsspec URL that :func:`save` wrote, complete, with its gram matrix.
    held_out
        Features of 50 or more held-out samples whose outputs choose λ, as ``calibrate=`` of
        :func:`damping`; by default training samples choose.
    storage_options
        As in :func:`save`.

    Returns
    -------
    What :func:`open` returns from now on.

    Raises
    ------
    ValueError
        If the store has no gram matrix, or ``held_out`` cannot choose λ for its estimator.
    StoreMismatchError
        If ``held_out`` was featurized in another way.
    FileNotFoundError, IncompleteFeaturesError, StoreBusyError
        As :func:`assign_coords`.

    Notes
    -----
    Cost: one eigendecomposition per checkpoint, about 9 p³ flops and 40 p² bytes in a task, unless
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
        estimator = estimator_of(group)
        if estimator is None:
            raise ValueError(
                f"expected a store with a gram matrix, got {group.folder.url!r} with "
                f"{sorted(group.arrays)}; try td.save(features, store) without estimator=None"
            )
        if held_out is not None:
            require_calibration(open(store, storage_options=storage_options), held_out)
        update_derived(copy.deepcopy(group), group, estimator, held_out, anew=True)
    return open(store, storage_options=storage_options)
