"""What is said of a model that fails: the layer, what it was given, and the sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trakdask.models.diagnosis import explain
from trakdask.models.model import Model
from trakdask.models.tasks import Batch, CausalLM, ImageClassification
from trakdask.models.tasks.protocol import SampleError


def explained(module: nn.Module, batch: Batch, task: Any = None) -> Exception | None:
    """Return what is made of the error that the task raises."""
    task = task or ImageClassification()
    model = Model(module, task=task)
    forward = model.forward(model.checkpoints[0])
    with pytest.raises((RuntimeError, IndexError)) as caught:
        task.output(forward, batch)
    return explain(caught.value, forward, task, batch)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def batch(*shape: int, dtype: torch.dtype = torch.float32) -> Batch:
    return Batch(image=torch.ones(shape).to(dtype), label=torch.zeros(shape[0], dtype=torch.long))


def test_explain__names_the_innermost_layer() -> None:
    found = str(explained(Deep(), batch(2, 4)))
    assert "layer 'body.2', Linear(in_features=6" in found
    assert "got float32 (2, 5) from the variables image float32 (2, 4), label int64 (2,)" in found


def test_explain__dtype_of_the_input() -> None:
    found = str(explained(Deep(), batch(2, 4, dtype=torch.uint8)))
    assert "expected torch.float32 at layer 'body.0'" in found
    assert "samples.assign(image=samples['image'].astype('float32'))" in found


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(7, 4), nn.Embedding(3, 4)
        self.head = nn.Linear(4, 7)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.wte(ids) + self.wpe(torch.arange(ids.shape[1])[None]))


def test_explain__token_ids() -> None:
    ids = torch.tensor([[1, 2], [3, 4], [5, 7]])
    found = explained(Language(), Batch(ids=ids), CausalLM("ids", positional=True))
    assert isinstance(found, SampleError)
    assert found.row == 2
    assert "0..6 (layer 'wte' has 7 rows), got 7 at sample 12;" in str(found.at(12))
    long = Batch(ids=torch.ones(2, 4, dtype=torch.long))
    found = explained(Language(), long, CausalLM("ids", positional=True))
    assert "positions in 0..2 (layer 'wpe' has 3 rows), got 3" in str(found)


def test_explain__nothing_where_the_model_is_not_to_blame() -> None:
    class Task(ImageClassification):
        def output(self, forward, batch):
            super().output(forward, batch)
            raise RuntimeError("of the task")

    assert explained(nn.Linear(4, 3), batch(2, 4), Task()) is None


def test_explain__leaves_no_hooks() -> None:
    model = Model(Deep())
    forward = model.forward(model.checkpoints[0])
    explain(RuntimeError(), forward, model.task, batch(2, 4))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in forward.module.modules())
