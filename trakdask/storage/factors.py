"""λ and the eigenvectors of the gram matrix, computed once and stored beside it.

With them a query neither decomposes a matrix nor chooses λ. They are an edit of the store: its
attributes say of which gram matrix they are, and they are shown only while the store has that one.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr
import zarr
from dask.base import tokenize
from zarr.codecs import Crc32cCodec

from trakdask import arrays
from trakdask.arrays.blocks import Blocks, flat
from trakdask.arrays.decomposition import component_count
from trakdask.attribution.dampings import describe_damping, regularize
from trakdask.attribution.estimators import DEFAULT_POWER, Estimator, Options, Power, gather_options
from trakdask.attribution.grams import (
    DAMPING,
    EIGENVALUES,
    EIGENVECTORS,
    N_SAMPLES,
)
from trakdask.attribution.products import LOGIT_VARIANCE
from trakdask.execution import scheduling
from trakdask.files import Folder
from trakdask.storage.history import Edit, last_edit, remove_obsolete, write_edit
from trakdask.storage.mapping import lazy_array
from trakdask.storage.parts import FACTORS, GRAM
from trakdask.storage.zarr_stores import Complete, Recorded, Writable, zarr_store
from trakdask.variables import CHECKPOINT, PROJ_DIM, VARIABLES, lazy_features

__all__ = [
    "MOST_DIM",
    "calibrated_options",
    "has_factors",
    "renew_factors",
    "update_factors",
    "update_if_possible",
    "with_factors",
]

#: Above this proj_dim, :func:`save` leaves the decomposition, which takes 32 p² bytes in one task,
#: to :func:`calibrate`.
MOST_DIM = 8192

_NAMES = (EIGENVALUES, EIGENVECTORS)
_log = logging.getLogger(__name__)


def with_factors(edit: Edit | None, ds: xr.Dataset) -> xr.Dataset:
    """Add the stored λ and eigenvectors to the features of a store, if they are of its gram matrix.

    The eigenvectors are lazy.
    """
    if edit is None or GRAM not in ds or not _is_of(edit, ds):
        return ds
    of_gram = _of_gram(ds)
    variables = {
        name: (VARIABLES[name].dims, data, VARIABLES[name].attrs | of_gram)
        for name, data in _opened(edit.store(), edit.folder).items()
    }
    known = edit.attrs["damping"]
    attrs = {**VARIABLES[DAMPING].attrs, **known["attrs"], **of_gram}
    token = tokenize(edit.folder.url, dict(edit.files), known["values"])
    damping = da.from_array(np.array(known["values"]), chunks=1, name=f"open-damping-{token}")
    return ds.assign(variables | {DAMPING: (CHECKPOINT, damping, attrs)})


def _of_gram(ds: xr.Dataset) -> dict[str, Any]:
    """Return the attrs of what is made from the gram matrix of features."""
    return {name: ds[GRAM].attrs[name] for name in ("gram_weights", N_SAMPLES)}


def has_factors(ds: xr.Dataset) -> bool:
    """Return whether features have a stored λ and eigenvectors."""
    return EIGENVECTORS in ds and DAMPING in ds


def _is_of(edit: Edit, ds: xr.Dataset) -> bool:
    """Return whether an edit is of the gram matrix, and the checkpoints, of some features."""
    ours = _described(ds)
    return {name: edit.attrs.get(name) for name in ours} == ours


def _described(ds: xr.Dataset) -> dict[str, Any]:
    attrs = ds[GRAM].attrs
    names = [str(name) for name in ds[CHECKPOINT].values]
    return {
        **{name: attrs.get(name) for name in ("source", "gram_weights", "power")},
        "samples": attrs[N_SAMPLES],
        "checkpoints": names,
        "hashes": [str(ds.attrs["checkpoints"][name]) for name in names],
    }


def _opened(store: Complete, folder: Folder) -> dict[str, da.Array]:
    token = tokenize(store)
    return {
        name: lazy_array(
            folder, name, store.array(name), token=f"open-{name.replace('_', '-')}-{token}"
        )
        for name in _NAMES
    }


def update_if_possible(folder: Folder, ds: xr.Dataset, **options: Any) -> xr.Dataset:
    """Call :func:`update_factors`; where scores will be an error anyway, log it and do nothing.

    A gram matrix that is not finite, or 0, has no λ; the features are still worth their store.
    """
    try:
        return update_factors(folder, ds, **options)
    except (ValueError, np.linalg.LinAlgError) as err:
        _log.warning("λ and the eigenvectors of the gram matrix were not stored: %s", err)
        remove_obsolete(folder, FACTORS)
        return _without_factors(ds)


def renew_factors(folder: Folder, ds: xr.Dataset) -> xr.Dataset:
    """Replace λ and eigenvectors that are of an earlier gram matrix of a store."""
    if GRAM in ds and last_edit(folder, FACTORS) is not None:
        return update_if_possible(folder, ds)
    return ds


def update_factors(
    folder: Folder,
    ds: xr.Dataset,
    calibrate: xr.Dataset | None = None,
    *,
    again: bool = False,
    retries: int = 0,
) -> xr.Dataset:
    """Store λ and the eigenvectors of the gram matrix of a store, unless they are there.

    Parameters
    ----------
    folder
        The store; the caller holds its lease.
    ds
        What :func:`open` returns of it, with its gram matrix.
    calibrate
        Features of held-out samples that choose λ, instead of training samples.
    again
        Choose λ anew if other samples chose the one that is there.
    retries
        Further attempts at the decomposition.

    Returns
    -------
    What :func:`open` would return now.
    """
    before = remove_obsolete(folder, FACTORS)  # what was left by a call that was killed goes
    options = _options(ds, calibrate)
    chosen_by = None if calibrate is None else str(calibrate.attrs.get("source", ""))
    may_differ = calibrate is None and not again
    if has_factors(ds) and (may_differ or ds[DAMPING].attrs["chosen_by"] == chosen_by):
        return ds
    ds = _without_factors(ds)
    values, vectors = _decomposition(before, ds)

    def fill(at: Folder, store: Recorded) -> dict[str, Any]:
        group = zarr.open_group(store, mode="r+", zarr_format=3)
        for name, data in zip(_NAMES, (values, vectors), strict=True):
            group.create_array(
                name, shape=data.shape, chunks=(*data.shape[:-1], 1), dtype=data.dtype,
                compressors=[Crc32cCodec()], fill_value=np.nan,
                dimension_names=VARIABLES[name].dims,
            )  # fmt: skip
        written = Writable.among(at, _NAMES, store.written)
        submission = functools.partial(_written, written, values, vectors)
        for files in scheduling.run(submission, retries=retries, compute=_computed) or ():
            store.written.update(files)
        whole = Complete(zarr_store(at), at, store.written, token=str(store.written))
        opened = _opened(whole, at)
        damping = _damping(
            ds.assign({n: (VARIABLES[n].dims, d, _of_gram(ds)) for n, d in opened.items()}), options
        )
        damping["attrs"]["chosen_by"] = chosen_by
        return {"damping": damping}

    edit = write_edit(folder, FACTORS, {"pieces": 1, **_described(ds)}, fill)
    return with_factors(edit, ds)


def _without_factors(ds: xr.Dataset) -> xr.Dataset:
    return ds.drop_vars((*_NAMES, DAMPING), errors="ignore")


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


def _decomposition(edit: Edit | None, ds: xr.Dataset) -> tuple[da.Array, da.Array]:
    """Return eigenvalues and eigenvectors; those of unchanged gram matrices are read, not made."""
    ours = _described(ds)
    known: dict[tuple[str, str], int] = {}
    if edit is not None and all(
        edit.attrs.get(name) == ours[name]
        for name in ("source", "samples", "gram_weights", "power")
    ):
        pairs = zip(edit.attrs["checkpoints"], edit.attrs["hashes"], strict=True)
        known = {pair: index for index, pair in enumerate(pairs)}
    old = _opened(edit.store(), edit.folder) if edit is not None and known else {}
    n, p = ours["samples"], ds.sizes[PROJ_DIM]
    n_component = component_count(n, p, ds.feature.dtype)
    if old and old[EIGENVALUES].shape[0] != n_component:  # all p, of an earlier version
        known = {}
    parts = []
    for index, pair in enumerate(zip(ours["checkpoints"], ours["hashes"], strict=True)):
        if pair in known:
            at = slice(known[pair], known[pair] + 1)
            parts.append(tuple(old[name][..., at] for name in _NAMES))
        else:
            gram = lazy_features(ds)[GRAM].data[..., index : index + 1]
            spectrum = arrays.spectrum.spectrum(gram, None, n, [pair[0]], n_component=n_component)
            parts.append(arrays.spectrum.eigenvectors(spectrum, p, n_component))
    values, vectors = (da.concatenate(each, axis=-1) for each in zip(*parts, strict=True))
    return values, vectors


def _written(at: Writable, values: da.Array, vectors: da.Array) -> da.Array:
    written: da.Array = da.blockwise(
        functools.partial(_write, at), "c", values, "kc", vectors, "pkc",
        da.arange(values.shape[1], chunks=1), "c",
        dtype=object, meta=np.empty(0, object), concatenate=False, align_arrays=False,
        name=f"save-factors-{tokenize(at.folder.url, values.name, vectors.name)}",
    )  # fmt: skip
    return written


def _write(at: Writable, values: Blocks, vectors: Blocks, number: np.ndarray) -> np.ndarray:
    """Write the factors of one checkpoint; return the files with their sizes and checksums."""
    index = int(number[0])
    (own_values,), (own_vectors,) = flat(values), flat(vectors)
    own = dict(zip(_NAMES, (own_values, own_vectors), strict=True))
    files = at.write(own, (..., slice(index, index + 1)))
    answer = np.empty(1, object)
    answer[0] = files
    return answer


def _computed(written: da.Array, **options: Any) -> list[dict[str, Any]]:
    (answers,) = dask.compute(written, **options)
    return list(answers)


def _damping(ds: xr.Dataset, options: Options) -> dict[str, Any]:
    """Choose λ, from the stored eigenvectors; return its values and attrs."""
    features = lazy_features(ds)
    regularized = regularize(features, options, quiet=True)
    lazy = describe_damping(features, regularized)
    is_soft = options.estimator.weights.power is not None
    chosen, variance = dask.compute(
        lazy,
        arrays.weights.logit_variance(features.out_to_loss.data) if is_soft else None,
    )
    by_outputs = options.is_damped_by_outputs
    attrs: dict[str, Any] = {
        "asked": options.rule,
        "rule": str(chosen.rule.values),
        "pooled_checkpoints": [str(name) for name in ds[CHECKPOINT].values],
    }
    if variance is not None:
        attrs[LOGIT_VARIANCE] = variance.tolist()
    if by_outputs:
        attrs |= {name: float(chosen[name]) for name in ("relative", "peak", "threshold")}
        attrs["curve"] = chosen.curve.values.tolist()
        attrs["tried"] = [text.removeprefix("completeness, ") for text in regularized.rules[:-1]]
    return {"values": chosen.damping.values.tolist(), "attrs": attrs}
