"""Stores of features, written block by block and resumed by their completion records.

A store is a zarr v3 group with the features, the coords and the gram matrices, and a sub-group
``records`` with one small JSON file per completed (sample block × checkpoint). The file is written
after the block's chunks and renamed into folder: presence of a record means a complete block;
presence of a chunk means nothing.
"""

from trakdask.storage.assigning import assign_coords
from trakdask.storage.calibrating import calibrate
from trakdask.storage.dropping import drop
from trakdask.storage.opening import open
from trakdask.storage.saving import save
from trakdask.storage.verification import verify

__all__ = ["assign_coords", "calibrate", "drop", "open", "save", "verify"]
