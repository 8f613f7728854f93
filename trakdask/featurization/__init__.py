"""Turn samples and a model into a lazy Dataset of projected per-sample gradients."""

from trakdask.featurization.lazy import featurize
from trakdask.featurization.parts import featurize_parts

__all__ = ["featurize", "featurize_parts"]
