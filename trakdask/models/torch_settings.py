"""Settings of torch that hold for the whole process, and are changed while tasks run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

__all__ = ["few_threads", "no_fast_path"]


class _WhileUsed:
    """Change a setting while any thread needs it; the last one restores what the first one found.

    Were each thread to restore what it found itself, one that began inside another would restore
    the changed value, for good.
    """

    def __init__(self, get: Callable[[], Any], change: Callable[[Any], None], value: Any) -> None:
        self._get, self._change, self._value = get, change, value
        self._lock, self._users, self._before = Lock(), 0, None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Change the setting while the ``with`` body runs."""
        with self._lock:
            if self._users == 0:
                self._before = self._get()
                self._change(self._value)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._change(self._before)


few_threads = _WhileUsed(torch.get_num_threads, torch.set_num_threads, 1)
"""One thread per operation, where there is a task on every core."""

_mha = torch.backends.mha
no_fast_path = _WhileUsed(_mha.get_fastpath_enabled, _mha.set_fastpath_enabled, False)
"""No fused kernels of ``nn.TransformerEncoder``.

Where no parameter requires a gradient, they run instead of the layers, whose hooks are not called
then, and turn padded batches into nested tensors, which have no shape and cannot be vectorised.
"""
