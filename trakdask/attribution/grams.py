"""Gram matrices and their eigenvectors: variables of the features, or computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays.graphs import plain
from trakdask.arrays.memory import Sizes
from trakdask.attribution.gauss_newton import Trak
from trakdask.attribution.protocol import GIVEN, GramEstimator
from trakdask.execution import require_memory
from trakdask.variables import (
    CHECKPOINT,
    COLUMN,
    EIGENVALUES,
    EIGENVECTORS,
    GRAM,
    LOSS_GRADIENT,
    N_SAMPLES,
    PROJ_DIM,
    SAMPLE,
    VARIABLES,
    aligned,
    checkpoint_names,
    lazy_features,
    validate,
)

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
    h = None if weights is None else _checked_weights(features, weights)
    variable, coords = VARIABLES[GRAM], {CHECKPOINT: features[CHECKPOINT]}
    attrs = variable.attrs | (Trak() if weights is None else _OfCaller()).attrs(features)
    require_gram(Sizes.of(features.feature.data))
    data = arrays.gram.gram(features.feature.data, h)
    return xr.DataArray(data, coords, variable.dims, GRAM, attrs)


def _checked_weights(features: xr.Dataset, weights: xr.DataArray) -> da.Array:
    """Return h that was passed, (sample, checkpoint), in the chunks of the features.

    It is aligned by labels where both sides have them: see :func:`trakdask.variables.aligned`.
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
        bad = np.argwhere(~(np.isfinite(weights.values) & (weights.values >= 0)))
        if len(bad):
            where = dict(zip(weights.dims, bad[0].tolist(), strict=True))
            raise ValueError(
                "expected finite weights >= 0, since the gram matrix must stay positive, got "
                f"{weights.values[tuple(bad[0])]} at {where}; try weights.clip(min=0).fillna(0)"
            )
    chunks = {dim: features.feature.variable.chunksizes[dim] for dim in shape}
    return plain(weights.variable.set_dims(shape).chunk(chunks).data)


@dataclass(frozen=True)
class GramMatrix:
    """K of all samples under some weights, and the arrays that belong to it.

    ``labels`` are the names of the checkpoints, for errors. ``spectrum`` has the eigenvectors,
    where they are stored, or λ is to be chosen by outputs.
    """

    data: da.Array
    n_samples: int
    labels: list[str]
    estimator: GramEstimator
    is_stored: bool
    spectrum: da.Array | None


class _OfCaller(Trak):
    """The weights of a gram matrix that was made with weights of its caller, for any estimator."""

    @property
    def gram_weights(self) -> str:
        """The name of the weights in ``attrs``."""
        return GIVEN

    def h(self, features: xr.Dataset) -> da.Array:
        """Raise: the features do not have them."""
        raise ValueError(
            f"expected {GRAM!r} with the {features.sizes[PROJ_DIM]} columns of the features, as "
            "td.gram(features, weights=...) returns it, got another shape; try making it anew"
        )


def gram_matrix(
    features: xr.Dataset,
    estimator: GramEstimator,
    *,
    chooses_damping: bool = False,
    decomposed: bool = False,
) -> GramMatrix:
    """Return the gram matrix that features hold, or reduce it; features are chunked already.

    A gram matrix belongs to the Dataset: it is used for the rows of the Dataset, whichever were
    selected.

    Parameters
    ----------
    features
        Features of all training samples, or rows of them with the gram matrix of all.
    estimator
        The estimator of scores, or of the choice of λ, with its weights in sums.
    chooses_damping
        Whether λ is to be chosen with the matrix.
    decomposed
        Whether its eigenvectors are needed anyway.

    Raises
    ------
    ValueError
        If there are more rows than the gram matrix has samples, if it has a dimension ``sample``,
        or if rows were selected and another matrix of all samples is needed than the one at hand.
    """
    n, labels = features.sizes[SAMPLE], checkpoint_names(features)
    total = int(features[GRAM].attrs.get(N_SAMPLES, n)) if GRAM in features else n
    needed = [GRAM, LOSS_GRADIENT] if chooses_damping else [GRAM]
    held = {GRAM: stored_matrix(features, GRAM, estimator)}
    is_stored, factors = held[GRAM] is not None, None
    if is_stored:
        n, factors = total, stored_decomposition(features, estimator)
        # None if other checkpoints were pooled when it was stored.
        held[LOSS_GRADIENT] = stored_matrix(features, LOSS_GRADIENT, estimator)
    missing = [name for name in needed if held.get(name) is None]
    if missing and features.sizes[SAMPLE] < total:
        raise ValueError(
            f"expected all {total} samples, to add up what the features do not hold (a gram matrix "
            "with other weights, or the 'loss_gradient' of these checkpoints), got "
            f"{features.sizes[SAMPLE]}; try selecting from the scores of all, or {_REMEDY} for "
            "sums of these samples alone"
        )
    held |= zip(missing, sums(features, estimator, missing), strict=True)
    matrix, gradient = held[GRAM], held.get(LOSS_GRADIENT)
    assert matrix is not None, "it is stored, or a sum"
    if (chooses_damping or decomposed) and factors is None:
        factors = decomposition(features, estimator, matrix, n)
    spectrum = factors and arrays.spectra.spectrum(*factors, gradient, n, labels)
    return GramMatrix(matrix, n, labels, estimator, is_stored, spectrum)


