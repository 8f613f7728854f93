"""Stores of features: plain zarr groups, written block by block."""

from trakdask.storage.calibrating import calibrate
from trakdask.storage.coords import assign_coords
from trakdask.storage.dropping import drop
from trakdask.storage.opening import open
from trakdask.storage.saving import save
from trakdask.storage.verification import verify

__all__ = ["assign_coords", "calibrate", "drop", "open", "save", "verify"]
