"""How well scores separate two classes: the area under the ROC curve, and shares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import special

from trakdask.arrays.blocks import Floats


def roc_auc(values: Floats, positive: NDArray[np.bool_], confidence: float) -> tuple[float, Floats]:
    """Return the area under the ROC curve of one score, and its interval (bound,).

    Parameters
    ----------
    values
        (sample,), expected to be higher for positives; ties count half.
    positive
        (sample,), with at least one positive and one negative.
    confidence
        Confidence level of the interval.

    Notes
    -----
    Only the ranks of the values matter. The variance is DeLong's. The interval is symmetric for the
    logit of the area, so that it stays within [0, 1]; for an area of 0 or 1 it has no width. A NaN
    makes all results NaN.

    References
    ----------
    DeLong et al. 1988; Sun and Xu 2014 (by ranks).

    Examples
    --------
    >>> area, bounds = roc_auc(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0, 1, 0, 1], bool), 0.95)
    >>> area
    0.75
    """
    from scipy.stats import rankdata  # takes a second to import, and only evaluation needs it

    if np.isnan(values).any():
        return float("nan"), np.full(2, np.nan)
    n1, n0 = int(positive.sum()), int((~positive).sum())
    ranks = rankdata(values)
    # The fraction of samples of the other class that each sample ranks above.
    above = (ranks[positive] - rankdata(values[positive])) / n0
    below = (ranks[~positive] - rankdata(values[~positive])) / n1
    area = float(above.mean())
    variance = sum(_variance(x) / len(x) for x in (above, below))
    if not 0 < area < 1:
        return area, np.full(2, area)
    half = special.ndtri((1 + confidence) / 2) * np.sqrt(variance) / (area * (1 - area))
    bounds: Floats = special.expit(special.logit(area) + np.array([-half, half]))
    return area, bounds


def _variance(x: Floats) -> float:
    return float(np.var(x, ddof=1)) if len(x) > 1 else float("nan")


def proportion_interval(fraction: Floats, n: int, confidence: float) -> Floats:
    """Return Wilson's interval (bound, ...) of proportions observed in n trials.

    Examples
    --------
    >>> proportion_interval(np.array([0.0, 0.5]), 10, 0.95).round(3).tolist()
    [[0.0, 0.237], [0.278, 0.763]]
    """
    z = float(special.ndtri((1 + confidence) / 2))
    centre = (fraction + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * np.sqrt(fraction * (1 - fraction) / n + (z / (2 * n)) ** 2) / (1 + z**2 / n)
    return np.clip(np.stack([centre - half, centre + half]), 0, 1)
