"""What is fitted to the gradients of some samples: curvature, principal components."""

from trakdask.fits.components import principal_components
from trakdask.fits.curvatures import curvature, wrong_classes

__all__ = ["curvature", "principal_components", "wrong_classes"]
