"""Torch models: checkpoints, tasks and per-sample gradients. Knows nothing of Dask or xarray."""

from __future__ import annotations

from trakdask.models import tasks

__all__ = ["tasks"]
