"""Turn samples and a model into a lazy Dataset of projected per-sample gradients."""

from trakdask.featurization.lazy import featurize, model_operations

__all__ = ["featurize", "model_operations"]
