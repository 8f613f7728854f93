"""Stores of features: plain zarr groups, written block by block."""

from trakdask.storage.changes import assign_coords, calibrate, drop, verify
from trakdask.storage.reading import open
from trakdask.storage.saving import save

__all__ = ["assign_coords", "calibrate", "drop", "open", "save", "verify"]
