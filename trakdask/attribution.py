"""Features in, lazy attributions out: gram matrix, damping, scores, scores by group."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr

from trakdask import arrays
from trakdask._version import __version__
from trakdask.errors import StoreMismatchError
from trakdask.provenance import FEATURE_SPEC, require_same, spec
from trakdask.variables import (
    CHECKPOINT,
    PROJ_DIM,
    SAMPLE,
    TARGET,
    TARGET_PREFIX,
    VARIABLES,
    lazy_features,
    validate,
)

__all__ = ["Absolute", "damping", "gram", "group_score", "score"]


_AUTO_FACTOR = 0.03


@dataclass(frozen=True)
class Absolute:
    """A damping λ in the units of the gram matrix, the same for all checkpoints."""

    value: float


Damping = Literal["auto"] | float | Absolute


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
    (float32 above proj_dim 8192). Units: squared units of ``feature``.

    Raises
    ------
    ValueError
        If ``feature`` is missing or split along ``proj_dim``, or weights have other dimensions.

    Notes
    -----
    Cost: one pass over ``feature``. Products in float32, summed in float64 in a fixed order: the
    same bits on any scheduler for given chunks.

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
    data = arrays.gram.gram(features.feature.data, _weight_data(features, weights))
    return _labelled("gram", data, {CHECKPOINT: features[CHECKPOINT]})


def damping(
    features: xr.Dataset, damping: Damping = "auto", *, weights: xr.DataArray | None = None
) -> xr.DataArray:
    """Return the damping λ_c that :func:`score` adds to the gram matrix of each checkpoint.

    Parameters
    ----------
    features
        Training features.
    damping
        ``"auto"``: 0.03 · tr(K_c²)/tr(K_c), a spectral rule that needs no retraining and is free of
        the scale of the gradients; a number replaces 0.03; ``Absolute(x)`` is x itself.
    weights
        As in :func:`gram`.

    Returns
    -------
    Lazy DataArray ``damping`` (checkpoint), float64, in units of the gram matrix.
    """
    validate(features, ["feature"], what="features")
    features = lazy_features(features)
    data = _damping_data(_gram_data(features, weights), damping)
    return _labelled("damping", data, {CHECKPOINT: features[CHECKPOINT]})


def score(
    features: xr.Dataset,
    targets: xr.Dataset,
    *,
    damping: Damping = "auto",
    weights: xr.DataArray | None = None,
    average: bool = True,
) -> xr.DataArray:
    """Attribute the output of every target to every training sample.

    τ(z, t) = mean_c[ φ_c(z)ᵀ (K_c + λ_c I)⁻¹ φ_c(t) ] · mean_c[ Q_c(z) ]: TRAK. Positive: training
    on z raised the output of t.

    Parameters
    ----------
    features
        Features of the training samples. If they hold ``gram``, as :func:`save` keeps it, that is
        used: then rows selected with ``features.isel(sample=...)`` are scored under the gram
        matrix of all samples, and only their blocks are read. Otherwise it is reduced from these
        features, whose blocks then stay in memory until they are scored.
    targets
        Features of the samples to explain, made with the same model and projector.
    damping
        λ, see :func:`damping`.
    weights
        Weights of the gram matrix, see :func:`gram`.
    average
        ``False`` keeps the ensemble: (sample, target, checkpoint), whose mean is the score.

    Returns
    -------
    Lazy DataArray ``score`` (sample, target), float32, in tiles of sample blocks × target blocks.
    Coords of the training samples keep their names, those of the targets get the prefix
    ``target_``.

    Raises
    ------
    StoreMismatchError
        If features and targets were made differently; the field is named.
    ValueError
        If an option does not make sense. When computed, ``numpy.linalg.LinAlgError`` if the damped
        gram matrix is singular.

    Notes
    -----
    Only the targets' side is solved: p × m numbers per checkpoint; the n × m scores exist in tiles.

    References
    ----------
    Park et al. 2023, equation 17; traker's ``TRAKer.finalize_scores``, whose scores are those of
    ``damping=Absolute(lambda_reg)`` up to one factor per checkpoint.
    """
    features, solved = _solve(features, targets, damping, weights)
    data = arrays.score.score(
        features.feature.data, solved, features.out_to_loss.data, average=average
    )
    coords = {**_coords_along(features, SAMPLE), **_target_coords(targets)}
    if not average:
        coords[CHECKPOINT] = features[CHECKPOINT]
    dims = (SAMPLE, TARGET) if average else (SAMPLE, TARGET, CHECKPOINT)
    attrs = _score_attrs(features, targets, damping, weights)
    return xr.DataArray(data, dims=dims, coords=coords, name="score", attrs=attrs)


def group_score(
    features: xr.Dataset,
    targets: xr.Dataset,
    *,
    by: str,
    damping: Damping = "auto",
    weights: xr.DataArray | None = None,
) -> xr.DataArray:
    """Sum the scores of the training samples of each group, without forming the scores.

    Parameters
    ----------
    features, targets, damping, weights
        As in :func:`score`.
    by
        Name of a coord of the training samples; missing values belong to no group.

    Returns
    -------
    Lazy DataArray ``score`` (``by``, target), float32, groups sorted: what
    ``score(features, targets).groupby(by).sum()`` would give, at the cost of one pass over the
    features, whatever the number of targets.

    Raises
    ------
    ValueError
        If there is no such coord.
    """
    if by not in _coords_along(features, SAMPLE):
        raise ValueError(
            "the training samples have the coords "
            f"{list(map(str, _coords_along(features, SAMPLE)))}; needed {by!r}. Give it with "
            f"features.assign_coords({by}=('sample', values))."
        )
    features, solved = _solve(features, targets, damping, weights)
    codes, groups = pd.factorize(features[by].values, sort=True)
    sums = arrays.groups.group_sum(
        features.feature.data, features.out_to_loss.data, codes, len(groups)
    )
    data = arrays.score.score(sums, solved, None)
    coords = {by: np.asarray(groups), **_target_coords(targets)}
    attrs = _score_attrs(features, targets, damping, weights)
    return xr.DataArray(data, dims=(by, TARGET), coords=coords, name="score", attrs=attrs)


def _solve(
    features: xr.Dataset, targets: xr.Dataset, damping: Damping, weights: xr.DataArray | None
) -> tuple[xr.Dataset, da.Array]:
    """Return the chunked features, and (K_c + λ_c I)⁻¹ φ_c(t), (target, proj_dim, checkpoint)."""
    validate(features, ["feature", "out_to_loss"], what="features")
    validate(targets, ["feature"], what="targets")
    _require_comparable(features, targets)
    features, targets = lazy_features(features), lazy_features(targets)
    matrix = _gram_data(features, weights)
    labels = [str(name) for name in features[CHECKPOINT].values]
    factor = arrays.solve.cholesky(matrix, _damping_data(matrix, damping), labels)
    return features, arrays.solve.solve(factor, targets.feature.data)


def _require_comparable(features: xr.Dataset, targets: xr.Dataset) -> None:
    require_same(spec(targets), spec(features), what="target and training features")
    ours, theirs = (ds[CHECKPOINT].values.tolist() for ds in (features, targets))
    if ours != theirs:
        raise StoreMismatchError(
            f"target and training features differ in checkpoint: found {theirs}, needed {ours}. "
            "Select the same checkpoints, in the same order, from both."
        )
    if (p := targets.sizes[PROJ_DIM]) != features.sizes[PROJ_DIM]:
        raise StoreMismatchError(
            f"target and training features differ in proj_dim: found {p}, needed "
            f"{features.sizes[PROJ_DIM]}. Take the same proj_dim slice of both."
        )


def _gram_data(features: xr.Dataset, weights: xr.DataArray | None) -> da.Array:
    if weights is None and "gram" in features:
        validate(features, ["gram"], what="features")
        data: da.Array = features["gram"].data
        return data
    reduced: da.Array = arrays.gram.gram(features.feature.data, _weight_data(features, weights))
    return reduced


def _weight_data(features: xr.Dataset, weights: xr.DataArray | None) -> da.Array | None:
    if weights is None:
        return None
    shape = {dim: features.sizes[dim] for dim in (SAMPLE, CHECKPOINT)}
    found = dict(weights.sizes) if isinstance(weights, xr.DataArray) else type(weights).__name__
    if found not in ({SAMPLE: shape[SAMPLE]}, shape):
        raise ValueError(
            f"weights are {found}; needed a DataArray of {shape}, with or without checkpoint. "
            "Type xr.DataArray(h, dims='sample')."
        )
    if weights.chunks is None and not (weights >= 0).all():
        raise ValueError(
            f"weights go down to {float(weights.min())}; needed numbers >= 0, since the gram "
            "matrix must stay positive. Type weights.clip(min=0)."
        )
    chunks = {dim: features.feature.variable.chunksizes[dim] for dim in shape}
    full = weights.broadcast_like(
        xr.DataArray(np.empty(features.sizes[CHECKPOINT]), dims=CHECKPOINT)
    )
    data: da.Array = full.transpose(SAMPLE, CHECKPOINT).variable.chunk(chunks).data
    return data


def _damping_data(matrix: da.Array, damping: Damping) -> da.Array:
    if isinstance(damping, Absolute):
        full: da.Array = da.full(matrix.shape[2], _number(damping.value), chunks=1)
        return full
    factor = _AUTO_FACTOR if isinstance(damping, str) and damping == "auto" else _number(damping)
    return arrays.solve.closed_form_damping(matrix, factor)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not value >= 0:
        raise ValueError(
            f"damping is {value!r}; needed 'auto', a number >= 0 relative to tr(K²)/tr(K), or "
            "td.Absolute(x)."
        )
    return float(value)


def _labelled(name: str, data: da.Array, coords: dict[str, Any]) -> xr.DataArray:
    variable = VARIABLES[name]
    return xr.DataArray(data, dims=variable.dims, coords=coords, name=name, attrs=variable.attrs)


def _coords_along(ds: xr.Dataset, dim: str) -> dict[Hashable, xr.DataArray]:
    return {n: c.reset_coords(drop=True) for n, c in ds.coords.items() if c.dims == (dim,)}


def _target_coords(targets: xr.Dataset) -> dict[Hashable, Any]:
    coords = _coords_along(targets, SAMPLE)
    return {f"{TARGET_PREFIX}{name}": (TARGET, coord.values) for name, coord in coords.items()}


def _score_attrs(
    features: xr.Dataset, targets: xr.Dataset, damping: Damping, weights: xr.DataArray | None
) -> dict[str, Any]:
    absolute = isinstance(damping, Absolute)
    factor = _AUTO_FACTOR if damping == "auto" else damping
    attrs = {name: features.attrs[name] for name in FEATURE_SPEC if name in features.attrs}
    attrs.pop("parameters", None)
    return attrs | {
        "description": VARIABLES["score"].attrs["description"],
        "formula": "mean_c[phi_c(z) (K_c + damping_c I)^-1 phi_c(t)] mean_c[Q_c(z)]",
        "damping": f"{damping.value}" if absolute else f"{factor} tr(K^2)/tr(K)",  # type: ignore[union-attr]
        "gram_weights": "1" if weights is None else "given",
        "source": features.attrs.get("source", ""),
        "target_source": targets.attrs.get("source", ""),
        "trakdask_version": __version__,
    }
