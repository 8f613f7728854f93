"""Turn samples and a model into a lazy Dataset of projected per-sample gradients."""

from trakdask.featurization.lazy import featurize

__all__ = ["featurize"]
