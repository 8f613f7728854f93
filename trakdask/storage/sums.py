"""What a store keeps of all its samples: gram matrix, eigenvectors and λ.

They are reduced again, or corrected by the samples that came or went, whenever what they are of
changes, and count together with it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr
import zarr
from dask.base import tokenize

from trakdask import arrays
from trakdask.arrays.blocks import Blocks, flat
from trakdask.arrays.spectrum import component_count
from trakdask.attribution.dampings import describe_damping, regularize
from trakdask.attribution.estimators import (
    DEFAULT_POWER,
    Estimator,
    Options,
    Power,
    Weights,
    gather_options,
)
from trakdask.attribution.grams import NORM
from trakdask.attribution.scores import LOGIT_VARIANCE
from trakdask.execution import scheduling
from trakdask.storage.blocks import compute
from trakdask.storage.group import (
    DERIVED,
    DROPPED,
    Group,
    described,
    separator_of,
    with_sizes,
)
from trakdask.storage.opening import assembled, without_dropped
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, VARIABLES, lazy_features

__all__ = ["calibrated_options", "dropped_mask", "update_factors", "update_sums", "weights_of"]

_MOST_DIM = 8192
"""Above this proj_dim, :func:`save` leaves the decomposition, which takes 32 p² bytes in one task,
to :func:`calibrate`."""

GRAM, LOSS_GRADIENT, EIGENVALUES, EIGENVECTORS, DAMPING = DERIVED
_FACTORS = (EIGENVALUES, EIGENVECTORS)

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
        Which of its samples are dropped, (sample,) bool.
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
    n = ds.sizes[SAMPLE]
    was_gone = np.ones(n, bool)
    was_gone[: before.n_samples] = dropped_mask(before)
    is_gone = np.zeros(n, bool) if gone is None else gone
    ours = weights.attrs(ds) | {"n_samples": int((~is_gone).sum())}
    sizes = {**_sizes(ds), "proj_dim_1": ds.sizes[PROJ_DIM]}
    dtype = np.result_type(arrays.gram.accumulation_dtype(ds.sizes[PROJ_DIM]), ds.feature.dtype)
    known = {name: _is_known(before, name, ours) for name in weights.sums}
    stays = {name: known[name] and bool((was_gone == is_gone).all()) for name in known}
    for name in weights.sums:
        # Of a sum that stays, only chunks of new checkpoints are added.
        at = separator_of(before.arrays[name]) if stays[name] else before.other_separator(name)
        group.arrays[name] = described(name, sizes, 1, dtype, VARIABLES[name].dims, at, ours)
    for index, checkpoint in enumerate(group.checkpoints):
        is_old = checkpoint in before.checkpoints
        names = [name for name in weights.sums if not (is_old and stays[name])]
        old = assembled(before) if is_old and all(known[name] for name in names) else None
        if names:
            submission = functools.partial(
                _sums_task, group, ds, old, weights, names, index, was_gone, is_gone
            )
            scheduling.run(submission, retries=retries, compute=compute)


def _sizes(ds: xr.Dataset) -> dict[str, int]:
    return {str(dim): size for dim, size in ds.sizes.items()}


def _is_known(before: Group, name: str, attrs: Mapping[str, Any]) -> bool:
    """Return whether a store has a sum with some weights, of the same checkpoints if it pools."""
    same = {
        GRAM: ("gram_weights", "power"),
        LOSS_GRADIENT: ("loss_weights", "power", "pooled_checkpoints"),
    }[name]
    known = before.arrays.get(name, {}).get("attributes", {})
    return bool(known) and all(known.get(key) == attrs[key] for key in same)


def dropped_mask(group: Group) -> np.ndarray:
    """Return which samples of a store are dropped, (sample,) bool."""
    if DROPPED not in group.arrays:
        return np.zeros(group.n_samples, bool)
    group.require_chunks(DROPPED)
    return np.asarray(group.array(DROPPED)[...])


def _sums_task(
    group: Group,
    ds: xr.Dataset,
    before: xr.Dataset | None,
    weights: Weights,
    names: Sequence[str],
    index: int,
    was_gone: np.ndarray,
    is_gone: np.ndarray,
) -> da.Array:
    """Return the task that stores the sums of a checkpoint, given those of before if possible."""

    def of(rows: np.ndarray) -> list[da.Array]:
        chosen = ds if rows.all() else ds.isel({SAMPLE: np.flatnonzero(rows)})
        return _reduced(chosen, weights, names, index)

    added, taken, left = was_gone & ~is_gone, ~was_gone & is_gone, ~is_gone
    if before is None or (taken.any() and not _weighs_less(ds, weights, index, taken, left)):
        totals = of(left)
    else:
        totals = [before[name].data[..., index : index + 1] for name in names]
        if added.any():
            totals = [a + b for a, b in zip(totals, of(added), strict=True)]
        if taken.any():
            totals = [a - b for a, b in zip(totals, of(taken), strict=True)]
    return _writing([group.array(name) for name in names], totals, index)


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


def _writing(into: Sequence[zarr.Array[Any]], values: Sequence[da.Array], index: int) -> da.Array:
    """Return the task that writes arrays of one checkpoint, each in one chunk."""
    written: da.Array = da.blockwise(
        functools.partial(_write, list(into), index), "c",
        *(item for each in values for item in (each, "pqc" if each.ndim == 3 else "pc")),
        dtype=bool, meta=np.empty(0, bool), concatenate=False, align_arrays=False,
        name=f"save-{into[0].basename}-{tokenize(str(into[0].store_path), index, values)}",
    )  # fmt: skip
    return written


def _write(into: Sequence[zarr.Array[Any]], index: int, *values: Blocks) -> np.ndarray:
    for array, each in zip(into, values, strict=True):
        (block,) = flat(each)
        array[..., slice(index, index + 1)] = block
    return np.ones(1, bool)


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
    is_same = (
        all(name in before.arrays for name in _FACTORS)
        and _sum_of(before) == _sum_of(group)
        and before.arrays[EIGENVECTORS]["attributes"].get("n_samples") == gram["n_samples"]
    )
    ds = without_dropped(assembled(group))
    options = _options(ds, calibrate)
    if is_same:
        for name in _FACTORS:
            sizes = {CHECKPOINT: len(group.checkpoints)}
            group.arrays[name] = with_sizes(before.arrays[name], sizes)
    else:
        k = component_count(gram["n_samples"], ds.sizes[PROJ_DIM], ds.feature.dtype)
        attrs = {key: gram[key] for key in ("n_samples", "gram_weights", "power")}
        for name in _FACTORS:
            group.arrays[name] = described(
                name, {**_sizes(ds), "component": k}, 1, "f8", VARIABLES[name].dims,
                before.other_separator(name), attrs,
            )  # fmt: skip
    k = group.arrays[EIGENVALUES]["shape"][0]
    lazy = lazy_features(ds)[GRAM].data
    for index, name in enumerate(group.checkpoints):
        if not is_same or name not in before.checkpoints:
            submission = functools.partial(_factors_task, group, lazy, index, k, gram["n_samples"])
            scheduling.run(submission, retries=retries, compute=compute)
    chosen_by = None if calibrate is None else str(calibrate.attrs.get("source", ""))
    known = before.arrays.get(DAMPING, {})
    if is_same and known and before.checkpoints == group.checkpoints:
        may_stay = calibrate is None and not again
        if may_stay or known["attributes"].get("chosen_by") == chosen_by:
            group.arrays[DAMPING] = known
            return
    values, attrs = _damping(without_dropped(assembled(group)), options)
    attrs |= {"chosen_by": chosen_by, "n_samples": gram["n_samples"]}
    attrs["gram_weights"] = gram["gram_weights"]
    attrs |= VARIABLES[DAMPING].attrs
    group.write_small({DAMPING: xr.Variable(VARIABLES[DAMPING].dims, values, attrs)})


def _sum_of(group: Group) -> dict[str, Any]:
    """Return what says of which samples a gram matrix is, and where it lies."""
    gram = group.arrays.get(GRAM, {"attributes": {}})
    names = ("n_samples", "gram_weights", "power")
    described = {name: gram["attributes"].get(name) for name in names}
    return {**described, "chunks": gram.get("chunk_key_encoding")}


def _factors_task(group: Group, gram: da.Array, index: int, k: int, n: int) -> da.Array:
    own = gram[..., index : index + 1]
    name = group.checkpoints[index]
    spectrum = arrays.spectrum.spectrum(own, None, n, [name], n_component=k)
    factors = arrays.spectrum.eigenvectors(spectrum, gram.shape[0], k)
    return _writing([group.array(each) for each in _FACTORS], factors, index)


def _options(ds: xr.Dataset, calibrate: xr.Dataset | None) -> Options:
    """Return the options of scores under the gram matrix that is stored."""
    power = ds[GRAM].attrs.get("power")
    if power is None:
        return calibrated_options(ds, "trak", DEFAULT_POWER, calibrate)
    return calibrated_options(ds, "soft", power, calibrate)


def calibrated_options(
    features: xr.Dataset, estimator: Estimator, power: Power, calibrate: xr.Dataset | None
) -> Options:
    """Return the options by which a store chooses λ.

    Raises
    ------
    ValueError
        If held-out samples are given, but λ of this estimator and task is not chosen by outputs.
    """
    options = gather_options(features, estimator, power, "auto", None, None)
    if calibrate is not None and not options.is_damped_by_outputs:
        raise ValueError(
            "expected no held-out samples for a store whose λ is not chosen by outputs, got "
            f"some with estimator={options.estimator.name!r}; try estimator='soft' in td.save, or "
            "leaving them out"
        )
    return dataclasses.replace(options, calibrate=calibrate)


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