def sums(
    features: xr.Dataset,
    estimator: GramEstimator,
    names: Sequence[str],
    checkpoint: int | None = None,
) -> list[da.Array]:
    """Return sums over features, lazy: of the names, which are in the order gram, loss_gradient.

    At one checkpoint only, if its number is given; the weights of ``loss_gradient`` are pooled over
    all checkpoints also then.
    """
    some = features
    if checkpoint is not None:
        some = features.isel({CHECKPOINT: slice(checkpoint, checkpoint + 1)})
    x, g = some["feature"].data, None
    if LOSS_GRADIENT in names:
        g = estimator.g(features)
        g = g if checkpoint is None else arrays.weights.pooled(g)[:, None]
    if GRAM not in names:
        return [] if g is None else [arrays.gram.loss_gradient(x, g)]
    require_gram(Sizes.of(x))
    h = estimator.h(some)
    matrix, *others = [arrays.gram.gram(x, h)] if g is None else arrays.gram.gram_and_sum(x, h, g)
    return [estimator.completed(matrix, some), *others]


def require_gram(sizes: Sizes) -> None:
    """Refuse a gram matrix that no worker has the memory for."""
    require_memory(
        arrays.memory.gram(sizes),
        f"a task of the gram matrices of {sizes.proj_dim} columns",
        "try fewer columns, larger workers, or estimator=None, which stores features alone",
    )


def require_eigenvectors(proj_dim: int, n_component: int) -> None:
    """Refuse eigenvectors that no worker has the memory for."""
    require_memory(
        arrays.memory.eigenvectors(proj_dim, n_component),
        f"the eigenvectors of a gram matrix of {proj_dim} columns",
        "try fewer columns, larger workers, or an estimator with a damping of yours, which needs "
        "none",
    )


def decomposition(
    features: xr.Dataset, estimator: GramEstimator, matrix: da.Array, n: int
) -> tuple[da.Array, da.Array]:
    """Return the lazy eigenvalues and eigenvectors of the gram matrix of n samples."""
    p, dtype = features.sizes[PROJ_DIM], features["feature"].dtype
    k = arrays.spectra.component_count(estimator.rank(n, features), p, dtype)
    require_eigenvectors(p, k)
    return arrays.spectra.eigenvectors(matrix, checkpoint_names(features), k)


def of_gram(features: xr.Dataset, estimator: GramEstimator) -> GramEstimator:
    """Return the estimator with the weights that the gram matrix of features has, or is to have."""
    is_of_caller = GRAM in features and features[GRAM].attrs.get("gram_weights") == GIVEN
    return _OfCaller() if is_of_caller else estimator.of_sums()


def stored_matrix(features: xr.Dataset, name: str, estimator: GramEstimator) -> da.Array | None:
    """Return the gram matrix or loss gradient that features hold, if its weights are these.

    It is the sum over all samples that the features were selected from. ``loss_gradient`` pools
    the checkpoints, and is only returned if all of them are present.

    Raises
    ------
    ValueError
        If the features have more rows than the matrix has samples, or it got a dimension
        ``sample``.
    """
    if name not in features:
        return None
    matrix, needed = features[name], estimator.attrs(features)
    if SAMPLE in matrix.dims:
        raise ValueError(
            f"expected {name!r} without the dimension 'sample', which where(..., drop=True) and "
            "concat add to all variables, got "
            f"{matrix.dims}; try features.isel(sample=...) to select rows, or {_REMEDY}"
        )
    compared = {GRAM: ["gram_weights"], LOSS_GRADIENT: ["loss_weights", "pooled_checkpoints"]}
    is_same = all(matrix.attrs.get(key) == needed[key] for key in compared[name])
    p = features.sizes[PROJ_DIM]
    is_whole = features.get(COLUMN, features[PROJ_DIM]).values.tolist() == [*range(p)]
    if not (is_same and is_whole) or set(matrix.shape[:-1]) != {p}:
        return None
    if (n := features.sizes[SAMPLE]) > matrix.attrs[N_SAMPLES]:
        raise ValueError(
            f"expected at most the {matrix.attrs[N_SAMPLES]} samples that {name!r} is a sum over, "
            f"got {n}; try features.isel(sample=...), or {_REMEDY} for the matrix of these samples"
        )
    validate(features, [name], what="features")
    return matrix.data


def stored_decomposition(
    features: xr.Dataset, estimator: GramEstimator
) -> tuple[da.Array, da.Array] | None:
    """Return the stored eigenvalues and eigenvectors of the gram matrix of some weights."""
    if stored_matrix(features, GRAM, estimator) is None:
        return None
    if EIGENVALUES not in features or not is_of_gram(features, EIGENVECTORS):
        return None
    validate(features, [EIGENVALUES, EIGENVECTORS], what="features")
    return features[EIGENVALUES].data, features[EIGENVECTORS].data


def is_of_gram(features: xr.Dataset, name: str) -> bool:
    """Return whether features hold a variable, and it is of the gram matrix that they hold."""
    return name in features and all(
        features[name].attrs.get(key) == features[GRAM].attrs[key]
        for key in ("gram_weights", N_SAMPLES)
    )
