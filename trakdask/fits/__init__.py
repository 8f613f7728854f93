"""Fit projectors to samples: their curvature, their principal components, Adam's second moments."""

from trakdask.fits.components import principal_components
from trakdask.fits.curvatures import curvature
from trakdask.fits.fitting import fit
from trakdask.fits.moments import second_moments

__all__ = ["curvature", "fit", "principal_components", "second_moments"]


def __dir__() -> list[str]:
    return __all__
