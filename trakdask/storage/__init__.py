"""Stores of features: plain zarr groups, written block by block. They know no estimator."""
