"""What the tests of all tasks share: the oracle of per-sample gradients, and both engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trakdask.models.gradients import ENGINES
from trakdask.models.model import Model
from trakdask.models.tasks import Batch, Task

Output = Callable[[nn.Module, Batch], Tensor]
Run = Callable[..., tuple[dict[str, Tensor], Tensor, Tensor]]


@pytest.fixture
def run() -> Run:
    """Gradients by parameter, output and out_to_loss of a task on a module."""

    def run_engine(module: nn.Module, task: Task | str, data: Batch, engine: str = "loop"):
        model = Model(module, task=task)
        found: dict[str, Tensor] = {}
        forward = model.forward(model.checkpoints[0])

        def sink(name: str, gradient: Tensor) -> None:
            found[name] = gradient.clone()  # it may lie in a buffer

        f, q = ENGINES[engine](forward, model.task, data, tuple(model.shapes), sink)
        return found, f, q

    return run_engine


@pytest.fixture(params=ENGINES)
def check_gradients(request: pytest.FixtureRequest, run: Run):
    """Compare an engine with ``backward()`` of a plain output function, sample by sample."""

    def check(module: nn.Module, task: Task | str, data: Batch, output: Output) -> None:
        found, f, _ = run(module, task, data, request.param)
        for i in range(len(f)):
            module.zero_grad()
            expected = output(module, Batch({n: t[i : i + 1] for n, t in data.items()}))
            expected.backward()
            torch.testing.assert_close(f[i], expected.detach().float(), rtol=1e-6, atol=1e-6)
            for name, parameter in module.named_parameters():
                gradient = torch.zeros(()) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(
                    found[name][i].reshape(parameter.shape),
                    gradient.expand(parameter.shape).to(parameter.dtype),
                    rtol=1e-9,
                    atol=1e-12,
                )

    return check
