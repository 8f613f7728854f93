"""What a store keeps of all its samples: gram matrix, eigenvectors and λ.

They are reduced again, or corrected by the samples that came or went, whenever what they are of
changes, and count together with it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays.spectrum import component_count
from trakdask.attribution.dampings import describe_damping, regularize
from trakdask.attribution.estimators import DEFAULT_POWER, Options, Weights, gather_options
from trakdask.attribution.grams import (
    DAMPING,
    DERIVED,
    EIGENVALUES,
    EIGENVECTORS,
    GRAM,
    LOSS_GRADIENT,
    NORM,
)
from trakdask.attribution.scores import LOGIT_VARIANCE
from trakdask.execution import scheduling
from trakdask.storage.blocks import compute
from trakdask.storage.group import Group, described, separator_of, with_sizes
from trakdask.storage.reading import assembled, dropped_mask, without_dropped
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, VARIABLES, lazy_features

__all__ = ["update_factors", "update_sums", "weights_of"]

_MOST_DIM = 8192
"""Above this proj_dim, :func:`save` leaves the decomposition, which takes 32 p² bytes in one task,
to :func:`calibrate`."""

_FACTORS = (EIGENVALUES, EIGENVECTORS)
_ABOUT = ("n_samples", "gram_weights", "power")
"""Attributes of a gram matrix that say what it is the sum of."""

_log = logging.getLogger(__name__)


def weights_of(group: Group) -> Weights | None:
    """Return the weights of the gram matrix of a store, None if it has none."""
    if GRAM not in group.arrays:
        return None
    attrs = group.arrays[GRAM]["attributes"]
    return Weights(attrs["gram_weights"], attrs["loss_weights"], attrs.get("power"))


# ------------------------------------------------------------------------------------------- sums


def update_sums(
    before: Group,
    group: Group,
    weights: Weights | None,
    *,
    gone: np.ndarray | None = None,
    retries: int = 0,
) -> None:
    """Store the gram matrix of a store as it is to be, beside the one that counts.

    Parameters
    ----------
    before
        The store as it counts.
    group
        As it is to be, with its blocks stored; the metadata of the new arrays are added.
    weights
        Of the sums; None for none.
    gone
        Which of its samples are dropped from now on, (sample,) bool; by default those so far.
    retries
        Further attempts.

    Notes
    -----
    The sums of samples that came are added, and of those that went taken away, unless more went
    than are left. Of another weight, or if checkpoints are pooled in it that were not, a sum is
    reduced again.
    """
    for name in DERIVED:
        group.arrays.pop(name, None)
    if weights is None:
        return
    ds = assembled(group)
    was_gone, is_gone = np.ones(group.n_samples, bool), np.zeros(group.n_samples, bool)
    was_gone[: before.n_samples] = is_gone[: before.n_samples] = dropped_mask(before)
    is_gone = is_gone if gone is None else gone
    attrs = weights.attrs(ds) | {"n_samples": int((~is_gone).sum())}
    sizes = {**ds.sizes, "proj_dim_1": ds.sizes[PROJ_DIM]}
    dtype = np.result_type(arrays.gram.accumulation_dtype(ds.sizes[PROJ_DIM]), ds.feature.dtype)
    known = [name for name in weights.sums if _is_known(before, name, attrs)]
    stays = known if (was_gone == is_gone).all() else []
    for name in weights.sums:
        # Of a sum that stays, only chunks of new checkpoints are added.
        separator = separator_of(before.arrays[name]) if name in stays else None
        separator = separator or before.other_separator(name)
        dims = VARIABLES[name].dims
        group.arrays[name] = described(name, sizes, 1, dtype, dims, separator, attrs)
    for index, checkpoint in enumerate(group.checkpoints):
        is_old = checkpoint in before.checkpoints
        names = [name for name in weights.sums if not (is_old and name in stays)]
        old = assembled(before) if is_old and {*names} <= {*known} else None

        def stored(
            names: Sequence[str] = names, index: int = index, old: xr.Dataset | None = old
        ) -> Any:
            sums = _sums(ds, old, weights, names, index, was_gone, is_gone)
            return _stored(group, names, sums, index)

        if names:
            scheduling.run(stored, retries=retries, compute=compute)


def _is_known(before: Group, name: str, attrs: Mapping[str, Any]) -> bool:
    """Return whether a store has a sum with some weights, of the same checkpoints if it pools."""
    same = {
        GRAM: ("gram_weights", "power"),
        LOSS_GRADIENT: ("loss_weights", "power", "pooled_checkpoints"),
    }[name]
    known = before.arrays.get(name, {}).get("attributes", {})
    return bool(known) and all(known.get(key) == attrs[key] for key in same)


def _sums(
    ds: xr.Dataset,
    before: xr.Dataset | None,
    weights: Weights,
    names: Sequence[str],
    index: int,
    was_gone: np.ndarray,
    is_gone: np.ndarray,
) -> list[da.Array]:
    """Return the sums of a checkpoint, lazy; from those of before if possible."""

    def over(rows: np.ndarray) -> list[da.Array]:
        chosen = ds if rows.all() else ds.isel({SAMPLE: np.flatnonzero(rows)})
        return _reduced(chosen, weights, names, index)

    added, taken, left = was_gone & ~is_gone, ~was_gone & is_gone, ~is_gone
    if before is None or (taken.any() and not _weighs_less(ds, weights, index, taken, left)):
        return over(left)
    totals = [before[name].data[..., index : index + 1] for name in names]
    if added.any():
        totals = [a + b for a, b in zip(totals, over(added), strict=True)]
    if taken.any():
        totals = [a - b for a, b in zip(totals, over(taken), strict=True)]
    return totals


def _weighs_less(
    ds: xr.Dataset, weights: Weights, index: int, taken: np.ndarray, left: np.ndarray
) -> bool:
    """Return whether rows add less to the trace than others; false where they are not finite."""
    norms, h = ds[NORM].data[:, index], weights.gram_data(ds)
    norms = norms if h is None else norms * h[:, index]
    less, more = dask.compute(*(da.nansum(norms[rows]) for rows in (taken, left)))
    return bool(less <= more) and bool(np.isfinite(less))


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

    Where scores will be an error anyway (a gram matrix that is not finite, or 0, has no λ), log it
    and store none: the features are still worth their store.

    Parameters
    ----------
    before, group, retries
        As those of :func:`update_sums`.
    calibrate
        Features of held-out samples that choose λ, instead of training samples.
    again
        Choose λ anew if other samples chose the one that is there, and raise if there can be none.
    """
    if GRAM not in group.arrays:
        return
    for name in (*_FACTORS, DAMPING):
        group.arrays.pop(name, None)
    p = group.arrays[GRAM]["shape"][0]
    if p > _MOST_DIM and not again:
        return
    try:
        _update_factors(before, group, calibrate, again=again, retries=retries)
    except (ValueError, np.linalg.LinAlgError) as err:
        if again:
            raise
        _log.warning("λ and the eigenvectors of the gram matrix were not stored: %s", err)
        for name in (*_FACTORS, DAMPING):
            group.arrays.pop(name, None)


