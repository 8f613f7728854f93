"""What a store keeps of all its samples: gram matrix, eigenvectors and λ.

They are reduced whenever what they are of changes, and count together with it.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays.spectrum import component_count
from trakdask.attribution.dampings import describe_damping, regularize, require_calibration
from trakdask.attribution.estimators import DEFAULT_POWER, Weights, gather_options
from trakdask.attribution.grams import (
    DAMPING,
    DERIVED,
    EIGENVALUES,
    EIGENVECTORS,
    GRAM,
    LOSS_GRADIENT,
)
from trakdask.attribution.scores import LOGIT_VARIANCE
from trakdask.execution import scheduling
from trakdask.storage.group import (
    DROPPED,
    Group,
    changing,
    described,
    separator_of,
    with_sizes,
)
from trakdask.storage.reading import assembled, dropped_mask, open, without_dropped
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, VARIABLES, lazy_features

_MOST_DIM = 8192
"""Above this proj_dim, :func:`save` leaves the decomposition, which takes 32 p² bytes in one task,
to :func:`calibrate`."""

_FACTORS = (EIGENVALUES, EIGENVECTORS)
_ABOUT = ("n_samples", "gram_weights", "power")
"""Attributes of a gram matrix that say what it is the sum of."""

_log = logging.getLogger(__name__)


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
        if weights_of(group) is None:
            raise ValueError(
                f"expected a store with a gram matrix, got {group.folder.url!r} with "
                f"{sorted(group.arrays)}; try td.save(features, store) with gram=True"
            )
        if held_out is not None:
            require_calibration(open(store, storage_options=storage_options), held_out)
        update_factors(copy.deepcopy(group), group, held_out, again=True)
    return open(store, storage_options=storage_options)


def weights_of(group: Group) -> Weights | None:
    """Return the weights of the gram matrix of a store, None if it has none."""
    if GRAM not in group.arrays:
        return None
    attrs = group.arrays[GRAM]["attributes"]
    return Weights(attrs["gram_weights"], attrs["loss_weights"], attrs.get("power"))


def update_derived(
    before: Group,
    group: Group,
    weights: Weights | None,
    calibrate: xr.Dataset | None = None,
    *,
    retries: int = 0,
) -> None:
    """Store gram matrix, eigenvectors and λ of a store as it is to be, beside those that count.

    Parameters
    ----------
    before
        The store as it counts.
    group
        As it is to be, with its blocks stored; the metadata of the new arrays are added.
    weights
        Of the sums; None for none.
    calibrate
        Features of held-out samples that choose λ, instead of training samples.
    retries
        Further attempts.

    Notes
    -----
    Where scores will be an error anyway (a gram matrix that is not finite, or 0, has no λ), this is
    logged and none stored: the features are still worth their store.
    """
    for name in DERIVED:
        group.arrays.pop(name, None)
    if weights is None:
        return
    _update_sums(before, group, weights, retries)
    if group.arrays[GRAM]["shape"][0] > _MOST_DIM:
        return
    try:
        update_factors(before, group, calibrate, retries=retries)
    except (ValueError, np.linalg.LinAlgError) as err:
        _log.warning("λ and the eigenvectors of the gram matrix were not stored: %s", err)
        for name in (*_FACTORS, DAMPING):
            group.arrays.pop(name, None)


# ------------------------------------------------------------------------------------------- sums


def _update_sums(before: Group, group: Group, weights: Weights, retries: int) -> None:
    """Store the sums over the samples; of a checkpoint that has some, what was appended is added.

    If samples were dropped they are reduced again: a difference would be faster, but its rounding
    is that of the larger sum.
    """
    ds = without_dropped(assembled(group))
    attrs = weights.attrs(ds)
    known = [name for name in weights.sums if _is_known(before, name, attrs)]
    if GRAM in before.arrays:
        n_before = before.arrays[GRAM]["attributes"]["n_samples"]
        if ds.sizes[SAMPLE] - n_before != group.n_samples - before.n_samples:
            known = []  # samples were dropped
    is_grown = group.n_samples > before.n_samples
    stays = [] if is_grown else known
    sizes = {**ds.sizes, "proj_dim_1": ds.sizes[PROJ_DIM]}
    dtype = np.result_type(arrays.gram.accumulation_dtype(ds.sizes[PROJ_DIM]), ds.feature.dtype)
    for name in weights.sums:
        # Of a sum that stays, only chunks of new checkpoints are added.
        separator = separator_of(before.arrays[name]) if name in stays else None
        separator = separator or before.other_separator(name)
        dims = VARIABLES[name].dims
        group.arrays[name] = described(name, sizes, 1, dtype, dims, separator, attrs)
    old = assembled(before) if is_grown and known else None
    for index, checkpoint in enumerate(group.checkpoints):
        is_old = checkpoint in before.checkpoints
        names = [name for name in weights.sums if not (is_old and name in stays)]
        if not names:
            continue
        if old is not None and is_old and {*names} <= {*known}:
            added = _reduced(ds.isel({SAMPLE: slice(n_before, None)}), weights, names, index)
            pairs = zip(names, added, strict=True)
            sums = [old[name].data[..., index : index + 1] + more for name, more in pairs]
        else:
            sums = _reduced(ds, weights, names, index)
        stored = functools.partial(_stored, group, names, sums, index)
        scheduling.run(stored, retries=retries)


def _is_known(before: Group, name: str, attrs: dict[str, Any]) -> bool:
    """Return whether a store has a sum with some weights, of the same checkpoints if it pools."""
    same = {
        GRAM: ("gram_weights", "power"),
        LOSS_GRADIENT: ("loss_weights", "power", "pooled_checkpoints"),
    }[name]
    known = before.arrays.get(name, {}).get("attributes", {})
    return bool(known) and all(known.get(key) == attrs[key] for key in same)


def _reduced(
    features: xr.Dataset, weights: Weights, names: Sequence[str], index: int
) -> list[da.Array]:
    """Return sums over features at one checkpoint, lazy."""
    feature = features.feature.data[:, :, index : index + 1]
    h = weights.gram_data(features)
    h = None if h is None else h[:, index : index + 1]
    if LOSS_GRADIENT not in names:
        return [arrays.gram.gram(feature, h)]
    g = arrays.gram.pooled(weights.loss_data(features))[:, None]
    if GRAM not in names:
        return [arrays.gram.loss_gradient(feature, g)]
    return list(arrays.gram.gram_and_sum(feature, h, g))


def _stored(group: Group, names: Sequence[str], values: Sequence[da.Array], index: int) -> Any:
    """Return the tasks that store arrays of one checkpoint, each in one chunk."""
    regions = [(*[slice(None)] * (v.ndim - 1), slice(index, index + 1)) for v in values]
    into: Any = [group.array(name) for name in names]
    return da.store(values, into, regions=regions, lock=False, compute=False)


# --------------------------------------------------------------------------- eigenvectors and λ


def update_factors(
    before: Group,
    group: Group,
    calibrate: xr.Dataset | None = None,
    *,
    again: bool = False,
    retries: int = 0,
) -> None:
    """Store the eigenvectors of the gram matrix, and λ, beside those that count.

    Parameters
    ----------
    before, group, calibrate, retries
        As those of :func:`update_derived`.
    again
        Choose λ anew if other samples chose the one that is there.
    """
    group.arrays.pop(DAMPING, None)
    gram = group.arrays[GRAM]["attributes"]
    about = {name: gram[name] for name in _ABOUT}
    is_same = (
        all(name in before.arrays for name in (GRAM, *_FACTORS))
        # Another separator says that the gram matrix was replaced.
        and separator_of(before.arrays[GRAM]) == separator_of(group.arrays[GRAM])
        and before.arrays[EIGENVECTORS]["attributes"].items() >= about.items()
    )
    ds = without_dropped(assembled(group))
    sizes = {**ds.sizes, CHECKPOINT: len(group.checkpoints)}
    sizes["component"] = component_count(gram["n_samples"], ds.sizes[PROJ_DIM], ds.feature.dtype)
    for name in _FACTORS:
        if is_same:
            group.arrays[name] = with_sizes(before.arrays[name], sizes)
        else:
            dims, separator = VARIABLES[name].dims, before.other_separator(name)
            group.arrays[name] = described(name, sizes, 1, "f8", dims, separator, about)
    matrices = lazy_features(ds)[GRAM].data
    for index, name in enumerate(group.checkpoints):
        if not is_same or name not in before.checkpoints:
            matrix = matrices[..., index : index + 1]
            spectrum = arrays.spectrum.spectrum(
                matrix, None, gram["n_samples"], [name], n_component=sizes["component"]
            )
            factors = arrays.spectrum.eigenvectors(spectrum, len(matrix), sizes["component"])
            stored = functools.partial(_stored, group, _FACTORS, factors, index)
            scheduling.run(stored, retries=retries)
    chosen_by = None if calibrate is None else str(calibrate.attrs.get("source", ""))
    known = before.arrays.get(DAMPING)
    if is_same and known and before.checkpoints == group.checkpoints:
        may_stay = calibrate is None and not again
        if may_stay or known["attributes"].get("chosen_by") == chosen_by:
            group.arrays[DAMPING] = known
            return
    values, attrs = _damping(without_dropped(assembled(group)), calibrate)
    attrs |= {"chosen_by": chosen_by, **about, **VARIABLES[DAMPING].attrs}
    group.write_small({DAMPING: xr.Variable(VARIABLES[DAMPING].dims, values, attrs)})


def _damping(ds: xr.Dataset, calibrate: xr.Dataset | None) -> tuple[np.ndarray, dict[str, Any]]:
    """Choose λ, from the stored eigenvectors; return its values and attrs."""
    features, power = lazy_features(ds), ds[GRAM].attrs.get("power")
    if power is None:
        options, variance = gather_options(ds, "trak", DEFAULT_POWER, "auto", calibrate), None
    else:
        options = gather_options(ds, "soft", power, "auto", calibrate)
        variance = arrays.weights.logit_variance(features.out_to_loss.data)
    regularized = regularize(features, options, quiet=True)
    chosen, variance = dask.compute(describe_damping(features, regularized), variance)
    attrs: dict[str, Any] = {
        "asked": options.rule,
        "rule": str(chosen.rule.values),
        "pooled_checkpoints": [str(name) for name in ds[CHECKPOINT].values],
    }
    if variance is not None:
        attrs[LOGIT_VARIANCE] = variance.tolist()
    if options.is_damped_by_outputs:
        attrs |= {name: float(chosen[name]) for name in ("relative", "peak", "threshold")}
        attrs["curve"] = chosen.curve.values.tolist()
        attrs["tried"] = [text.removeprefix("completeness, ") for text in regularized.rules[:-1]]
    return chosen.damping.values, attrs
