"""The sums over all samples in a store: gram matrices, their eigenvectors and λ.

They are computed again whenever the samples change, and are committed together with them.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import xarray as xr

from trakdask.arrays.spectra import component_count
from trakdask.attribution.damping_rules import chosen_damping
from trakdask.attribution.estimators import Soft, Trak
from trakdask.attribution.grams import decomposition, sums
from trakdask.attribution.protocol import KINDS, GramEstimator
from trakdask.storage.blocks import save_sums
from trakdask.storage.group import Group
from trakdask.storage.reading import assembled, lazy_array
from trakdask.variables import (
    CHECKPOINT,
    COMPONENT,
    DAMPING,
    DERIVED,
    EIGENVALUES,
    EIGENVECTORS,
    GRAM,
    LOSS_GRADIENT,
    PROJ_DIM,
    PROJ_DIM_1,
    SAMPLE,
)

MOST_DIM = 8192
"""Above this proj_dim, :func:`save` leaves the decomposition, which takes 40 p² bytes in one task,
to :func:`calibrate`."""

LEAST_DIM = 1024
"""Up to this proj_dim no eigenvectors are stored: they are a third of all that :func:`save` writes
beside few features, and whoever asks for them anew waits for half a second. With the λ that is
stored, scores need a Cholesky factor instead, which takes a twentieth of that."""

_FACTORS = (EIGENVALUES, EIGENVECTORS)

_log = logging.getLogger(__name__)


def estimator_of(group: Group) -> GramEstimator | None:
    """Return the estimator that the gram matrix of a store is of, None if it has none."""
    if GRAM not in group.arrays:
        return None
    attrs = group.arrays[GRAM]["attributes"]
    if "estimator" not in attrs:  # as older versions wrote it, which had these two
        power, wrong = attrs["power"], attrs["wrong_classes"]
        return Trak() if power is None else Soft(power, wrong_classes=wrong)
    options = dict(attrs["estimator"])
    name = options.pop("name")
    if name not in KINDS:
        raise ValueError(
            f"expected an estimator that this process knows, got {name!r} in the gram matrix of "
            "the store; try importing the module of its class first, which has a name of its own, "
            "or td.save(..., estimator='auto')"
        )
    return KINDS[name](**options)


def update_derived(
    before: Group,
    group: Group,
    estimator: GramEstimator | None,
    calibrate: xr.Dataset | None = None,
    *,
    anew: bool = False,
    retries: int = 0,
) -> None:
    """Store gram matrix, eigenvectors and λ of a store as it is to be, beside the stored ones.

    Parameters
    ----------
    before
        The store as it counts.
    group
        As it is to be, with its blocks stored; the metadata of the new arrays are added.
    estimator
        Whose weights the sums have; None for none.
    calibrate
        Features of held-out samples that choose λ, instead of training samples.
    anew
        Choose λ anew if other samples chose the one that is there, and at any proj_dim.
    retries
        Further attempts.

    Notes
    -----
    Where scores will be an error anyway (a gram matrix that is not finite, or 0, has no λ), this is
    logged and none stored, unless λ is to be chosen anew: the features are still worth their store.
    """
    # 1. The new state begins without sums. Whatever still holds is put back below, by its metadata:
    # its chunks are in the store already.
    for name in DERIVED:
        group.arrays.pop(name, None)
    if estimator is None:
        return
    # 2. Sums, and what follows from them.
    stays = _update_sums(before, group, estimator, retries)
    p = group.arrays[GRAM]["shape"][0]
    if p > MOST_DIM and not anew:
        return
    try:
        if p > LEAST_DIM:
            stays = _update_factors(before, group, estimator, stays, retries)
        chosen_by = None if calibrate is None else str(calibrate.attrs.get("source", ""))
        stored = before.arrays.get(DAMPING, {})
        # 3. λ stays with the sums that it was chosen from.
        is_same = stored and stays and before.checkpoints == group.checkpoints
        if is_same and (not anew or stored["attributes"]["chosen_by"] == chosen_by):
            group.arrays[DAMPING] = stored
        else:
            values, attrs = chosen_damping(assembled(group), estimator, calibrate)
            attrs |= {**_about(group), "chosen_by": chosen_by}
            group.add(DAMPING, {CHECKPOINT: len(values)}, "f8", attrs=attrs)
            group.array(DAMPING)[:] = values
    except (ValueError, np.linalg.LinAlgError) as err:
        if anew:
            raise
        _log.warning("λ and the eigenvectors of the gram matrix were not stored: %s", err)
        # The first of these may be stored, and the others not.
        for name in (*_FACTORS, DAMPING):
            group.arrays.pop(name, None)


def _update_sums(before: Group, group: Group, estimator: GramEstimator, retries: int) -> bool:
    """Store the sums over the samples; a checkpoint that has sums gets the appended samples added.

    After a drop the sums are reduced again: a difference would be faster, but would have the
    rounding error of the larger sum. Returns whether the stored gram matrices stay as they are.
    """
    ds = assembled(group)
    attrs, n_appended = estimator.attrs(ds), group.n_samples - before.n_samples
    appended = ds.isel({SAMPLE: slice(ds.sizes[SAMPLE] - n_appended, None)})
    # 1. Which of the stored sums are of all earlier samples. After a drop they are of more than are
    # left, which the number of samples tells.
    about = {**attrs, "n_samples": ds.sizes[SAMPLE] - n_appended}
    reusable = []
    for name in estimator.sums:  # a sum over these samples, and checkpoints if it pools them
        stored = before.arrays.get(name, {}).get("attributes", {})
        same = ["n_samples", "gram_weights", *["pooled_checkpoints"] * (name == LOSS_GRADIENT)]
        if all(key in stored and stored[key] == about[key] for key in same):
            reusable.append(name)
    # 2. Their metadata. Where checkpoints were added and no samples, an array grows, and the chunks
    # that it has stay as they are.
    sizes = {**ds.sizes, PROJ_DIM_1: ds.sizes[PROJ_DIM]}
    for name in estimator.sums:
        stays = name in reusable and not n_appended
        dtype = _dtype(name, ds.feature.dtype, before if stays else None)
        group.add(name, sizes, dtype, grows=stays, attrs=attrs)
    # 3. A checkpoint at a time, each with the sums that can only be reduced from all samples, and
    # those to which the appended ones are added.
    for index, checkpoint in enumerate(group.checkpoints):
        old = reusable if checkpoint in before.checkpoints else []
        new = [name for name in estimator.sums if name not in old]
        if new:
            save_sums(group, new, sums(ds, estimator, new, index), index, retries)
        if old and n_appended:
            there = [lazy_array(before, name)[..., index : index + 1] for name in old]
            added = sums(appended, estimator, old, index)
            save_sums(
                group, old, [a + b for a, b in zip(there, added, strict=True)], index, retries
            )
    return GRAM in reusable and not n_appended


def _dtype(name: str, of_features: np.dtype[Any], before: Group | None) -> np.dtype[Any]:
    """Return the dtype in which an array is stored: the one that it has, where it stays.

    Matrices of p² numbers are in the precision of the features. Products have no more.
    """
    if before is not None:
        return before.array(name).dtype
    return of_features if name in (GRAM, EIGENVECTORS) else np.dtype(np.float64)


def _update_factors(
    before: Group, group: Group, estimator: GramEstimator, gram_stays: bool, retries: int
) -> bool:
    """Store the eigenvectors of the gram matrices that lack them; return whether some stay."""
    ds, stays = assembled(group), gram_stays and EIGENVECTORS in before.arrays
    n = ds[GRAM].attrs["n_samples"]
    # Of few samples, only the eigenvectors whose eigenvalues may differ from 0.
    k = component_count(estimator.rank(n, ds), ds.sizes[PROJ_DIM], ds.feature.dtype)
    for name in _FACTORS:
        dtype = _dtype(name, ds.feature.dtype, before if stays else None)
        group.add(name, {**ds.sizes, COMPONENT: k}, dtype, grows=stays, attrs=_about(group))
    for index, name in enumerate(group.checkpoints):
        if not (stays and name in before.checkpoints):
            one = ds.isel({CHECKPOINT: [index]})
            factors = decomposition(one, estimator, one[GRAM].data, n)
            save_sums(group, _FACTORS, factors, index, retries)
    return stays


def _about(group: Group) -> dict[str, Any]:
    """Return the attributes that say which gram matrix something is of."""
    attrs = group.arrays[GRAM]["attributes"]
    return {name: attrs[name] for name in ("n_samples", "gram_weights", "power", "wrong_classes")}
