"""The score_computers of the TRAK package's interface."""
