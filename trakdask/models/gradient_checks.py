"""Compare the gradients of an engine with those of plain backward passes.

Gradients are added up, each times a weight of its own, and compared with autograd's gradient of the
weighted sum of f. An engine that hands a sample the gradient of another one, or overlooks a use of
a parameter, gives another sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trakdask.models.gradients import Sink, engine_of, out_to_loss_of, require_per_sample
from trakdask.models.independence import allowed_error, row_of
from trakdask.models.tasks import Batch, Forward, Task
from trakdask.models.tasks.protocol import CachingForward

# Engines to try where another one is wrong.
_SAFER = {"hooks": "'vmap', or 'loop'", "vmap": "'loop'", "tokens": "'loop'"}

# Samples in a weighted sum: the errors of more would add up to what a wrong gradient looks like,
# and eight still show a gradient that belongs to another sample.
_MOST_IN_HALF_PRECISION = 8


class WeightedSum:
    """A sink that adds up the gradients of samples, each times a weight, and passes them on.

    Parameters
    ----------
    weights
        Of consecutive samples of a batch.
    size
        Number of samples of the batch.
    first
        The first sample that has a weight.
    sink
        Receives the gradients, too.
    """

    def __init__(
        self, weights: Tensor, size: int, first: int = 0, sink: Sink | None = None
    ) -> None:
        self.sums: dict[str, list[Tensor]] = defaultdict(list)
        self.buffer_for = getattr(sink, "buffer_for", None)
        self._weights, self._size, self._first, self._sink = weights, size, first, sink

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Add the gradients of a parameter, (rows, n), or a slice of them."""
        k = len(gradient) // self._size  # rows of a sample: its tokens, or 1
        rows = gradient[self._first * k :][: len(self._weights) * k]
        weights = self._weights.to(rows.device).repeat_interleave(k)
        # A gradient of zero is one number expanded to all rows, which a product would copy.
        is_expanded = rows.stride(0) == 0
        total = rows[0] * weights.sum() if is_expanded else weights @ rows.to(weights.dtype)
        self.sums[name].append(total)
        if self._sink is not None:
            self._sink(name, gradient, first)  # last, because a sink may overwrite the gradient


def summed_gradient(
    forward: Forward, task: Task, batch: Batch, names: Sequence[str], weights: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return autograd's gradient of the weighted sum of f over a batch, f and Q, by one pass."""
    selected = {name: forward.parameters[name].detach().requires_grad_() for name in names}
    once = CachingForward(forward.with_parameters(selected))
    output = require_per_sample(task.output(once, batch), batch.size, "output")
    out_to_loss = out_to_loss_of(once, task, batch)
    once.forget()
    total = (output * weights.to(output)).sum()
    gradients = torch.autograd.grad(total, list(selected.values()), materialize_grads=True)
    return dict(zip(names, gradients, strict=True)), output.detach(), out_to_loss


def sample_weights(forward: Forward, size: int) -> Tensor:
    """Return a different weight for each sample, so that a sum shows which gradient is whose.

    A sum over many samples in half precision would lose the digits that are compared, so there the
    weights of most of them are zero.
    """
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(size, generator=generator, dtype=torch.float64)
    if any(t.is_floating_point() and t.dtype.itemsize < 4 for t in forward.parameters.values()):
        weights[_MOST_IN_HALF_PRECISION:] = 0
    is_double = all(t.dtype == torch.float64 for t in forward.parameters.values())
    return weights if is_double else weights.float()


def require_same_sum(
    engine: str,
    sums: Mapping[str, Sequence[Tensor]],
    expected: Mapping[str, Tensor],
    least: float = 0.0,
) -> None:
    """Compare weighted sums of an engine's gradients with those of autograd.

    An engine that hands a sample the gradient of another one, or overlooks a use of a parameter,
    gives another sum, because every sample has a weight of its own.

    Parameters
    ----------
    engine
        Name of the engine.
    sums
        Of :class:`WeightedSum`.
    expected
        Of :func:`summed_gradient`.
    least
        As in :func:`allowed_error`.

    Raises
    ------
    ValueError
        If a sum differs by more, relative to the norm of all parameters together. (A parameter
        alone may have almost no gradient, and then only rounding errors.)
    """
    flat = torch.cat([gradient.flatten() for gradient in expected.values()]).double()
    errors = torch.cat([part for name in expected for part in sums[name]]) - flat
    norm, error = flat.norm(), errors.norm()
    # With weights drawn from a normal distribution, the norm of the sum is about that of a sample's
    # gradient times the root of their number, so rounding stays as small in the sum as in each.
    if error > allowed_error(expected.values(), least) * norm:
        sizes = [gradient.numel() for gradient in expected.values()]
        of_parameters = torch.stack([part.norm() for part in errors.split(sizes)])
        name = list(expected)[int(of_parameters.argmax())]
        raise ValueError(
            f"gradients={engine!r} gives gradients that differ from those of one backward pass per "
            f"sample by {float(error / norm):.2g} of their norm, most in {name!r}: the model may "
            "reorder or mix the samples of a batch, or use a parameter outside its layer; try "
            f"gradients={_SAFER[engine]}"
        )


def require_same_as_loop(
    engine: str, forward: Forward, task: Task, batch: Batch, names: Sequence[str]
) -> None:
    """Check an engine on a few samples against one backward pass for each.

    Raises
    ------
    ValueError
        If gradients differ by more than rounding error.
    """
    size = batch.size
    weights = sample_weights(forward, size)
    seen = WeightedSum(weights, size)
    engine_of(engine)(forward, task, batch, names, seen)
    alone = [
        summed_gradient(forward, task, row_of(batch, i), names, weights[i])[0] for i in range(size)
    ]
    expected = {name: torch.stack([of_one[name] for of_one in alone]).sum(0) for name in names}
    require_same_sum(engine, seen.sums, expected)
