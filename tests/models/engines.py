"""For tests of engines: a sink that keeps gradients, a run, and a loop of ``backward()``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trakdask.models.gradients import engine_of
from trakdask.models.model import Model
from trakdask.models.tasks import Batch


class Collected(dict[str, Tensor]):
    """A sink that keeps gradients."""

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        assert (first or 0) == (self[name].shape[1] if name in self else 0)
        self[name] = torch.cat([self[name], gradient], 1) if first else gradient.clone()


def run(
    model: Model, batch: Batch, engine: str = "hooks", sink: Callable[..., None] | None = None
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Gradients by parameter, output and out_to_loss at the first checkpoint."""
    sink = Collected() if sink is None else sink
    forward = model.forward(model.checkpoints[0])
    f, q = engine_of(engine)(forward, model.task, batch, tuple(model.shapes), sink)
    return sink, f, q  # type: ignore[return-value]


def backward(
    module: nn.Module, output: Callable[[nn.Module, Batch], Tensor], batch: Batch
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients (sample, numel) of a plain function of a module, and its values."""
    found: dict[str, list[Tensor]] = {name: [] for name, _ in module.named_parameters()}
    values = []
    for i in range(batch.size):
        module.zero_grad()
        value = output(module, Batch({name: tensor[i : i + 1] for name, tensor in batch.items()}))
        value.backward()
        values.append(value.detach())
        for name, parameter in module.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name].append(grad.flatten().clone())
    return {name: torch.stack(rows) for name, rows in found.items()}, torch.stack(values)


def equal(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-10) -> None:
    """Compare gradients in float64."""
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=rtol, atol=1e-12)
