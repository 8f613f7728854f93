"""The savers of the TRAK package's interface."""
