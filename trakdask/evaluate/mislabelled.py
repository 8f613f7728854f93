"""The area under the ROC curve for finding wrong labels by attributions, with its interval."""

from __future__ import annotations

import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.evaluate.labels import (
    BOUND,
    BOUNDS,
    as_array,
    lazy_data,
    lazy_results,
    require_dims,
    require_fraction,
    require_size,
)
from trakdask.variables import SAMPLE, coords_along

__all__ = ["mislabelled_auc"]


def mislabelled_auc(
    values: xr.DataArray,
    is_mislabelled: np.ndarray | xr.DataArray,
    *,
    confidence: float = 0.95,
) -> xr.Dataset:
    """Measure how well values separate wrong labels from right ones.

    Parameters
    ----------
    values
        One value per training sample, which is higher the more suspicious its label is, such as the
        self-influence: (sample), with any further dimensions, whose entries are all evaluated.
    is_mislabelled
        Which labels are wrong, bool (sample,).
    confidence
        Level of the interval.

    Returns
    -------
    Lazy Dataset of ``auc``, the probability that a wrong label has a higher value than a right one
    (0.5 by chance; ties count half), and ``interval`` (bound): DeLong's, symmetric on the logit
    scale.

    Raises
    ------
    TypeError
        If ``values`` is not a DataArray.
    ValueError
        If sizes do not agree, or all labels are wrong or all are right; when computed, if a value
        is NaN.

    References
    ----------
    DeLong et al. 1988; Koh and Liang 2017, section 5.4.

    Examples
    --------
    >>> import trakdask as td
    >>> values = xr.DataArray([0.1, 0.9, 0.2, 0.8], dims="sample")
    >>> td.evaluate.mislabelled_auc(values, [False, True, False, True]).auc.values.item()
    1.0
    """
    values = require_dims(
        values, (SAMPLE,), name="values", more=True, remedy="try xr.DataArray(v, dims='sample')"
    )
    remedy = "try is_mislabelled=(given_label != true_label)"
    wrong = as_array(is_mislabelled, name="is_mislabelled", remedy=remedy)
    if wrong.dtype != bool or wrong.ndim != 1:
        raise ValueError(
            f"expected is_mislabelled to be bool (sample,), got {wrong.dtype} of shape "
            f"{wrong.shape}; {remedy}"
        )
    remedy = "try the same samples of both"
    require_size(SAMPLE, ("is_mislabelled", len(wrong)), ("values", values.sizes[SAMPLE]), remedy)
    if wrong.all() or not wrong.any():
        raise ValueError(
            f"expected right and wrong labels in is_mislabelled, got {int(wrong.sum())} wrong ones "
            f"of {len(wrong)}; try flipping some labels before training"
        )
    confidence = require_fraction(confidence, name="confidence", example="confidence=0.95")
    more = values.dims[1:]
    sizes = tuple(values.sizes[dim] for dim in more)
    result = lazy_results(
        _auc, lazy_data(values), wrong, confidence,
        variables={
            "auc": (more, sizes, "probability that a wrong label has the higher value"),
            "interval": ((BOUND, *more), (2, *sizes), "of auc"),
        },
    )  # fmt: skip
    return result.assign_coords({**coords_along(values, *more), BOUND: BOUNDS})


def _auc(values: np.ndarray, wrong: np.ndarray, confidence: float) -> dict[str, np.ndarray]:
    more, columns = values.shape[1:], values.reshape(len(values), -1).T
    if (unknown := np.isnan(columns).any(axis=0)).any():
        raise ValueError(
            f"expected values without NaN, got NaN in {int(unknown.sum())} of {len(wrong)} "
            f"samples, the first at sample {int(np.argmax(unknown))}; try values.dropna('sample')"
        )
    results = [arrays.intervals.roc_auc(column, wrong, confidence) for column in columns]
    return {
        "auc": np.array([area for area, _ in results]).reshape(more),
        "interval": np.stack([bounds for _, bounds in results], axis=1).reshape(2, *more),
    }
