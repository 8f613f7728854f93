"""Compilation with numba, with the options of this package."""

from __future__ import annotations

from typing import Any

import numba


def jit(function: Any) -> Any:
    """Compile on first use, without the GIL; cache the machine code on disk if possible."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # "cannot cache function: no locator available": nothing is writable
        return numba.njit(**options)(function)


def inlined(function: Any) -> Any:
    """Compile inline into the caller: a remaining call would prevent vectorisation."""
    return numba.njit(inline="always")(function)
