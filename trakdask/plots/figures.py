"""New figures, their colours, and how many digits the numbers have that people see."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


GREEN, RED, BLUE = "#1a7f37", "#c62828", "#1565c0"


def decimals(*values: npt.ArrayLike, digits: int = 3) -> int:
    """Return the number of decimals with which the largest of some values has so many digits.

    NaN and infinite values are ignored. An error of two digits says how many its value has.

    Examples
    --------
    >>> decimals([-0.0034, 0.0011]), decimals(250.0), decimals(0.056, digits=2)
    (5, 0, 3)
    """
    sizes = (np.abs(np.asarray(array, np.float64)) for array in values)
    largest = max(float(np.max(x, where=np.isfinite(x), initial=0.0)) for x in sizes)
    return max(digits - 1 - math.floor(math.log10(largest)), 0) if largest > 0 else 0


def new_figure(width: float, height: float) -> Figure:
    """Return a new figure of a size in inches, which is the current figure of pyplot.

    Raises
    ------
    ImportError
        If matplotlib is missing: install ``trakdask[plots]``.
    """
    try:
        import matplotlib.pyplot as plt  # optional dependency
    except ImportError as err:
        raise ImportError(
            f"expected matplotlib for plots, got an import error ({err}); try pip install "
            "'trakdask[plots]'"
        ) from err
    figure = plt.figure(figsize=(width, height))
    figure._ipython_display_ = partial(_close, figure)  # type: ignore[attr-defined]
    return figure


def _close(figure: Figure) -> None:
    """Keep a notebook from showing a figure twice, as a value and as an open figure."""
    import matplotlib.pyplot as plt

    plt.close(figure)
    raise NotImplementedError  # for IPython: display it as any other figure


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
