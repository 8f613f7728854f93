"""A drop-in replacement of the TRAK package: ``from trakdask.trak import TRAKer``."""
