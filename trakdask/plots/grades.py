"""Grades of scores with their errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trakdask.plots.figures import BLUE, axes, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def cross_validation(result: xr.Dataset, *, ax: Axes | None = None) -> Figure:
    """Draw how well scores predict checkpoints that were left out, with errors.

    Parameters
    ----------
    result
        Dataset of :func:`trakdask.evaluate.cross_validate`.
    ax
        The axes to draw into. By default, the function makes a new figure.

    Returns
    -------
    Figure with the grade of each estimator, a bar of one standard error to both sides, and the
    grades without one checkpoint as grey dots. With several estimators the axis says in brackets
    by how much each differs from the first.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.

    Examples
    --------
    The outputs of the targets are sums of scores and noise here.

    .. plot::
        :include-source:

        >>> import numpy as np, trakdask as td, xarray as xr
        >>> features = td.testing.simulate_features(200, 16, 8)
        >>> masks = td.evaluate.subsets(features, 8).rename(subset="checkpoint")
        >>> targets = td.testing.simulate_features(50, 16, 8, seed=1)
        >>> sums = xr.dot(masks, td.score(features, targets, "trak"), dim="sample").compute()
        >>> noise = float(sums.std()) * np.random.default_rng(0).standard_normal((50, 8))
        >>> targets = targets.assign(output=sums.rename(target="sample").T + noise)
        >>> features = features.assign(trained_on=masks)
        >>> estimators = {"trak": "trak", "grad_dot": "grad_dot"}
        >>> result = td.evaluate.cross_validate(features, targets, estimators)
        >>> figure = td.plots.cross_validation(result)
    """
    if "estimator" not in result.dims:
        result = result.expand_dims(estimator=["scores"])
    names = [str(name) for name in result.estimator.values]
    ax = axes(ax, 6.8, 1.2 + 0.45 * len(names))
    rows = np.arange(len(names))
    without = result.without.transpose("checkpoint", "estimator").values
    x, y = without.ravel(), np.tile(rows, len(without))
    ax.plot(x, y, "|", color="0.6", markersize=9, label="without one checkpoint")
    grades, errors = result.lds_mean.values, result.error.values
    ax.errorbar(
        grades, rows, xerr=errors, fmt="o", color=BLUE, capsize=3, linewidth=1.4,
        label="grade ± its error",
    )  # fmt: skip
    labels = [f"{name}\n{grade:.2f}" for name, grade in zip(names, grades, strict=True)]
    for i in range(1, len(names)):
        difference, error = result.difference.values[i], result.difference_error.values[i]
        labels[i] += f" ({difference:+.3f} ± {error:.3f})"
    ax.set_yticks(rows, labels)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.axvline(0, color="0.8", linewidth=1)
    ax.locator_params(axis="x", nbins=6)
    return finish(ax, "rank correlation with left-out checkpoints", "")
