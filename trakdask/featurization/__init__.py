"""Samples and a model in, a lazy Dataset of projected per-sample gradients out."""

from trakdask.featurization.lazy import featurize

__all__ = ["featurize"]
