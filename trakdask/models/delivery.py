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

    def _deliver(self, name: str) -> None:
        """Pass on the gradient of a parameter, or of some of its rows after the other."""
        del self._due[name]
        uses, parameter, rules = self._uses.pop(name), self._parameters[name], self._rules[name]
        if not uses:
            self._sink(name, parameter.new_zeros(1).expand(self._n_rows, parameter.numel()))
            return
        # 1. Slices, if a gradient is large, or written where the sink says.
        most = _SLICE_BYTES.get(parameter.device.type, _SLICE_BYTES_OF_GPU)
        buffer_for = self._buffer_for if rules <= WRITES_TO else None
        is_large = self._n_rows * parameter.nbytes > most
        if not rules <= SLICEABLE or not (is_large or buffer_for):
            self._sink(name, _summed(uses))
            return
        # 2. As many rows of the weight at once as fit in a slice, or in the buffer of the sink.
        start, width = 0, parameter[0].numel()
        while start < len(parameter):
            buffer = buffer_for(name, start * width) if buffer_for else None
            if buffer is None:
                n = max(1, most // (self._n_rows * width * parameter.element_size()))
            else:
                n = buffer.shape[1] // width
                buffer = buffer[:, : n * width] if n else None
            rows = slice(start, min(start + max(1, n), len(parameter)))
            self._sink(name, _summed(uses, rows, buffer), start * width)
            start = rows.stop


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
