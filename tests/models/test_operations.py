"""Operations of a model are those that one counts by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from trakdask.models.operations import count_operations
from trakdask.models.tasks import Batch, Forward, ImageClassification

IMAGE = {"image": ((3, 8, 8), np.dtype("f4")), "label": ((), np.dtype("i8"))}
CONV = 2 * 4 * (3 * 9) * 64  # a product and a sum for each of channels out, of kernels, of pixels
LINEAR = 2 * (4 * 64) * 5


def network() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * 64, 5)).eval()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_count_operations__by_hand(device: str) -> None:
    module = network().to(device)
    names = [name for name, _ in module.named_parameters()]
    # Forward; then each layer's weights, and what the layer before needs.
    needed = CONV + LINEAR + CONV + 2 * LINEAR
    assert count_operations(module, ImageClassification(), names, IMAGE) == needed
    last = [name for name in names if name.startswith("4.")]
    assert count_operations(module, ImageClassification(), last, IMAGE) == CONV + 2 * LINEAR


def test_count_operations__leaves_nothing_behind() -> None:
    module, state = network(), torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    count_operations(module, ImageClassification(), ["0.weight"], IMAGE)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(tensor.requires_grad for tensor in module.parameters())


def test_count_operations__of_a_module_that_keeps_tensors() -> None:
    class Keeps(nn.Linear):
        def forward(self, x):
            self.kept = getattr(self, "kept", x)
            return super().forward(self.kept)

    module = nn.Sequential(nn.Flatten(), Keeps(192, 5))
    needed = 2 * 2 * 192 * 5
    assert count_operations(module, ImageClassification(), ["1.weight"], IMAGE) == needed
    assert not hasattr(module[1], "kept")


def test_count_operations__unknown_where_values_decide() -> None:
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    class Plain:
        def output(self, forward: Forward, batch: Batch) -> torch.Tensor:
            return forward(batch["x"])[:, 0]

        def out_to_loss(self, forward: Forward, batch: Batch) -> torch.Tensor:
            return torch.ones(len(batch["x"]))

    inputs = {"x": ((4,), np.dtype("f4"))}
    assert count_operations(Looks(4, 1), Plain(), ["weight"], inputs) is None
    assert count_operations(nn.Linear(4, 1), Plain(), ["weight"], inputs) == 2 * 8
