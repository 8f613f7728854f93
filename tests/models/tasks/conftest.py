"""Fixtures for tests of tasks: the engines, and the oracle of per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


@pytest.fixture
def check_gradients(run: Run):
    """Compare each engine with ``backward()`` of a plain function, by sample; return f and Q."""

    def check(module: nn.Module, task: Task | str, data: Batch, output: Output) -> Any:
        expected, values = engines.backward(module, output, data)
        for engine in ENGINES:
            found, f, q = run(module, task, data, engine)
            torch.testing.assert_close(f, values.float(), rtol=1e-6, atol=1e-6)
            engines.equal(found, expected, rtol=1e-9)
        return f, q

    return check
