"""Batches and models as functions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trakdask.models.tasks import Batch, Forward


def test_forward__with_parameters_replaces_only_those() -> None:
    module = nn.Linear(2, 1)
    forward = Forward(module, dict(module.named_parameters()), {}, "c")
    zero = forward.with_parameters({"weight": torch.zeros(1, 2)})
    assert torch.equal(zero(torch.ones(3, 2)), module.bias.expand(3, 1))
    assert torch.equal(forward(torch.ones(3, 2)), module(torch.ones(3, 2)))
    assert zero.checkpoint == "c"


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_batch__unsigned_integers_can_be_computed_with(dtype: torch.dtype) -> None:
    """They can be stored, but torch neither compares them nor indexes with them."""
    batch = Batch({"label": torch.tensor([0, 2]).to(dtype)}, x=torch.ones(2, 4))
    assert batch["label"].dtype == torch.int64
    assert batch["label"].tolist() == [0, 2]
    assert batch["x"].dtype == torch.float32
