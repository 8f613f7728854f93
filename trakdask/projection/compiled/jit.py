"""Compilation with numba, with the options of this package."""

from __future__ import annotations

import logging
from multiprocessing import parent_process
from typing import Any
from weakref import WeakSet

import numba
from numba.core import event

from trakdask.errors import warn_once

_log = logging.getLogger(__name__)
_kernels: WeakSet[Any] = WeakSet()


def jit(function: Any) -> Any:
    """Compile on first use, without the GIL; cache the machine code on disk if possible."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        kernel = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # "cannot cache function: no locator available": nothing is writable
        kernel = numba.njit(**options)(function)
    _kernels.add(kernel)
    return kernel


def inlined(function: Any) -> Any:
    """Compile inline into the caller: a remaining call would prevent vectorisation."""
    return numba.njit(inline="always")(function)


class _Compilations(event.Listener):
    """Says that kernels are being compiled: for seconds nothing else seems to happen.

    In processes that others started, such as the workers of a cluster, it is said in the log only:
    all of them compile at once, and their output may end in one notebook.
    """

    def on_start(self, event: Any) -> None:
        if event.data.get("dispatcher") in _kernels:
            text = (
                "trakdask compiles its kernels, which takes a few seconds; the machine code is "
                "kept on disk, so that this machine does it once"
            )
            warn_once("compilation", text, _log.info if parent_process() else _log.warning)

    def on_end(self, event: Any) -> None: ...


event.register("numba:compile", _Compilations())
