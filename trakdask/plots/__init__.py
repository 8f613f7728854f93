"""Plots of results; each function takes labelled data and returns a matplotlib Figure."""

from trakdask.plots.curves import (
    class_detection,
    damping,
    lds,
    mislabelled_curve,
    removal_curve,
)
from trakdask.plots.figures import power_of_ten
from trakdask.plots.galleries import gallery
from trakdask.plots.texts import text

__all__ = [
    "class_detection",
    "damping",
    "gallery",
    "lds",
    "mislabelled_curve",
    "power_of_ten",
    "removal_curve",
    "text",
]


def __dir__() -> list[str]:
    return __all__
