"""Fixtures for tests of tasks: the engines, and the oracle of per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.models import engines
from trakdask.models.gradients import ENGINES
from trakdask.models.model import Model
from trakdask.models.tasks import Batch, Task

Output = Callable[[nn.Module, Batch], Tensor]
Run = Callable[..., tuple[dict[str, Tensor], Tensor, Tensor]]


@pytest.fixture
def run() -> Run:
    """Gradients by parameter, output and out_to_loss of a task on a module."""

    def run_engine(module: nn.Module, task: Task | str, data: Batch, engine: str = "loop"):
        return engines.run(Model(module, task=task), data, engine)

    return run_engine


@pytest.fixture(params=ENGINES)
def check_gradients(request: pytest.FixtureRequest, run: Run):
    """Compare an engine with ``backward()`` of a plain output function, sample by sample."""

    def check(module: nn.Module, task: Task | str, data: Batch, output: Output) -> None:
        found, f, _ = run(module, task, data, request.param)
        expected, values = engines.backward(module, output, data)
        torch.testing.assert_close(f, values.float(), rtol=1e-6, atol=1e-6)
        engines.equal(found, expected, rtol=1e-9)

    return check
