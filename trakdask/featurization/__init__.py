"""Turn samples and a model into a lazy Dataset of projected per-sample gradients."""
