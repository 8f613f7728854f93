"""Whether scores find samples with wrong labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.evaluate.results import (
    as_array,
    lazy_data,
    lazy_results,
    require_fraction,
    require_fractions,
    require_real,
)
from trakdask.variables import SAMPLE, data_in_order

TWENTIETHS = tuple(i / 20 for i in range(1, 20))


def mislabelled_curve(
    values: xr.DataArray | Mapping[str, xr.DataArray],
    is_mislabelled: np.ndarray | xr.DataArray,
    fractions: Sequence[float] = TWENTIETHS,
    *,
    confidence: float = 0.95,
) -> xr.Dataset:
    """Measure which share of the wrong labels is found by inspecting the most suspicious samples.

    Parameters
    ----------
    values
        One value per training sample, which is higher the more suspicious its label is, such as the
        self-influence: (sample), with any further dimensions, whose entries are all evaluated; or
        a mapping from names to values, which has the further dimension ``estimator``.
    is_mislabelled
        Which labels are wrong, bool (sample,).
    fractions
        Shares of the samples that are inspected, between 0 and 1; every twentieth by default.
    confidence
        Level of the intervals.

    Returns
    -------
    Lazy Dataset of float64 variables. Further dimensions of ``values`` follow those named here:

    - ``found`` (fraction): share of the wrong labels that is among the inspected samples, with
      ``interval`` (bound, fraction), Wilson's, of as many trials as there are wrong labels;
    - ``auc``: the probability that a wrong label has a higher value than a right one (0.5 by
      chance; ties count half), with ``auc_interval`` (bound): DeLong's, symmetric on the logit
      scale;
    - ``area``: the area under the curve for fractions from 0 to 1, with ``area_interval`` (bound).
      Both follow from ``auc``. A random order has ½;
    - ``random_interval`` (bound, fraction): where the share found in a random order lies, whose
      expectation is the fraction itself;
    - ``best`` (fraction): the share found if all wrong labels came first. The area of that curve is
      1 - ½ the share of wrong labels.

    Raises
    ------
    ValueError
        If sizes do not agree, all labels are wrong or all are right, or fractions are not between 0
        and 1; when computed, if a value is NaN.

    Notes
    -----
    The loss of a classification follows from its features: with f = log p / (1 - p),
    ``numpy.logaddexp(0, -features.output.mean("checkpoint"))`` is -log p. It is the method to beat.

    Equal values count as if in random order. :func:`trakdask.plots.mislabelled_curve` draws it.

    References
    ----------
    DeLong et al. 1988; Koh and Liang 2017, section 5.4; Kwon et al. 2024, "DataInf". Quanda
    (Bareeva et al. 2024) calls this mislabeling detection.

    Examples
    --------
    >>> import trakdask as td
    >>> values = xr.DataArray([0.1, 0.9, 0.2, 0.8], dims="sample")
    >>> curve = td.evaluate.mislabelled_curve(values, [False, True, False, True], [0.25, 0.5])
    >>> curve.found.values.tolist(), float(curve.area), float(curve.auc)
    ([0.5, 1.0], 0.75, 1.0)
    """
    values = require_real(as_array(values, SAMPLE))
    wrong = np.asarray(data_in_order(is_mislabelled, values, SAMPLE, what="is_mislabelled"))
    n = values.sizes[SAMPLE]
    if wrong.dtype != bool or wrong.shape != (n,) or wrong.all() or not wrong.any():
        raise ValueError(
            f"expected is_mislabelled to be bool ({n},), with right and wrong labels, got "
            f"{wrong.dtype} {wrong.shape} with {np.count_nonzero(wrong)} wrong ones; try "
            "is_mislabelled=(given_label != true_label)"
        )
    confidence = require_fraction("confidence", confidence)
    shares = require_fractions(fractions)
    more = values.dims[1:]
    return lazy_results(
        _found_curve, lazy_data(values), wrong, shares, confidence, of=values,
        variables={
            "found": (("fraction", *more), "share of the wrong labels that is found"),
            "interval": (("bound", "fraction", *more), "of found"),
            "auc": (more, "probability that a wrong label has the higher value"),
            "auc_interval": (("bound", *more), "of auc"),
            "area": (more, "area under found, for fractions from 0 to 1"),
            "area_interval": (("bound", *more), "of area"),
            "random_interval": (("bound", "fraction"), "of found in a random order"),
            "best": (("fraction",), "found if all wrong labels came first"),
        },
        labels={"fraction": shares},
    )  # fmt: skip


def _found_curve(
    values: np.ndarray, wrong: np.ndarray, shares: list[float], confidence: float
) -> dict[str, np.ndarray]:
    from scipy.stats import hypergeom  # takes a second to import, and only evaluation needs it

    n, n_wrong, more = len(wrong), int(wrong.sum()), values.shape[1:]
    columns = values.reshape(n, -1).T
    if (unknown := np.isnan(columns).any(axis=0)).any():
        raise ValueError(
            f"expected values without NaN, got NaN in {int(unknown.sum())} of {n} "
            f"samples, the first at sample {int(np.argmax(unknown))}; try values.dropna('sample')"
        )
    # 1. The area under the ROC curve of every entry, (...), and its interval, (bound, ...).
    results = [arrays.evaluation.roc_auc(column, wrong, confidence) for column in columns]
    areas, bounds = zip(*results, strict=True)
    auc, auc_interval = np.array(areas).reshape(more), np.stack(bounds, 1).reshape(2, *more)
    # 2. The curve, and where a random order has it.
    inspected = np.array(shares) * n
    quantiles = np.array([[(1 - confidence) / 2], [(1 + confidence) / 2]])
    drawn = hypergeom.ppf(quantiles, n, n_wrong, np.round(inspected))
    found = np.stack([_found(column, wrong, inspected) for column in columns], axis=1) / n_wrong
    found = found.reshape(-1, *more)
    # 3. The area counts pairs of a wrong label and any sample. The AUC counts the pairs of a wrong
    #    and a right label; of two wrong labels either may come first, which is ½.
    of_wrong = n_wrong / n / 2
    return {
        "found": found,
        "interval": arrays.evaluation.proportion_interval(found, n_wrong, confidence),
        "auc": auc,
        "auc_interval": auc_interval,
        "area": of_wrong + (1 - n_wrong / n) * auc,
        "area_interval": of_wrong + (1 - n_wrong / n) * auc_interval,
        "random_interval": drawn / n_wrong,
        "best": np.minimum(inspected / n_wrong, 1),
    }


def _found(values: np.ndarray, wrong: np.ndarray, inspected: np.ndarray) -> np.ndarray:
    """Return how many wrong labels are expected among the highest values, equal ones shuffled."""
    order = np.argsort(-values, kind="stable")
    ordered = values[order]
    # Among equal values, hits rise evenly from the first to the last, as in the mean over their
    # orders.
    last_of_equal = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    hits = np.cumsum(wrong[order])[last_of_equal]
    return np.asarray(np.interp(inspected, [0, *(last_of_equal + 1)], [0, *hits]))
