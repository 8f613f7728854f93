"""Wait for what happens in other threads and processes: tests do not guess how long it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 900
"""No test may fail because the machine is slow: no wait takes a tenth of this on an idle one."""


def wait_until(condition: Callable[[], object], what: str, every_s: float = 0.01) -> None:
    """Return as soon as the condition holds; give up with the name of what did not."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(every_s)


class Overlap:
    """Counts how many threads are at the same place at once.

    Each one stays until it meets another one, for a hundredth of a second at most.
    """

    def __init__(self) -> None:
        self.most = 0
        self._inside = 0
        self._met = threading.Event()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Overlap], tuple[()]]:
        """A copy in another process begins to count anew: locks cannot be pickled."""
        return Overlap, ()

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
            if self._inside > 1:
                self._met.set()
        try:
            self._met.wait(0.01)
            yield
        finally:
            with self._lock:
                self._inside -= 1
