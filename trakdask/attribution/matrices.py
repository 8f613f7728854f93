"""The matrices that scores need: stored beside the features, or reduced from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays import lineage
from trakdask.attribution.estimators import Weights
from trakdask.attribution.options import Options
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, aligned, validate

__all__ = [
    "DAMPING",
    "DERIVED",
    "EIGENVALUES",
    "EIGENVECTORS",
    "ORIGIN",
    "ChoosingMatrices",
    "Matrices",
    "matrices",
    "origin",
    "output_total",
    "stored_damping",
    "stored_decomposition",
    "stored_matrix",
    "weight_data",
    "with_origin",
    "without_foreign_matrices",
]

_REDUCED = ("feature", "out_to_loss")
"""Arrays that a gram matrix is reduced from; the second one only where its weights need it."""

EIGENVALUES, EIGENVECTORS = "gram_eigenvalues", "gram_eigenvectors"
DAMPING = "damping"

DERIVED = ("gram", "loss_gradient", EIGENVALUES, EIGENVECTORS, DAMPING)
"""All that :func:`trakdask.save` computes from features and stores beside them."""

ORIGIN = "reduced_from"
"""In the attrs of derived arrays: dask's names of the arrays that they were computed from."""


@dataclass(frozen=True)
class ChoosingMatrices:
    """K and r under the weights h (None for 1) and g by which outputs choose λ."""

    gram: da.Array
    loss_gradient: da.Array
    n_samples: int
    h: da.Array | None
    g: da.Array
    decomposition: tuple[da.Array, da.Array] | None = None


@dataclass(frozen=True)
class Matrices:
    """The gram matrix of an estimator, and what λ is chosen with if outputs choose it.

    ``n_samples`` is the number of samples that the gram matrix is a sum over. ``decomposition`` are
    its eigenvalues and eigenvectors and ``damping`` is λ, where they are stored and valid; with λ
    there is nothing to choose.
    """

    gram: da.Array
    n_samples: int
    choosing: ChoosingMatrices | None = None
    decomposition: tuple[da.Array, da.Array] | None = None
    damping: xr.DataArray | None = None


def matrices(features: xr.Dataset, options: Options) -> Matrices:
    """Return the matrices that an estimator and its λ need; features are chunked already."""
    given = None if options.weights is None else weight_data(features, options.weights)
    weights, choosing = options.estimator.weights, options.estimator.choosing
    by_outputs = options.is_damped_by_outputs
    needed = {weights, choosing} if by_outputs else {weights}
    if given is not None:  # the gram matrix of given weights is never stored
        needed.discard(weights)
    features, stored = _stored_grams(features, needed)
    gram = stored.get(weights)
    own = None if gram is None else _decomposition(features, gram)
    damping = None if own is None else stored_damping(features, options)
    if damping is not None or not by_outputs:
        return Matrices(*_gram(features, weights, given, gram), decomposition=own, damping=damping)
    validate(features, ["output", "out_to_loss"], what="features")
    is_same = choosing == weights
    chosen_by = _choosing_matrices(
        features, choosing, given if is_same else None, stored.get(choosing)
    )
    if is_same and gram is None:
        return Matrices(chosen_by.gram, chosen_by.n_samples, chosen_by)
    return Matrices(*_gram(features, weights, given, gram), chosen_by, decomposition=own)


def _stored_grams(
    features: xr.Dataset, needed: set[Weights]
) -> tuple[xr.Dataset, dict[Weights, da.Array]]:
    """Return the stored gram matrices by their weights, and features without foreign ones."""
    found = {each: stored_matrix(features, "gram", each) for each in needed}
    stored = {each: matrix for each, matrix in found.items() if matrix is not None}
    if stored:
        features = without_foreign_matrices(features)
    return features, stored if "gram" in features else {}


