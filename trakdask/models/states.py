"""The tensors of checkpoints that a process has read: as many as its memory allows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from torch import Tensor

__all__ = ["State", "States"]

State = dict[str, Tensor]

_FEWEST = 2


class States:
    """Cache of state dicts by the digest of their content; the least recently used go first.

    The last two stay however large they are: those of an adapter and of its base model.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        """What all of them together may take, beyond the last two."""
        self._states: OrderedDict[str, State] = OrderedDict()
        self._lock = Lock()

    def get(self, digest: str, read: Callable[[], State]) -> State:
        """Return a state dict; one thread reads it, and the others wait for the same tensors."""
        with self._lock:
            if digest not in self._states:
                self._states[digest] = read()
            self._states.move_to_end(digest)
            sizes = [_bytes(state) for state in self._states.values()]
            while len(sizes) > _FEWEST and sum(sizes) > self.most_bytes:
                self._states.popitem(last=False)
                sizes.pop(0)
            return self._states[digest]

    def digests(self) -> list[str]:
        """Return which state dicts are in memory, the most recently used last."""
        return list(self._states)

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._states.clear()


def _bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())
