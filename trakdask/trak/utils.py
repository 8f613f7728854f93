"""Helpers of the TRAK package: an installation test, vectors of parameters, matrix products."""

from __future__ import annotations

__all__ = ["test_install"]


def test_install(use_fast_jl: bool = True) -> None:
    """Run a tiny attribution and say whether it worked."""
    raise NotImplementedError