def _gram(
    features: xr.Dataset, weights: Weights, given: da.Array | None, stored: da.Array | None
) -> tuple[da.Array, int]:
    """Return the stored gram matrix, or reduce it; and the number of its samples."""
    if stored is not None:
        return stored, _stored_samples(features)
    h = weights.gram_data(features) if given is None else given
    return arrays.gram.gram(features.feature.data, h), features.sizes[SAMPLE]


def _choosing_matrices(
    features: xr.Dataset, weights: Weights, given: da.Array | None, gram: da.Array | None
) -> ChoosingMatrices:
    """Return what λ is chosen with; ``gram`` is the stored gram matrix of these weights, if any."""
    h, g = weights.gram_data(features) if given is None else given, weights.loss_data(features)
    if gram is not None:
        loss_gradient, n = stored_matrix(features, "loss_gradient", weights), features.sizes[SAMPLE]
        if loss_gradient is None and n == _stored_samples(features):
            # Other checkpoints are pooled than when it was stored; the gram matrices are the same.
            loss_gradient = arrays.completeness.loss_gradient(features.feature.data, g)
        if loss_gradient is not None:
            known = _decomposition(features, gram)
            return ChoosingMatrices(gram, loss_gradient, _stored_samples(features), h, g, known)
    gram, loss_gradient = arrays.gram.gram_and_sum(features.feature.data, h, g)
    return ChoosingMatrices(gram, loss_gradient, features.sizes[SAMPLE], h, g)


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


def stored_decomposition(
    features: xr.Dataset, weights: Weights
) -> tuple[da.Array, da.Array] | None:
    """Return the stored eigenvalues and eigenvectors of the gram matrix of some weights.

    They are used if that gram matrix is stored, too, and is still the array that was decomposed.
    """
    gram = stored_matrix(features, "gram", weights)
    return None if gram is None else _decomposition(features, gram)


def _decomposition(features: xr.Dataset, gram: da.Array) -> tuple[da.Array, da.Array] | None:
    """Return the stored eigenvalues and eigenvectors, if they are of this gram matrix."""
    if EIGENVALUES not in features or EIGENVECTORS not in features:
        return None
    validate(features, [EIGENVALUES, EIGENVECTORS], what="features")
    values, vectors = features[EIGENVALUES].data, features[EIGENVECTORS].data
    n_component = (vectors.shape[0], _stored_samples(features))
    if vectors.shape[::2] != gram.shape[::2] or values.shape != vectors.shape[1:]:
        return None
    if vectors.shape[1] not in n_component:
        return None
    root = features[EIGENVECTORS].attrs.get(ORIGIN, {}).get("gram")
    if lineage.sources(gram, root) == {root}:
        return values, vectors
    in_memory = (lineage.is_in_memory(x, lineage.sources(x)) for x in (gram, values, vectors))
    is_product = all(in_memory) and arrays.spectrum.is_decomposition(gram, values, vectors)
    return (values, vectors) if is_product else None


def stored_damping(features: xr.Dataset, options: Options) -> xr.DataArray | None:
    """Return the stored λ, if the options ask for the rule that chose it.

    λ is that of all checkpoints together, and of the outputs that it was chosen by. What an earlier
    version stored as its automatic λ stays so: the closed form, where it is the trace now.
    """
    if DAMPING not in features or options.calibrate is not None:
        return None
    asked = options.damping if isinstance(options.damping, str) else None
    rule, known = options.rule, features[DAMPING]
    accepted = {rule, "closed_form"} if (asked, rule) == ("auto", "trace") else {rule}
    names = {str(name) for name in features[CHECKPOINT].values}
    is_asked = asked is not None and known.attrs.get("asked") in accepted
    if not is_asked or set(known.attrs.get("pooled_checkpoints", ())) != names:
        return None
    if rule == "completeness" and not _has_same_outputs(features, known.attrs):
        return None
    return known


