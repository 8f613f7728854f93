"""The projectors of the TRAK package's interface."""
