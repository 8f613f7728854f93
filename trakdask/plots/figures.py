"""New figures, their colours, and the unit of the scores that they show."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


GREEN, RED, BLUE = "#1a7f37", "#c62828", "#1565c0"


def power_of_ten(*scores: npt.ArrayLike) -> int:
    """Return the exponent e for which the largest of ``score / 10**e`` is between 1 and 10.

    NaN and infinite scores are ignored.

    Examples
    --------
    >>> power_of_ten([-0.00034, 0.00011])
    -4
    """
    values = (np.abs(np.asarray(array, np.float64)) for array in scores)
    largest = max(float(np.max(x, where=np.isfinite(x), initial=0.0)) for x in values)
    return math.floor(math.log10(largest)) if largest > 0 else 0


def new_figure(width: float, height: float) -> Figure:
    """Return a new figure of a size in inches, which is the current figure of pyplot.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    """
    try:
        import matplotlib.pyplot as plt  # optional dependency
        from matplotlib.figure import Figure
    except ImportError as err:
        raise ImportError(
            f"expected matplotlib for plots, got an import error ({err}); try pip install "
            "'trakdask[plots]'"
        ) from err

    class Shown(Figure):
        def _ipython_display_(self) -> None:
            plt.close(self)  # a notebook would show it a second time, as a figure that is open
            raise NotImplementedError  # it is displayed as any other figure

    return plt.figure(figsize=(width, height), FigureClass=Shown)


def axes(ax: Axes | None, width: float, height: float) -> Axes:
    """Return these axes; if there are none, the axes of a new figure (:func:`new_figure`)."""
    if ax is not None:
        return ax
    figure = new_figure(width, height)
    figure.set_layout_engine("constrained")
    return figure.subplots()


def finish(ax: Axes, x: str, y: str, title: str = "") -> Figure:
    """Label the axes, put a legend beside them, and return their figure."""
    ax.set(xlabel=x, ylabel=y)
    ax.set_title(title, fontsize=9)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    ax.spines[["top", "right"]].set_visible(False)
    return cast("Figure", ax.figure)
