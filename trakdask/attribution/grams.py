"""Gram matrices, λ and eigenvectors: variables of the features, or reduced from them."""

from __future__ import annotations

from dataclasses import dataclass

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.attribution.estimators import Options, Weights
from trakdask.variables import (
    CHECKPOINT,
    PROJ_DIM,
    SAMPLE,
    VARIABLES,
    aligned,
    lazy_features,
    validate,
)

__all__ = [
    "DAMPING",
    "DERIVED",
    "EIGENVALUES",
    "EIGENVECTORS",
    "GRAM",
    "LOSS_GRADIENT",
    "NORM",
    "N_SAMPLES",
    "ChoosingMatrices",
    "Matrices",
    "gram",
    "matrices",
    "stored_damping",
    "stored_decomposition",
    "stored_matrix",
    "weight_data",
]

GRAM, LOSS_GRADIENT, DAMPING = "gram", "loss_gradient", "damping"
EIGENVALUES, EIGENVECTORS = "gram_eigenvalues", "gram_eigenvectors"

DERIVED = (GRAM, LOSS_GRADIENT, EIGENVALUES, EIGENVECTORS, DAMPING)
"""All that :func:`trakdask.save` computes from features and stores beside them."""

NORM = "feature_norm"

N_SAMPLES = "n_samples"
"""In the attrs of derived arrays: of how many samples they are."""

_REMEDY = f"features.drop_vars({[GRAM, LOSS_GRADIENT]}, errors='ignore')"


