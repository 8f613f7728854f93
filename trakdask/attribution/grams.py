"""Gram matrices and their eigenvectors: variables of the features, or computed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays.graphs import plain
from trakdask.arrays.memory import Sizes
from trakdask.attribution.estimators import Trak
from trakdask.attribution.protocol import GIVEN, GramEstimator
from trakdask.execution import require_memory
from trakdask.provenance import as_text
from trakdask.variables import (
    CHECKPOINT,
    COLUMN,
    DERIVED,
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
    features, h = lazy_features(features), None
    # 1. h that was passed, aligned by labels where both sides have them, in the features' chunks.
    if weights is not None:
        shape = {dim: features.sizes[dim] for dim in (SAMPLE, CHECKPOINT)}
        if isinstance(weights, xr.DataArray) and set(weights.dims) <= set(shape):
            weights = aligned(weights, features, what="weights")
        sizes = dict(weights.sizes) if isinstance(weights, xr.DataArray) else type(weights).__name__
        if sizes not in ({SAMPLE: shape[SAMPLE]}, shape) or weights.dtype.kind not in "fiub":
            raise ValueError(
                f"expected weights as a DataArray of numbers, {shape} with or without checkpoint, "
                f"got {sizes} of {getattr(weights, 'dtype', 'objects')}; try xr.DataArray(h, "
                "dims='sample')"
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
        h = plain(weights.variable.set_dims(shape).chunk(chunks).data)
    # 2. The matrix, and what it says of itself.
    variable, coords = VARIABLES[GRAM], {CHECKPOINT: features[CHECKPOINT]}
    attrs = variable.attrs | as_text(Trak().attrs(features))
    if weights is not None:
        attrs["gram_weights"] = GIVEN
    require_gram(Sizes.of(features.feature.data))
    data = arrays.gram.gram(features.feature.data, h)
    return xr.DataArray(data, coords, variable.dims, GRAM, attrs)


class Sums(NamedTuple):
    """The sums over all training samples that stand between two features, of one estimator, lazy.

    They belong to the Dataset: they are used for its rows, whichever were selected. ``weights`` is
    the formula of h in K. ``gradient`` is r, if it was asked for. ``factors`` are the eigenvalues
    and eigenvectors of K, if they are stored, or were asked for.
    """

    weights: str
    labels: list[str]
    n_samples: int
    is_stored: bool
    gram: da.Array
    gradient: da.Array | None
    factors: tuple[da.Array, da.Array] | None

    @property
    def spectrum(self) -> da.Array:
        """K by its eigenvectors, (checkpoint,), one object each, for all λ."""
        assert self.factors is not None, "they were asked for"
        return arrays.spectra.spectrum(*self.factors, self.gradient, self.n_samples, self.labels)

    @property
    def unit(self) -> da.Array:
        """tr(K_c)/n, (checkpoint,), which λ is relative to."""
        return arrays.gram.traces(self.gram, self.labels)[0] / self.n_samples

    def inverse(self, damping: da.Array) -> da.Array:
        """Return (K_c + λ_c I)⁻¹, (checkpoint,), for :func:`trakdask.arrays.solve.solve`."""
        if self.factors is None:
            return arrays.solve.cholesky(self.gram, damping, self.labels)
        return arrays.spectra.inverse(self.spectrum, damping)


def sums_of(
    features: xr.Dataset,
    estimator: GramEstimator,
    *,
    chooses: GramEstimator | None = None,
    decomposed: bool = False,
    any_weights: bool = True,
) -> Sums:
    """Return the sums that features hold, or reduce them; features are chunked already.

    Parameters
    ----------
    features
        Features of all training samples, or rows of them with the gram matrix of all.
    estimator
        The estimator of scores, or of the choice of λ.
    chooses
        The estimator under whose weights outputs are to choose λ, if they are. If K has these
        weights, the sums have what chooses λ, too, of the same pass over the features.
    decomposed
        Whether the eigenvectors are needed anyway.
    any_weights
        Whether a gram matrix that was made with weights of its caller serves the estimator.

    Raises
    ------
    ValueError
        If there are more rows than the gram matrix has samples, if it has a dimension ``sample``,
        or if rows were selected and another matrix of all samples is needed than the one at hand.
    """
    estimator, n, labels = estimator.of_sums(), features.sizes[SAMPLE], checkpoint_names(features)
    # What the features hold says which samples all of them are: rows may have been selected.
    held = features[GRAM].attrs if GRAM in features else {}
    total = int(held.get(N_SAMPLES, n))
    # Weights of the caller are in scores by any estimator, but not in a K that only chooses λ.
    is_given = any_weights and held.get("gram_weights") == GIVEN
    weights = GIVEN if is_given else estimator.gram_weights
    # 1. What the features hold. r pools the checkpoints, so that all of them have to be there.
    matrix, gradient, factors = stored(features, GRAM, {"gram_weights": weights}), None, None
    is_stored = matrix is not None
    missing = [] if is_stored else [GRAM]
    if is_given and not is_stored:
        raise ValueError(
            f"expected {GRAM!r} with the {features.sizes[PROJ_DIM]} columns of the features, as "
            "td.gram(features, weights=...) returns it, got another shape; try making it anew"
        )
    # K of other weights does not choose λ: the caller of this reduces another K then, and its r.
    if chooses is not None and chooses.gram_weights == weights:
        if is_stored:
            about = {"loss_weights": estimator.loss_weights, "pooled_checkpoints": labels}
            gradient = stored(features, LOSS_GRADIENT, about)
        missing += [LOSS_GRADIENT] if gradient is None else []
    # 2. What is missing is added up in one pass, which has to see all samples.
    if missing and n < total:
        raise ValueError(
            f"expected all {total} samples, to add up what the features do not hold (a gram matrix "
            "with other weights, or the 'loss_gradient' of these checkpoints), got "
            f"{n}; try selecting from the scores of all, or {_REMEDY} for sums of these samples "
            "alone"
        )
    added = dict(zip(missing, sums(features, estimator, missing), strict=True))
    matrix, gradient = added.get(GRAM, matrix), added.get(LOSS_GRADIENT, gradient)
    assert matrix is not None, "it is stored, or a sum"
    # K from the store is a sum over all samples, whichever rows were selected; a new one is of
    # these rows.
    n = total if is_stored else n
    # 3. Eigenvectors, where a choice of λ needs those of many λ.
    if is_stored and is_of_gram(features, EIGENVECTORS) and EIGENVALUES in features:
        validate(features, [EIGENVALUES, EIGENVECTORS], what="features")
        factors = features[EIGENVALUES].data, features[EIGENVECTORS].data
    elif decomposed or gradient is not None:
        factors = decomposition(features, estimator, matrix, n)
    return Sums(weights, labels, n, is_stored, matrix, gradient, factors)


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
        # Pooled before the checkpoint is selected: afterwards the mean would be of one.
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


def with_decomposition(features: xr.Dataset, estimator: GramEstimator) -> xr.Dataset:
    """Return features that hold the gram matrix of an estimator and its eigenvectors, lazy."""
    sums = sums_of(features, estimator, decomposed=True)
    if sums.is_stored and is_of_gram(features, EIGENVECTORS):
        return features
    assert sums.factors is not None, "they were asked for"
    # What features hold of another gram matrix would be taken for a part of this one.
    features = features.drop_vars(DERIVED, errors="ignore")
    about = {"gram_weights": sums.weights, N_SAMPLES: sums.n_samples}
    attrs = estimator.attrs(features) | about
    derived = {GRAM: sums.gram, EIGENVALUES: sums.factors[0], EIGENVECTORS: sums.factors[1]}
    return features.assign({k: (VARIABLES[k].dims, data, attrs) for k, data in derived.items()})


def stored(features: xr.Dataset, name: str, about: Mapping[str, Any]) -> da.Array | None:
    """Return the sum over all samples that features hold, if its attrs are as they have to be.

    Raises
    ------
    ValueError
        If the features have more rows than the sum has samples, or it got a dimension ``sample``.
    """
    if name not in features:
        return None
    matrix, n, p = features[name], features.sizes[SAMPLE], features.sizes[PROJ_DIM]
    if SAMPLE in matrix.dims:
        raise ValueError(
            f"expected {name!r} without the dimension 'sample', which where(..., drop=True) and "
            "concat add to all variables, got "
            f"{matrix.dims}; try features.isel(sample=...) to select rows, or {_REMEDY}"
        )
    # isel(proj_dim=...) selects or reorders the rows of K, and leaves its columns as they are;
    # proj_column then has the numbers of the rows.
    is_whole = features.get(COLUMN, features[PROJ_DIM]).values.tolist() == [*range(p)]
    if not (_says(matrix, about) and is_whole) or set(matrix.shape[:-1]) != {p}:
        return None
    if n > matrix.attrs[N_SAMPLES]:
        raise ValueError(
            f"expected at most the {matrix.attrs[N_SAMPLES]} samples that {name!r} is a sum over, "
            f"got {n}; try features.isel(sample=...), or {_REMEDY} for the matrix of these samples"
        )
    validate(features, [name], what="features")
    return matrix.data


def is_of_gram(features: xr.Dataset, name: str) -> bool:
    """Return whether features hold a variable, and it is of the gram matrix that they hold."""
    about = {key: features[GRAM].attrs[key] for key in ("gram_weights", N_SAMPLES)}
    return name in features and _says(features[name], about)


def _says(array: xr.DataArray, about: Mapping[str, Any]) -> bool:
    attrs = as_text(array.attrs)
    return all(attrs.get(key) == value for key, value in as_text(about).items())
