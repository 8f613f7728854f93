"""Parameters are chosen by name, glob, class or predicate; an empty choice says what there is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trakdask.models.modules import select_parameters


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (None, ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ("2.*", ["2.weight", "2.bias"]),
        (["2.bias", "0.bias"], ["0.bias", "2.bias"]),
        ("*.weight", ["0.weight", "2.weight"]),
        (lambda name, tensor: tensor.ndim == 1, ["0.bias", "2.bias"]),
        (torch.nn.Linear, ["0.weight", "0.bias", "2.weight", "2.bias"]),
        (torch.nn.Sequential, ["0.weight", "0.bias", "2.weight", "2.bias"]),
    ],
)
def test_select_parameters__order_is_the_modules(selection, expected: list[str]) -> None:
    assert list(select_parameters(mlp(), selection)) == expected


def test_select_parameters__modules_inside_an_instance_count() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8))
    of_layer = select_parameters(module, nn.TransformerEncoderLayer)
    assert list(of_layer) == [name for name, _ in module.named_parameters() if name[0] == "1"]


def test_select_parameters__integers_have_no_gradient() -> None:
    module = mlp()
    module.codes = nn.Parameter(torch.arange(3), requires_grad=False)
    with pytest.raises(ValueError, match=r"'codes' with dtype torch\.int64"):
        select_parameters(module, "*")
    assert "codes" not in select_parameters(module, "[02].*")
