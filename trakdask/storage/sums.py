"""What a store keeps of all its samples: gram matrix, eigenvectors and λ.

They are reduced whenever what they are of changes, and count together with it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays, execution
from trakdask.arrays.solve import component_count
from trakdask.attribution.estimators import DEFAULT_POWER, Estimator, Weights, gather_options
from trakdask.attribution.grams import (
    DAMPING,
    DERIVED,
    EIGENVALUES,
    EIGENVECTORS,
    GRAM,
    LOSS_GRADIENT,
    NORM,
    describe_damping,
    regularize,
)
from trakdask.attribution.scores import LOGIT_VARIANCE
from trakdask.storage.group import Group
from trakdask.storage.reading import assembled, lazy_array, without_dropped
from trakdask.variables import (
    CHECKPOINT,
    COMPONENT,
    PROJ_DIM,
    PROJ_DIM_1,
    SAMPLE,
    lazy_features,
)

_MOST_DIM = 8192
"""Above this proj_dim, :func:`save` leaves the decomposition, which takes 32 p² bytes in one task,
to :func:`calibrate`."""

_FACTORS = (EIGENVALUES, EIGENVECTORS)

_log = logging.getLogger(__name__)


def weights_of(group: Group) -> Weights | None:
    """Return the weights of the gram matrix of a store, None if it has none."""
    if GRAM not in group.arrays:
        return None
    attrs = group.arrays[GRAM]["attributes"]
    return Weights(attrs["power"])


def update_derived(
    before: Group,
    group: Group,
    weights: Weights | None,
    calibrate: xr.Dataset | None = None,
    *,
    anew: bool = False,
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
    anew
        Choose λ anew if other samples chose the one that is there, and at any proj_dim.
    retries
        Further attempts.

    Notes
    -----
    Where scores will be an error anyway (a gram matrix that is not finite, or 0, has no λ), this is
    logged and none stored, unless λ is to be chosen anew: the features are still worth their store.
    """
    for name in DERIVED:
        group.arrays.pop(name, None)
    if weights is None:
        return
    gram_stays = _update_sums(before, group, weights, retries)
    if group.arrays[GRAM]["shape"][0] > _MOST_DIM and not anew:
        return
    try:
        factors_stay = _update_factors(before, group, gram_stays, retries)
        chosen_by = None if calibrate is None else str(calibrate.attrs.get("source", ""))
        known = before.arrays.get(DAMPING, {})
        is_same = known and factors_stay and before.checkpoints == group.checkpoints
        is_asked = anew or calibrate is not None
        if is_same and (not is_asked or known["attributes"]["chosen_by"] == chosen_by):
            group.arrays[DAMPING] = known
        else:
            _update_damping(group, calibrate, chosen_by)
    except (ValueError, np.linalg.LinAlgError) as err:
        if anew:
            raise
        _log.warning("λ and the eigenvectors of the gram matrix were not stored: %s", err)
        for name in (*_FACTORS, DAMPING):
            group.arrays.pop(name, None)


def _update_sums(before: Group, group: Group, weights: Weights, retries: int) -> bool:
    """Store the sums over the samples; of a checkpoint that has some, what was appended is added.

    If samples were dropped they are reduced again: a difference would be faster, but its rounding
    is that of the larger sum. Returns whether the gram matrices that are there stay as they are.
    """
    ds = without_dropped(assembled(group))
    attrs, n_appended = weights.attrs(ds), group.n_samples - before.n_samples
    appended = ds.isel({SAMPLE: slice(ds.sizes[SAMPLE] - n_appended, None)})
    about = {**attrs, "n_samples": ds.sizes[SAMPLE] - n_appended}
    known = [name for name in weights.sums if _is_known(before, name, about)]
    sizes = {**ds.sizes, PROJ_DIM_1: ds.sizes[PROJ_DIM]}
    dtype = np.result_type(arrays.gram.accumulation_dtype(ds.sizes[PROJ_DIM]), ds.feature.dtype)
    for name in weights.sums:
        stays = name in known and not n_appended
        group.add(name, sizes, dtype, grows=stays, attrs=attrs)
    for index, checkpoint in enumerate(group.checkpoints):
        old = known if checkpoint in before.checkpoints else []
        new = [name for name in weights.sums if name not in old]
        if new:
            _store(group, new, _reduced(ds, weights, new, index), index, retries)
        if old and n_appended:
            there = [lazy_array(before, name)[..., index : index + 1] for name in old]
            added = _reduced(appended, weights, old, index)
            _store(group, old, [a + b for a, b in zip(there, added, strict=True)], index, retries)
    return GRAM in known and not n_appended


