"""The spool: driver-side objects that reach workers without travelling in the task graph."""

from trakdask.spool.fingerprint import fingerprint
from trakdask.spool.handle import SPOOL_VARIABLE, Spooled, spool_folder

__all__ = ["SPOOL_VARIABLE", "Spooled", "fingerprint", "spool_folder"]
