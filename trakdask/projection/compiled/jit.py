"""The one way in which the package compiles with numba."""

from __future__ import annotations

from typing import Any

import numba


def jit(function: Any) -> Any:
    """Compile on first use, without the GIL; keep the machine code on disk if there is a place."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # "cannot cache function: no locator available": nothing is writable
        return numba.njit(**options)(function)


def inlined(function: Any) -> Any:
    """Compile into whatever calls it: a call that stays would keep a loop from vectorising."""
    return numba.njit(inline="always")(function)