def gram(features: xr.Dataset, *, weights: xr.DataArray | None = None) -> xr.DataArray:
    """Reduce features to the gram matrix of each checkpoint, K_c = Σ_z h_c(z) φ_c(z) φ_c(z)ᵀ.

    Parameters
    ----------
    features
        Dataset with ``feature`` (sample, proj_dim, checkpoint), one chunk along ``proj_dim``.
    weights
        h, (sample) or (sample, checkpoint), not negative; 1 as TRAK was published.

    Returns
    -------
    Lazy DataArray ``gram`` (proj_dim, proj_dim_1, checkpoint), one chunk per checkpoint, float64
    (above proj_dim 8192 float32, unless features are float64). Units: squared units of ``feature``.

    Raises
    ------
    ValueError
        If ``feature`` is missing or split along ``proj_dim``, or weights have other dimensions.

    Notes
    -----
    Cost: one pass over ``feature``. Products in float32 (float64 of float64 features), summed in
    float64 in a fixed order: the same bits on any scheduler for given chunks. Samples that failed,
    whose rows are NaN, are left out of the sums of the checkpoints where they failed.

    References
    ----------
    Park et al. 2023, equation 13; traker's ``BasicScoreComputer.get_xtx``.

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> td.gram(features).dims
    ('proj_dim', 'proj_dim_1', 'checkpoint')
    """
    validate(features, ["feature"], what="features")
    features = lazy_features(features)
    h = None if weights is None else weight_data(features, weights)
    data = arrays.gram.gram(features.feature.data, h)
    named = Weights() if weights is None else Weights(gram="given")
    attrs = VARIABLES["gram"].attrs | named.attrs(features)
    coords = {CHECKPOINT: features[CHECKPOINT]}
    return xr.DataArray(data, dims=VARIABLES["gram"].dims, coords=coords, name="gram", attrs=attrs)


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

    ``features`` are compared with ``feature_norm`` when they are read, if a stored matrix is used.
    ``n_samples`` is the number of samples that the gram matrix is a sum over. ``decomposition`` are
    its eigenvalues and eigenvectors and ``damping`` is λ, where they are stored; with λ there is
    nothing to choose.
    """

    features: xr.Dataset
    gram: da.Array
    n_samples: int
    choosing: ChoosingMatrices | None = None
    decomposition: tuple[da.Array, da.Array] | None = None
    damping: xr.DataArray | None = None


def matrices(features: xr.Dataset, options: Options) -> Matrices:
    """Return the matrices that an estimator and its λ need; features are chunked already.

    A gram matrix belongs to the Dataset: it is used for the rows of the Dataset, whichever were
    selected.

    Raises
    ------
    ValueError
        If there are more rows than the gram matrix has samples, if it has a dimension ``sample``,
        or if rows were selected and another matrix of all samples is needed than the one at hand.
    """
    given = None if options.weights is None else weight_data(features, options.weights)
    weights, choosing = options.estimator.weights, options.estimator.choosing
    gram = stored_matrix(features, GRAM, weights) if given is None else None
    decomposition = damping = None
    if gram is not None:
        decomposition, damping = _decomposition(features), stored_damping(features, options)
    if damping is not None or not options.is_damped_by_outputs:
        own = _gram(features, weights, given, gram)
        return Matrices(_checked(features, gram), *own, None, decomposition, damping)
    validate(features, ["output", "out_to_loss"], what="features")
    if choosing == weights:
        chosen_by = _choosing_matrices(features, choosing, given, gram)
        own = chosen_by.gram, chosen_by.n_samples
        return Matrices(_checked(features, gram), *own, chosen_by, decomposition)
    known = stored_matrix(features, GRAM, choosing)
    chosen_by = _choosing_matrices(features, choosing, None, known)
    own = _gram(features, weights, given, gram)
    return Matrices(_checked(features, gram, known), *own, chosen_by, decomposition)


def _checked(features: xr.Dataset, *stored: da.Array | None) -> xr.Dataset:
    """Return features that are compared with their norms when read, if a matrix is stored."""
    if NORM not in features or all(matrix is None for matrix in stored):
        return features
    feature = features["feature"].variable
    data = arrays.score.checked(feature.data, features[NORM].data)
    return features.assign(feature=feature._replace(data=data))


def _gram(
    features: xr.Dataset, weights: Weights, given: da.Array | None, stored: da.Array | None
) -> tuple[da.Array, int]:
    """Return the stored gram matrix, or reduce it; and the number of its samples."""
    if stored is not None:
        return stored, _n_samples(features)
    h = given
    if given is None:
        _require_all_samples(features)
        h = weights.gram_data(features)
    return arrays.gram.gram(features.feature.data, h), features.sizes[SAMPLE]


def _choosing_matrices(
    features: xr.Dataset, weights: Weights, given: da.Array | None, gram: da.Array | None
) -> ChoosingMatrices:
    """Return what λ is chosen with; ``gram`` is the stored gram matrix of these weights, if any."""
    h, g = weights.gram_data(features) if given is None else given, weights.loss_data(features)
    if gram is not None:
        loss_gradient = stored_matrix(features, LOSS_GRADIENT, weights)
        if loss_gradient is None:  # other checkpoints are pooled than when it was stored
            _require_all_samples(features)
            loss_gradient = arrays.damping.loss_gradient(features.feature.data, g)
        known = _decomposition(features)
        return ChoosingMatrices(gram, loss_gradient, _n_samples(features), h, g, known)
    if given is None:
        _require_all_samples(features)
    gram, loss_gradient = arrays.gram.gram_and_sum(features.feature.data, h, g)
    return ChoosingMatrices(gram, loss_gradient, features.sizes[SAMPLE], h, g)


def stored_matrix(features: xr.Dataset, name: str, weights: Weights) -> da.Array | None:
    """Return the matrix that features hold, if it is that of these weights and columns.

    It is the one of all samples that the features were selected from. ``loss_gradient`` pools the
    checkpoints, and is only returned if all of them are present.

    Raises
    ------
    ValueError
        If the features have more rows than the matrix has samples, or it got a dimension
        ``sample``.
    """
    if name not in features:
        return None
    matrix, needed = features[name], weights.attrs(features)
    if SAMPLE in matrix.dims:
        raise ValueError(
            f"expected {name!r} without the dimension 'sample', which where(..., drop=True) and "
            "concat add to all variables, got "
            f"{matrix.dims}; try features.isel(sample=...) to select rows, or {_REMEDY}"
        )
    compared = {GRAM: ["gram_weights"], LOSS_GRADIENT: ["loss_weights", "pooled_checkpoints"]}
    is_same = all(matrix.attrs.get(key) == needed[key] for key in compared[name])
    if not is_same or set(matrix.shape[:-1]) != {features.sizes[PROJ_DIM]}:
        return None
    if (n := features.sizes[SAMPLE]) > matrix.attrs[N_SAMPLES]:
        raise ValueError(
            f"expected at most the {matrix.attrs[N_SAMPLES]} samples that {name!r} is a sum over, "
            f"got {n}; try features.isel(sample=...), or {_REMEDY} for the matrix of these samples"
        )
    validate(features, [name], what="features")
    data: da.Array = matrix.data
    return data


def _require_all_samples(features: xr.Dataset) -> None:
    """Refuse to reduce another matrix of selected rows: all others are of all samples."""
    n, total = features.sizes[SAMPLE], _n_samples(features)
    if n < total:
        raise ValueError(
            f"expected all {total} samples, to add up what the features do not hold (a gram matrix "
            f"with other weights, or the 'loss_gradient' of these checkpoints), got {n}; try "
            f"selecting from the scores of all, or {_REMEDY} for sums of these samples alone"
        )


def stored_decomposition(
    features: xr.Dataset, weights: Weights
) -> tuple[da.Array, da.Array] | None:
    """Return the stored eigenvalues and eigenvectors of the gram matrix of some weights."""
    gram = stored_matrix(features, GRAM, weights)
    return None if gram is None else _decomposition(features)


def _decomposition(features: xr.Dataset) -> tuple[da.Array, da.Array] | None:
    """Return the eigenvalues and eigenvectors of the gram matrix of features, if they hold them."""
    if EIGENVALUES not in features or not _is_of_gram(features, EIGENVECTORS):
        return None
    validate(features, [EIGENVALUES, EIGENVECTORS], what="features")
    return features[EIGENVALUES].data, features[EIGENVECTORS].data


def _is_of_gram(features: xr.Dataset, name: str) -> bool:
    """Return whether features hold a variable, and it is of the gram matrix that they hold."""
    return name in features and all(
        features[name].attrs.get(key) == features[GRAM].attrs[key]
        for key in ("gram_weights", N_SAMPLES)
    )


def stored_damping(features: xr.Dataset, options: Options) -> xr.DataArray | None:
    """Return the λ that features hold, if the options ask for the rule that chose it.

    λ is that of all checkpoints together. What an earlier version stored as its automatic λ stays
    so: the closed form, where it is the trace now.
    """
    asked = options.damping if isinstance(options.damping, str) else None
    if asked is None or options.calibrate is not None or not _is_of_gram(features, DAMPING):
        return None
    rule, known = options.rule, features[DAMPING]
    accepted = {rule, "closed_form"} if (asked, rule) == ("auto", "trace") else {rule}
    names = {str(name) for name in features[CHECKPOINT].values}
    is_whole = set(known.attrs["pooled_checkpoints"]) == names
    return known if known.attrs["asked"] in accepted and is_whole else None


def _n_samples(features: xr.Dataset) -> int:
    """Return of how many samples the gram matrix of features is; their own if they hold none."""
    return int(features[GRAM].attrs[N_SAMPLES]) if GRAM in features else features.sizes[SAMPLE]


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
