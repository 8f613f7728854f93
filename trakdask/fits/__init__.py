"""Fit projectors to samples: their curvature, their principal components, Adam's second moments."""

from trakdask.fits.components import principal_components
from trakdask.fits.curvatures import curvature
from trakdask.fits.fitting import fit
from trakdask.fits.moments import second_moments
from trakdask.fits.reliability import agreement

__all__ = ["agreement", "curvature", "fit", "principal_components", "second_moments"]