def _has_same_outputs(features: xr.Dataset, attrs: Mapping[str, Any]) -> bool:
    """Return whether λ was chosen by these outputs, or by those that they were selected from."""
    output, root = features["output"].data, attrs.get(ORIGIN, {}).get("output")
    origins = lineage.sources(output, root)
    if origins == {root}:
        return True
    is_whole = features.sizes[SAMPLE] == _stored_samples(features)
    if not is_whole or not lineage.is_in_memory(output, origins):
        return False
    total = float(output_total(output).compute(scheduler="sync"))
    return bool(np.isclose(total, attrs.get("output_total", np.nan), rtol=1e-9))


def output_total(output: da.Array) -> da.Array:
    """Return the sum of the sizes of all outputs, by which arrays in memory are recognised."""
    total: da.Array = da.nansum(da.absolute(output.astype(np.float64)))
    return total


def _stored_samples(features: xr.Dataset) -> int:
    """Return the number of samples that the stored gram matrix is a sum over."""
    return int(features["gram"].attrs.get("samples", features.sizes[SAMPLE]))


def with_origin(features: xr.Dataset) -> xr.Dataset:
    """Return features whose derived arrays record which arrays they were computed from."""
    sources = {
        "gram": _REDUCED,
        EIGENVECTORS: ("gram",),
        DAMPING: ("output",),
    }
    variables = {}
    for name, names in sources.items():
        if name in features:
            attrs = {"samples": features.sizes[SAMPLE]} if name == "gram" else {}
            attrs |= features[name].attrs | origin(features, names)
            variables[name] = features[name].variable._replace(attrs=attrs)
    return features.assign(variables)


def origin(features: xr.Dataset, names: tuple[str, ...] = _REDUCED) -> dict[str, Any]:
    """Return the ``attrs`` of a derived array that name the arrays which it is computed from."""
    data = {name: features[name].data for name in names if name in features}
    return {ORIGIN: {n: each.name for n, each in data.items() if isinstance(each, da.Array)}}


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
    root, needed = attrs.get(ORIGIN, {}), attrs.get("samples")
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
        return features.drop_vars(DERIVED, errors="ignore")
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


def weight_data(features: xr.Dataset, weights: xr.DataArray) -> da.Array:
    """Return given weights (sample, checkpoint) in the chunks of the features, checked.

    By their labels where both sides have them: see :func:`trakdask.variables.aligned`.
    """
    shape = {dim: features.sizes[dim] for dim in (SAMPLE, CHECKPOINT)}
    if isinstance(weights, xr.DataArray) and set(weights.dims) <= set(shape):
        weights = aligned(weights, features, what="weights")
    sizes = dict(weights.sizes) if isinstance(weights, xr.DataArray) else type(weights).__name__
    if sizes not in ({SAMPLE: shape[SAMPLE]}, shape):
        raise ValueError(
            f"expected weights as a DataArray of {shape}, with or without checkpoint, got {sizes}; "
            "try xr.DataArray(h, dims='sample')"
        )
    if weights.dtype.kind not in "fiub":
        raise ValueError(
            f"expected weights in numbers, got dtype {weights.dtype}; try weights.astype(float)"
        )
    if weights.chunks is None:
        _require_positive(weights)
    chunks = {dim: features.feature.variable.chunksizes[dim] for dim in shape}
    full = weights.broadcast_like(
        xr.DataArray(np.empty(features.sizes[CHECKPOINT]), dims=CHECKPOINT)
    )
    data: da.Array = full.transpose(SAMPLE, CHECKPOINT).variable.chunk(chunks).data
    return data


def _require_positive(weights: xr.DataArray) -> None:
    values = weights.values
    bad = ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        at = np.argwhere(bad)[0]
        where = ", ".join(f"{dim} {int(i)}" for dim, i in zip(weights.dims, at, strict=True))
        raise ValueError(
            f"expected finite weights >= 0, since the gram matrix must stay positive, got "
            f"{values[tuple(at)]} at {where}; try weights.clip(min=0).fillna(0)"
        )
