"""The class :class:`TRAKer`, which scripts of the TRAK package use."""

from __future__ import annotations

__all__ = ["TRAKer"]


class TRAKer:
    """Computes TRAK scores batch by batch, with the interface of the TRAK package."""
