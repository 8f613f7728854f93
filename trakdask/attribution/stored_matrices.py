"""Matrices that are stored beside features: which of them may be used, and for which features."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays import lineage
from trakdask.attribution.estimators import Weights
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, validate

__all__ = [
    "origin",
    "stored_matrix",
    "stored_samples",
    "with_origin",
    "without_foreign_matrices",
]

_REDUCED = ("feature", "out_to_loss")
"""Arrays that a gram matrix is reduced from; the second one only where its weights need it."""

_ORIGIN = "reduced_from"
"""In the attrs of a gram matrix: dask's names of the arrays that it was reduced from."""


def stored_matrix(features: xr.Dataset, name: str, weights: Weights) -> da.Array | None:
    """Return the matrix that :func:`save` stored beside the features, if it is the one needed.

    That is a matrix of the same data, weights and projection, and of at least as many samples, so
    that a selection of rows still uses it. ``loss_gradient`` pools the checkpoints, and is only
    returned if all of them are present.
    """
    if name not in features:
        return None
    array, needed = features[name], weights.attrs(features)
    # Old stores have no attrs: their matrix is that of weights 1.
    assumed = needed | {"gram_weights": "1"} if name == "gram" else {}
    recorded = assumed | array.attrs
    same = {"gram": ["gram_weights"], "loss_gradient": ["loss_weights", "pooled_checkpoints"]}[name]
    is_same = all(recorded.get(key) == needed[key] for key in ("source", *same))
    is_whole = recorded.get("samples", 0) >= needed["samples"]
    if not is_same or not is_whole or set(array.shape[:-1]) != {features.sizes[PROJ_DIM]}:
        return None
    validate(features, [name], what="features")
    data: da.Array = array.data
    return data


def stored_samples(features: xr.Dataset) -> int:
    """Return the number of samples that the stored gram matrix is a sum over."""
    return int(features["gram"].attrs.get("samples", features.sizes[SAMPLE]))


def with_origin(features: xr.Dataset) -> xr.Dataset:
    """Return features whose gram matrix records that it was reduced from their arrays."""
    if "gram" not in features:
        return features
    array = features["gram"]
    attrs = {"samples": features.sizes[SAMPLE], **array.attrs, **origin(features)}
    return features.assign(gram=array.variable._replace(attrs=attrs))


def origin(features: xr.Dataset) -> dict[str, Any]:
    """Return the ``attrs`` of a gram matrix that name the arrays which it is reduced from."""
    data = {name: features[name].data for name in _REDUCED if name in features}
    return {_ORIGIN: {n: each.name for n, each in data.items() if isinstance(each, da.Array)}}


def without_foreign_matrices(features: xr.Dataset) -> xr.Dataset:
    """Drop the stored matrices if they were reduced from other arrays than these features hold.

    They are used if the arrays are those that the matrices were reduced from, whole or with rows or
    checkpoints selected lazily. The origin of arrays in memory is unknown; if they have as many
    samples as the gram matrix, its diagonal is compared with theirs.

    Raises
    ------
    ValueError
        If the arrays are others, or their origin is unknown, and a gram matrix of these samples
        would differ from the stored one.
    """
    n, attrs = features.sizes[SAMPLE], features["gram"].attrs
    root, needed = attrs.get(_ORIGIN, {}), attrs.get("samples")
    names = _REDUCED[: 1 if attrs.get("power") is None else 2]
    data = {name: features[name].data for name in names}
    sources = {name: lineage.sources(data[name], root.get(name)) for name in names}
    is_selected = all(sources[name] == {root.get(name)} for name in names)
    if is_selected and _is_aligned(features, data, sources):
        return features
    in_memory = all(lineage.is_in_memory(data[name], sources[name]) for name in names)
    if n == needed and in_memory and not is_selected:
        if _has_diagonal_of(features):
            return features
    elif needed is not None and n >= needed:
        return features.drop_vars(["gram", "loss_gradient"], errors="ignore")
    listed = " or ".join(repr(name) for name in names)
    raise ValueError(
        f"expected {listed} as they were when 'gram' was reduced from {needed or 'its'} samples, "
        f"whole or with rows selected lazily, got arrays of {n} samples that were changed or loaded"
        " since; try selecting with features.isel(sample=...) before loading, or features.drop_vars"
        "(['gram', 'loss_gradient'], errors='ignore') to reduce a new matrix of these samples alone"
    )


def _is_aligned(
    features: xr.Dataset, data: dict[str, da.Array], sources: dict[str, frozenset[str]]
) -> bool:
    """Return whether all arrays have all columns, and the same rows and checkpoints."""
    selections = [lineage.selection(data[name], sources[name]) for name in data]
    names = features["gram"].attrs.get("pooled_checkpoints", [])
    here = [str(name) for name in features[CHECKPOINT].values]
    expected = tuple(names.index(name) for name in here) if set(here) <= set(names) else None
    return not selections[0].columns and all(
        each.rows == selections[0].rows
        and each.checkpoints == (selections[0].checkpoints if expected is None else expected)
        for each in selections
    )


def _has_diagonal_of(features: xr.Dataset) -> bool:
    """Return whether the stored gram matrix has the diagonal of the features', up to rounding."""
    matrix, x = features["gram"].data, features.feature.data
    if matrix.shape[0] != x.shape[1]:
        return False
    h = Weights(power=features["gram"].attrs.get("power")).gram_data(features)
    # Computed in this process: a cluster would have to be sent the arrays in memory.
    expected = arrays.gram.diagonal(x, h).compute(scheduler="sync")
    is_here = lineage.is_in_memory(matrix, lineage.sources(matrix))
    diagonal = da.einsum("iic->ic", matrix).compute(scheduler="sync" if is_here else None)
    largest = np.nanmax(diagonal, initial=0)
    return bool(np.allclose(expected, diagonal, rtol=1e-4, atol=1e-6 * largest, equal_nan=True))