def _is_known(before: Group, name: str, attrs: dict[str, Any]) -> bool:
    """Return whether a store has a sum of these samples, and checkpoints if it pools them."""
    known = before.arrays.get(name, {}).get("attributes", {})
    same = ["n_samples", "gram_weights", *(["pooled_checkpoints"] if name == LOSS_GRADIENT else [])]
    return all(key in known and known[key] == attrs[key] for key in same)


def _reduced(
    features: xr.Dataset, weights: Weights, names: Sequence[str], index: int
) -> list[da.Array]:
    """Return sums over features at one checkpoint, lazy."""
    feature = features.feature.data[:, :, index : index + 1]
    h = weights.gram_data(features)
    h = None if h is None else h[:, index : index + 1]
    if LOSS_GRADIENT not in names:
        return [arrays.gram.gram(feature, h)]
    g = arrays.weights.pooled(weights.loss_data(features))[:, None]
    if GRAM not in names:
        return [arrays.gram.loss_gradient(feature, g)]
    return list(arrays.gram.gram_and_sum(feature, h, g))


def _store(
    group: Group, names: Sequence[str], values: Sequence[da.Array], index: int, retries: int
) -> None:
    """Compute arrays of one checkpoint and store them, each in one chunk."""
    regions = [(*[slice(None)] * (v.ndim - 1), slice(index, index + 1)) for v in values]
    into: Any = [group.array(name) for name in names]
    tasks = functools.partial(da.store, values, into, regions=regions, lock=False, compute=False)
    execution.run(tasks, retries=retries)


def _update_factors(before: Group, group: Group, gram_stays: bool, retries: int) -> bool:
    """Store the eigenvectors of the gram matrices that lack them; return whether some stay."""
    ds, stays = assembled(group), gram_stays and EIGENVECTORS in before.arrays
    n, p, matrices = ds[GRAM].attrs["n_samples"], ds.sizes[PROJ_DIM], ds[GRAM].data
    k = component_count(n, p, ds.feature.dtype)
    for name in _FACTORS:
        group.add(name, {**ds.sizes, COMPONENT: k}, "f8", grows=stays, attrs=_about(group))
    for index, name in enumerate(group.checkpoints):
        if not (stays and name in before.checkpoints):
            matrix = matrices[..., index : index + 1]
            factors = arrays.solve.eigenvectors(matrix, [name], k)
            _store(group, _FACTORS, factors, index, retries)
    return stays


def _about(group: Group) -> dict[str, Any]:
    """Return the attributes that say which gram matrix something is of."""
    attrs = group.arrays[GRAM]["attributes"]
    return {name: attrs[name] for name in ("n_samples", "gram_weights", "power")}


def _update_damping(group: Group, calibrate: xr.Dataset | None, chosen_by: str | None) -> None:
    """Choose and store λ."""
    ds = without_dropped(assembled(group)).drop_vars(NORM)  # these rows need not be compared
    values, attrs = _damping(ds, calibrate)
    attrs |= {**_about(group), "chosen_by": chosen_by}
    group.add(DAMPING, {CHECKPOINT: len(values)}, "f8", attrs=attrs)
    group.array(DAMPING)[:] = values


def _damping(ds: xr.Dataset, calibrate: xr.Dataset | None) -> tuple[np.ndarray, dict[str, Any]]:
    """Choose λ, from the stored eigenvectors; return its values and attrs."""
    features, power, variance = lazy_features(ds), ds[GRAM].attrs.get("power"), None
    estimator: Estimator = "trak"
    if power is not None:
        estimator, variance = "soft", arrays.weights.logit_variance(features.out_to_loss.data)
    power = DEFAULT_POWER if power is None else power
    options = gather_options(ds, estimator, power, "auto", calibrate)
    regularized = regularize(features, options, quiet=True)
    chosen, variance = dask.compute(describe_damping(regularized), variance)
    attrs: dict[str, Any] = {
        "asked": options.rule,
        "rule": str(chosen.rule.values),
        "pooled_checkpoints": [str(name) for name in ds[CHECKPOINT].values],
    }
    if variance is not None:
        attrs[LOGIT_VARIANCE] = variance.tolist()
    if options.rule == "completeness":
        attrs |= {name: float(chosen[name]) for name in ("relative", "peak", "threshold")}
        attrs["curve"] = chosen.curve.values.tolist()
        attrs["tried"] = [text.removeprefix("completeness, ") for text in regularized.rules[:-1]]
    return chosen.damping.values, attrs
