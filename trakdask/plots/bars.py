"""Bars: scores with their intervals, and what each layer of a model counts in features."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trakdask.checks import shown
from trakdask.plots.figures import BLUE, GREEN, RED, axes, finish, new_figure
from trakdask.provenance import as_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def intervals(result: xr.Dataset, label: str | None = None, *, ax: Axes | None = None) -> Figure:
    """Draw scores as horizontal bars with their intervals.

    Parameters
    ----------
    result
        Scores or effects with intervals, as :func:`trakdask.score` and
        :func:`trakdask.group_score` return them with ``level=``, or a ranking of them by
        :func:`trakdask.top_k`, for one target: ``result.isel(target=0)``. Computed here.
    label
        Name of the coord whose values name the bars; by default the dimension.
    ax
        The axes to draw into. By default, the function makes a new figure.

    Returns
    -------
    Figure with a bar for each group, the largest score first, or for each ranked sample: green
    where the whole interval is above 0, red where it is below, and grey where it contains 0. Of the
    two intervals of effects, the thick line is for the mean of many retrainings.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    ValueError
        If there are no intervals, or scores of several targets.

    Examples
    --------
    Which labels helped a digit? The features are pixels here, and each of five models sees others.

    .. plot::
        :include-source:

        >>> import numpy as np, trakdask as td
        >>> digits, tested = td.examples.digits()
        >>> train, test = digits.image.values, tested.image.values
        >>> seen = np.random.default_rng(0).random((64, 5)) < 0.3
        >>> pixels = (train - train.mean(0)).reshape(-1, 64, 1) * seen
        >>> tested = (test[:1] - train.mean(0)).reshape(-1, 64, 1) * seen
        >>> features = td.from_features(pixels, "pixels", coords={"label": digits.label.values})
        >>> targets = td.from_features(tested, "pixels")
        >>> sums = td.group_score(features, targets, "grad_cos", by="label", level=0.9)
        >>> figure = td.plots.intervals(sums.isel(target=0))
    """
    if "lower" not in getattr(result, "data_vars", ()):
        raise ValueError(
            f"expected intervals, got {getattr(result, 'name', [*result])!r} without; try "
            "level=0.9 in the call that made it (shares have no intervals)"
        )
    value = "effect" if "effect" in result else "score"
    if len(result[value].dims) != 1:
        raise ValueError(
            f"expected scores along one dimension, got {dict(result[value].sizes)}; try "
            "result.isel(target=0)"
        )
    (dim,) = result[value].dims
    result = result.compute().dropna(dim, subset=[value])
    # A ranking has an order already.
    if dim != "rank":
        result = result.sortby(value, ascending=False)
    names = [str(name) for name in result[label or dim].values]
    score, low, high = (result[name].values for name in (value, "lower", "upper"))
    colors = np.where(low > 0, GREEN, np.where(high < 0, RED, "0.7"))
    ax = axes(ax, 6.4, 1.1 + 0.3 * len(names))
    rows = np.arange(len(names))
    ax.barh(rows, score, color=colors, height=0.62, alpha=0.85)
    ax.errorbar(
        score, rows, xerr=[score - low, high - score], fmt="none", capsize=3, linewidth=1.2,
        ecolor=ax.xaxis.label.get_color(),  # black, or white on a dark ground
    )  # fmt: skip
    if value == "effect":
        least, most = (result[name].values for name in ("mean_lower", "mean_upper"))
        ax.hlines(rows, least, most, color=ax.xaxis.label.get_color(), linewidth=3)
    # A $ in a name begins no formula, and the first name is at the top.
    ax.set_yticks(rows, names, parse_math=False)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.axvline(0, color="0.4", linewidth=0.8)
    title = f"{result.attrs['level']:.0%} intervals; grey cannot be told from 0"
    name = value
    if value == "effect":  # what people read first is which way is good
        name = f"effect on the {result.attrs['units']} ({result.attrs['sign']})"
    return finish(ax, name, label or str(dim), title)


def weights(features: xr.Dataset) -> Figure:
    """Draw which layers of a model agree between trainings, and what they count in features.

    Parameters
    ----------
    features
        Features that were made by a projector of :func:`trakdask.fit`.

    Returns
    -------
    Figure with a bar for each matrix of the model, and one for all biases and norms, in four parts:
    the share of the squared length of gradients before and after the weights; the agreement of
    scores by these gradients alone between checkpoints, if there were several; the number of
    directions that the gradients have; and the weight that follows, by which they are multiplied.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    ValueError
        If parameters have no weights: only models of tokens get some by default.

    Examples
    --------
    .. plot::
        :include-source:

        >>> import numpy as np, torch, trakdask as td
        >>> digits, _ = td.examples.digits()
        >>> module = td.examples.digits_mlp()
        >>> model = td.Model(module, task="image_classification")
        >>> projector = td.fit(digits, model, 64, weights=True, n_samples=500, progress=False)
        >>> figure = td.plots.weights(td.featurize(digits, model, projector))
    """
    first = as_values(features.attrs).get("projector", {}).get("steps", [{}])[0]
    if not (found := first.get("weights")):
        raise ValueError(
            "expected features of a projector with weights of parameters, got one that begins with "
            f"{shown(first.get('kind', 'no fitted step'))}; try td.fit(..., weights=True)"
        )
    names = list(found)
    columns = {key: np.array([found[n].get(key, np.nan) for n in names]) for key in (
        "share", "agreement", "directions", "weight",
    )}  # fmt: skip
    figure = new_figure(11, 1.2 + 0.24 * len(names))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(1, 4, sharey=True)
    rows = np.arange(len(names))
    # Weights multiply gradients, and shares are of their squared lengths.
    after = columns["share"] * columns["weight"] ** 2
    for ax, (key, values) in zip(panels, columns.items(), strict=True):
        if key == "share":
            ax.barh(rows - 0.2, values, 0.36, color="0.7", label="before")
            ax.barh(rows + 0.2, after, 0.36, color=BLUE, label="with weights")
        else:
            ax.barh(rows, values, 0.62, color=BLUE)
        finish(ax, key, "")
    panels[0].set_yticks(rows, names, parse_math=False)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    panels[0].legend(frameon=False, fontsize=8)
    return figure
