"""Torch models: checkpoints, tasks and per-sample gradients. Knows nothing of Dask or xarray."""
