"""Gram matrices, λ and eigenvectors: variables of the features, or reduced from them."""

from __future__ import annotations

from dataclasses import dataclass

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays.spectrum import component_count
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
class GramMatrix:
    """K of all samples under some weights, and what belongs to it.

    ``labels`` are the names of the checkpoints, for errors. ``spectrum`` are the eigenvectors,
    where they are stored, or λ is to be chosen by outputs under these weights; then there are also
    h (None for 1) and g, (sample, checkpoint).
    """

    data: da.Array
    n_samples: int
    labels: list[str]
    is_stored: bool
    spectrum: da.Array | None = None
    h: da.Array | None = None
    g: da.Array | None = None

    def mean_trace(self) -> da.Array:
        """Return tr(K)/n, (checkpoint)."""
        return arrays.damping.mean_trace(self.data, self.n_samples, self.labels)

    def closed_form(self, factor: float) -> da.Array:
        """Return factor · tr(K²)/tr(K), (checkpoint)."""
        return arrays.damping.closed_form(self.data, factor, self.labels)


def gram_matrix(
    features: xr.Dataset,
    weights: Weights,
    h: da.Array | None = None,
    *,
    chooses_damping: bool = False,
) -> GramMatrix:
    """Return the gram matrix that features hold, or reduce it; features are chunked already.

    A gram matrix belongs to the Dataset: it is used for the rows of the Dataset, whichever were
    selected.

    Parameters
    ----------
    features
        Features of all training samples, or rows of them with the gram matrix of all.
    weights
        Those of the estimator, or those under which outputs choose λ.
    h
        In place of that of ``weights``, (sample, checkpoint), of which no matrix is stored.
    chooses_damping
        Whether λ is to be chosen with it.

    Raises
    ------
    ValueError
        If there are more rows than the gram matrix has samples, if it has a dimension ``sample``,
        or if rows were selected and another matrix of all samples is needed than the one at hand.
    """
    stored = stored_matrix(features, GRAM, weights) if h is None else None
    if stored is not None:
        return _stored_gram(features, weights, stored, chooses_damping=chooses_damping)
    if h is None:
        _require_all_samples(features)
        h = weights.gram_data(features)
    x, n, labels = features["feature"].data, features.sizes[SAMPLE], _labels(features)
    if not chooses_damping:
        return GramMatrix(arrays.gram.gram(x, h), n, labels, is_stored=False)
    g = weights.loss_data(features)
    gram, loss_gradient = arrays.gram.gram_and_sum(x, h, g)
    spectrum = _decomposed(x, gram, loss_gradient, n, labels)
    return GramMatrix(gram, n, labels, False, spectrum, h, g)


def _stored_gram(
    features: xr.Dataset, weights: Weights, gram: da.Array, *, chooses_damping: bool
) -> GramMatrix:
    h = g = loss_gradient = spectrum = None
    x, n, labels = features["feature"].data, _n_samples(features), _labels(features)
    if chooses_damping:
        h, g = weights.gram_data(features), weights.loss_data(features)
        loss_gradient = stored_matrix(features, LOSS_GRADIENT, weights)
        if loss_gradient is None:  # other checkpoints are pooled than when it was stored
            _require_all_samples(features)
            loss_gradient = arrays.gram.loss_gradient(x, g)
    decomposition = _decomposition(features)
    if decomposition is not None:
        spectrum = arrays.spectrum.from_eigenvectors(*decomposition, loss_gradient, n, labels)
    elif chooses_damping:
        spectrum = _decomposed(x, gram, loss_gradient, n, labels)
    return GramMatrix(gram, n, labels, True, spectrum, h, g)


def _decomposed(
    x: da.Array, gram: da.Array, loss_gradient: da.Array | None, n: int, labels: list[str]
) -> da.Array:
    k = component_count(n, x.shape[1], x.dtype)
    return arrays.spectrum.spectrum(gram, loss_gradient, n, labels, n_component=k)


def _labels(features: xr.Dataset) -> list[str]:
    return [str(name) for name in features[CHECKPOINT].values]


def compared_with_norms(features: xr.Dataset) -> xr.Dataset:
    """Return features that are compared with their norms when read, as a stored matrix needs."""
    if NORM not in features:
        return features
    feature = features["feature"].variable
    data = arrays.score.checked(feature.data, features[NORM].data)
    return features.assign(feature=feature._replace(data=data))


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
    """Return the λ that features hold beside the gram matrix, if the options ask for its rule.

    λ is that of all checkpoints together.
    """
    is_rule = isinstance(options.damping, str)
    if not is_rule or options.calibrate is not None or options.weights is not None:
        return None
    is_at_hand = stored_matrix(features, GRAM, options.estimator.weights) is not None
    if not is_at_hand or not _is_of_gram(features, DAMPING):
        return None
    attrs = features[DAMPING].attrs
    is_whole = set(attrs["pooled_checkpoints"]) == set(_labels(features))
    return features[DAMPING] if attrs["asked"] == options.rule and is_whole else None


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
    if sizes not in ({SAMPLE: shape[SAMPLE]}, shape) or weights.dtype.kind not in "fiub":
        raise ValueError(
            f"expected weights as a DataArray of numbers, {shape} with or without checkpoint, got "
            f"{sizes} of {getattr(weights, 'dtype', 'objects')}; try xr.DataArray(h, dims='sample')"
        )
    if weights.chunks is None:
        _require_positive(weights)
    chunks = {dim: features.feature.variable.chunksizes[dim] for dim in shape}
    data: da.Array = weights.variable.set_dims(shape).chunk(chunks).data
    return data


def _require_positive(weights: xr.DataArray) -> None:
    bad = np.argwhere(~(np.isfinite(weights.values) & (weights.values >= 0)))
    if len(bad):
        where = dict(zip(weights.dims, bad[0].tolist(), strict=True))
        raise ValueError(
            f"expected finite weights >= 0, since the gram matrix must stay positive, got "
            f"{weights.values[tuple(bad[0])]} at {where}; try weights.clip(min=0).fillna(0)"
        )
