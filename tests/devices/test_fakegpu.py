"""The device that stands for a GPU is as strict as one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests import fakegpu

ON = "fakegpu:0"


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: here + there,
        lambda here, there: torch.cat([here, there]),
        lambda here, there: here.index_add_(0, there[0].long(), here),
        lambda here, there: nn.functional.conv1d(here[None], there[None]),
    ],
)
@pytest.mark.parametrize("other", ["cpu", "fakegpu:1"])
def test_operators__refuse_tensors_of_two_devices(mix, other: str, fake_gpu: None) -> None:
    here, there = torch.ones(2, 2, device=ON), torch.ones(2, 2, device=other)
    with pytest.raises(RuntimeError, match="same device"):
        mix(here, there)


def test_memory__cannot_be_seen_by_numpy(fake_gpu: None) -> None:
    here = torch.ones(2, device=ON)
    for read in (here.numpy, lambda: np.asarray(here)):
        with pytest.raises(TypeError):
            read()
    assert here.numpy(force=True).tolist() == [1, 1]


def test_recurrent_layers__have_gradients_in_training_mode_only(fake_gpu: None) -> None:
    layer, x = nn.LSTM(3, 4, bidirectional=True), torch.ones(2, 5, 3)
    expected = layer(x)[0]
    found = layer.to(ON)(x.to(ON))[0]
    torch.testing.assert_close(found.cpu(), expected)
    found.sum().backward()
    with pytest.raises(RuntimeError, match="training mode"):
        layer.eval()(x.to(ON))[0].sum().backward()
    with torch.no_grad():
        layer(x.to(ON))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.double(),
        lambda x: torch.zeros(2, dtype=torch.float64, device=x.device),
        lambda x: torch.ones(2, dtype=torch.float64).to(x.device),
        lambda x: x.sum(dtype=torch.float64),
    ],
)
def test_float64__can_be_forbidden(make, fake_gpu: None) -> None:
    x = torch.ones(2, device=ON)
    assert make(x).dtype == torch.float64
    fakegpu.allow_float64(False)
    with pytest.raises(TypeError, match="float64"):
        make(x)
    assert (x * 0.5).dtype == torch.float32
