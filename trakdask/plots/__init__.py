"""Plots of results; each function takes labelled data and returns a matplotlib Figure."""

from trakdask.plots.bars import intervals, weights
from trakdask.plots.curves import cross_validation, damping, lds, mislabelled_curve
from trakdask.plots.galleries import gallery
from trakdask.plots.texts import text

__all__ = [
    "cross_validation",
    "damping",
    "gallery",
    "intervals",
    "lds",
    "mislabelled_curve",
    "text",
    "weights",
]


def __dir__() -> list[str]:
    return __all__
