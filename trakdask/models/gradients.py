"""Per-sample gradients of the model output: engines that hand them on parameter by parameter.

An engine takes a batch and calls ``sink(name, gradient)`` once per selected parameter, in the
order of ``names``, with gradient (batch, numel). It never forms gradients of other parameters, and
keeps nothing after it returns: what is done with the gradients is the sink's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trakdask.models.tasks import Batch, Forward, Task

__all__ = ["ENGINES", "Engine", "Sink", "loop_gradients", "vmap_gradients"]

Sink = Callable[[str, Tensor], None]


class Engine(Protocol):
    """A way to compute per-sample gradients."""

    def __call__(
        self, forward: Forward, task: Task, batch: Batch, names: Sequence[str], sink: Sink
    ) -> tuple[Tensor, Tensor]:
        """Feed the sink; return output and out_to_loss, both (batch,) float32."""


def loop_gradients(
    forward: Forward, task: Task, batch: Batch, names: Sequence[str], sink: Sink
) -> tuple[Tensor, Tensor]:
    """Differentiate sample by sample with ``torch.autograd.grad``: the oracle, and always right.

    Cost: one forward and backward of a single sample per sample. Memory: batch × parameters.
    """
    selected = {name: forward.parameters[name].detach().requires_grad_() for name in names}
    here = forward.with_parameters(selected)
    size = _size(batch)
    gradients = {n: t.new_empty(size, t.numel(), requires_grad=False) for n, t in selected.items()}
    outputs = torch.empty(size)
    for i in range(size):
        sample = Batch({name: value[i : i + 1] for name, value in batch.items()})
        output = _require_per_sample(task.output(here, sample), 1, "output")
        found = torch.autograd.grad(output[0], list(selected.values()), materialize_grads=True)
        for name, gradient in zip(names, found, strict=True):
            gradients[name][i] = gradient.reshape(-1)
        outputs[i] = output.detach()[0]
    for name in names:
        sink(name, gradients.pop(name))
    return outputs, _out_to_loss(forward, task, batch)


def vmap_gradients(
    forward: Forward, task: Task, batch: Batch, names: Sequence[str], sink: Sink
) -> tuple[Tensor, Tensor]:
    """Vectorise the gradient of one sample with ``torch.func``.

    Cost: a few batched forward and backward passes. Memory: batch × parameters. The model must not
    decide on values of its input, and must treat samples apart.
    """

    def output_of_one(selected: dict[str, Tensor], sample: dict[str, Tensor]) -> Tensor:
        alone = Batch({name: value[None] for name, value in sample.items()})
        output = task.output(forward.with_parameters(selected), alone)
        return _require_per_sample(output, 1, "output")[0]

    selected = {name: forward.parameters[name] for name in names}
    one = torch.func.grad_and_value(output_of_one)
    every = torch.func.vmap(one, in_dims=(None, 0), randomness="different")
    gradients, outputs = every(selected, dict(batch))
    size = _size(batch)
    for name in names:
        sink(name, gradients.pop(name).reshape(size, -1))
    return outputs.float(), _out_to_loss(forward, task, batch)


ENGINES: dict[str, Engine] = {"vmap": vmap_gradients, "loop": loop_gradients}


def _out_to_loss(forward: Forward, task: Task, batch: Batch) -> Tensor:
    with torch.no_grad():
        value = task.out_to_loss(forward, batch)
    return _require_per_sample(value, _size(batch), "out_to_loss").float()


def _require_per_sample(value: object, size: int, method: str) -> Tensor:
    if isinstance(value, Tensor) and value.shape == (size,):
        return value
    found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise ValueError(
        f"task.{method} returned {found} for a batch of {size}; needed shape ({size},), one scalar "
        "per sample. Reduce the other axes, or index [:, 0]."
    )


def _size(batch: Batch) -> int:
    return len(next(iter(batch.values())))
