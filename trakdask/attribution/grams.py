"""The gram matrix of features."""

from __future__ import annotations

import xarray as xr

from trakdask import arrays
from trakdask.attribution.estimators import Weights
from trakdask.attribution.matrices import weight_data
from trakdask.variables import CHECKPOINT, VARIABLES, lazy_features, validate

__all__ = ["gram"]


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
