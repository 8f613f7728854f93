"""Stores of features: plain zarr groups, written block by block. They know no estimator."""

from trakdask.storage.changes import assign_coords, verify
from trakdask.storage.reading import open

__all__ = ["assign_coords", "open", "verify"]