def _update_factors(
    before: Group, group: Group, calibrate: xr.Dataset | None, *, again: bool, retries: int
) -> None:
    gram = group.arrays[GRAM]["attributes"]
    about = {name: gram[name] for name in _ABOUT}
    is_same = all(name in before.arrays for name in _FACTORS) and (
        before.chunk_path(GRAM, (0,)) == group.chunk_path(GRAM, (0,))  # or else it was replaced
        and before.arrays[EIGENVECTORS]["attributes"].items() >= about.items()
    )
    ds = without_dropped(assembled(group))
    options = _options(ds, calibrate)
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
            scheduling.run(stored, retries=retries, compute=compute)
    chosen_by = None if calibrate is None else str(calibrate.attrs.get("source", ""))
    known = before.arrays.get(DAMPING, {})
    if is_same and known and before.checkpoints == group.checkpoints:
        may_stay = calibrate is None and not again
        if may_stay or known["attributes"].get("chosen_by") == chosen_by:
            group.arrays[DAMPING] = known
            return
    values, attrs = _damping(without_dropped(assembled(group)), options)
    attrs |= {"chosen_by": chosen_by, **about, **VARIABLES[DAMPING].attrs}
    group.write_small({DAMPING: xr.Variable(VARIABLES[DAMPING].dims, values, attrs)})


def _options(ds: xr.Dataset, calibrate: xr.Dataset | None) -> Options:
    """Return the options of scores under the gram matrix that is stored."""
    power = ds[GRAM].attrs.get("power")
    if power is None:
        return gather_options(ds, "trak", DEFAULT_POWER, "auto", calibrate)
    return gather_options(ds, "soft", power, "auto", calibrate)


def _damping(ds: xr.Dataset, options: Options) -> tuple[np.ndarray, dict[str, Any]]:
    """Choose λ, from the stored eigenvectors; return its values and attrs."""
    features = lazy_features(ds)
    regularized = regularize(features, options, quiet=True)
    is_soft = options.estimator.weights.power is not None
    chosen, variance = dask.compute(
        describe_damping(features, regularized),
        arrays.weights.logit_variance(features.out_to_loss.data) if is_soft else None,
    )
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
