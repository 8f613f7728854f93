"""Samples and a model in, a lazy Dataset of projected per-sample gradients out."""

from trakdask.featurization.lazy import featurize, model_operations

__all__ = ["featurize", "model_operations"]
