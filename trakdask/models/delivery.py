"""Add up the gradients of all uses of a parameter, and pass them on, large ones in slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from trakdask.models.rules import SLICEABLE, WRITES_TO, GradientRule

# Size of a gradient slice: on a CPU it fits in a cache, on a GPU it outlasts a kernel launch, and
# is small beside the half of the memory that no micro-batch is given.
_SLICE_BYTES = {"cpu": 2**22}
_SLICE_BYTES_OF_GPU = 2**26


class Delivery:
    """Pass the gradient of a parameter to a sink as soon as its last use is known.

    Parameters
    ----------
    parameters
        Tensors by name.
    rules
        The rules for the uses of each parameter that is delivered.
    n_rows
        Number of rows of each gradient.
    sink
        As of :class:`~trakdask.models.hooks.GradientCollector`.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        rules: Mapping[str, set[GradientRule | None]],
        n_rows: int,
        sink: Callable[..., None],
    ) -> None:
        self._parameters, self._rules, self._n_rows, self._sink = parameters, rules, n_rows, sink
        self._buffer_for = getattr(sink, "buffer_for", None)
        # How many uses of a parameter are still to come, and for each use so far a function that
        # computes the gradient of some rows of the weight.
        self._due = dict.fromkeys(rules, 0)
        self._uses: dict[str, list[Callable[..., Tensor]]] = {name: [] for name in rules}

    def expect(self, name: str) -> None:
        """Wait for one more use of a parameter."""
        self._due[name] += 1

    def add(self, name: str, rows_of_gradient: Callable[..., Tensor]) -> None:
        """Keep the gradient function of one use; after the last one, pass on the sum."""
        self._uses[name].append(rows_of_gradient)
        self._due[name] -= 1
        if not self._due[name]:
            self._deliver(name)

    def finish(self) -> None:
        """Deliver parameters that were not called, or are without an effect on the output."""
        for name in list(self._due):
            self._deliver(name)

    def clear(self) -> None:
        """Release the uses of parameters that were not delivered."""
        self._uses.clear()

    def _is_sliced(self, name: str) -> bool:
        """Return whether a gradient is computed in slices: because it is large, or written."""
        parameter, rules = self._parameters[name], self._rules[name]
        is_large = self._n_rows * parameter.nbytes > _slice_bytes(parameter)
        is_written = self._buffer_for is not None and rules <= WRITES_TO
        return rules <= SLICEABLE and (is_large or is_written)

    def _deliver(self, name: str) -> None:
        """Pass on the gradient of a parameter, or of some of its rows after the other."""
        del self._due[name]
        uses, parameter = self._uses.pop(name), self._parameters[name]
        if not uses:
            self._sink(name, parameter.new_zeros(1).expand(self._n_rows, parameter.numel()))
        elif not self._is_sliced(name):
            self._sink(name, _summed(uses))
        else:
            start, width = 0, parameter[0].numel()
            while start < len(parameter):
                n, buffer = self._next_rows(name, start)
                rows = slice(start, min(start + n, len(parameter)))
                self._sink(name, _summed(uses, rows, buffer), start * width)
                start = rows.stop

    def _next_rows(self, name: str, start: int) -> tuple[int, Tensor | None]:
        """Return how many rows of a weight to compute next, and where to write their gradient."""
        parameter = self._parameters[name]
        width = parameter[0].numel()
        buffer = None
        if self._buffer_for is not None and self._rules[name] <= WRITES_TO:
            buffer = self._buffer_for(name, start * width)
        if buffer is None:
            bytes_of_row = self._n_rows * width * parameter.element_size()
            return max(1, _slice_bytes(parameter) // bytes_of_row), None
        n = buffer.shape[1] // width
        return (n, buffer[:, : n * width]) if n else (1, None)


def _summed(
    uses: Sequence[Callable[..., Tensor]], rows: slice | None = None, into: Tensor | None = None
) -> Tensor:
    """Return the sum of the gradients of all uses, in ``into`` if the first one can write there."""
    where = () if rows is None else (rows,)
    gradient = uses[0](*where) if into is None else uses[0](*where, into)
    if len(uses) > 1:
        gradient = gradient.clone()  # rules reuse the buffer of a gradient
    for use in uses[1:]:
        gradient += use(*where)
    return gradient


def _slice_bytes(parameter: Tensor) -> int:
    return _SLICE_BYTES.get(parameter.device.type, _SLICE_BYTES_OF_GPU)
