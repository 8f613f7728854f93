"""f and Q of samples in a batch against f and Q of each sample alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trakdask.models.independence import reads_values, require_same_alone
from trakdask.models.model import Model
from trakdask.models.tasks import Batch, Forward, ImageClassification
from trakdask.models.tasks.protocol import SampleError


class Linear(nn.Module):
    """A linear layer, and what becomes of its outputs (batch, classes)."""

    def __init__(self, after: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.head(x))


def forward_of(after: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> Forward:
    torch.manual_seed(0)
    model = Model(Linear(after))
    return model.forward(model.checkpoints[0]).to(dtype)


def batch(n: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(n, 4, generator=generator)
    return Batch(image=image, label=torch.arange(n) % 3)


def check(forward: Forward, data: Batch) -> None:
    task = ImageClassification()
    with torch.no_grad():
        f, q = task.output(forward, data), task.out_to_loss(forward, data)
    require_same_alone(forward, task, data, f, q)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 30.0])
def test_require_same_alone__accepts_rounding(dtype: torch.dtype, scale: float) -> None:
    for n in (1, 2, 3, 64):
        check(forward_of(lambda y: scale * y, dtype), batch(n))


def test_require_same_alone__nan_of_another_sample() -> None:
    data = batch(3)
    data["image"][1] = torch.nan
    check(forward_of(lambda y: y), data)
    with pytest.raises(SampleError, match=r"got [\d.-]+ .*\bnan\b.* 3\b"):
        check(forward_of(lambda y: y + 0 * y.sum(0)), data)


READING = {
    "a number": lambda y: y * y[0, 0].item(),
    "truth": lambda y: y if (y > 0).all() else -y,
    "an array": lambda y: y * float(y.numpy()[0, 0]),
    "converted": lambda y: y * float(np.asarray(y)[0, 0]),
    "a list": lambda y: y * y.tolist()[0][0],
    "a mask": lambda y: y - y[y > 0].sum(),
    "positions": lambda y: y + len(y.nonzero()),
    "equality": lambda y: y if torch.equal(y[:1], y[1:]) else -y,
    "a slice": lambda y: y[: int(y.argmax()) + 5],
}
NOT_READING = {
    "arithmetic": lambda y: y.softmax(1) + y.max(1, keepdim=True).values,
    "where": lambda y: torch.where(y > 0, y, -y),
    "dropout": lambda y: nn.functional.dropout(y, 0.5, training=True),
    "shapes": lambda y: y if y.shape[1] > 1 else -y,
    "gather": lambda y: y[:, torch.tensor([1, 0])],
}


@pytest.mark.parametrize("case", [*READING, *NOT_READING])
def test_reads_values__ways_to_read(case: str) -> None:
    forward = forward_of((READING | NOT_READING)[case])
    state = torch.random.get_rng_state()
    assert reads_values(forward, ImageClassification(), batch(2)) is (case in READING)
    assert torch.equal(torch.random.get_rng_state(), state)
