"""Calling a model, and margins against log p/(1-p) in Python's own floats and in float64."""

from __future__ import annotations

import math
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from trakdask.models.tasks import Batch, Forward
from trakdask.models.tasks.protocol import call_model, margin, one_minus_p


def margin_by_hand(logits: list[float], label: int) -> float:
    """log p/(1-p), written as in the paper."""
    top = max(logits)
    weights = [math.exp(z - top) for z in logits]
    p = weights[label] / sum(weights)
    return math.log(p / (1 - p))


@pytest.mark.parametrize("n_classes", [2, 3, 7])
def test_margin__is_the_formula(n_classes: int) -> None:
    logits = torch.randn(5, n_classes, generator=torch.Generator().manual_seed(0)).double()
    label = torch.arange(5) % n_classes
    expected = [margin_by_hand(z, y) for z, y in zip(logits.tolist(), label.tolist(), strict=True)]
    assert margin(logits, label).tolist() == pytest.approx(expected, rel=1e-12)
    stacked = margin(logits[None].expand(3, -1, -1), label.expand(3, -1))
    assert torch.equal(stacked, margin(logits, label).expand(3, -1))


@pytest.mark.parametrize("height", [-60.0, 60.0])
def test_margin__is_finite_and_exact_where_p_is_0_or_1(height: float) -> None:
    logits = torch.tensor([[height, 0.0, 0.0]], requires_grad=True)
    found = margin(logits, torch.tensor([0]))
    assert found.item() == pytest.approx(height - math.log(2))
    found.backward()
    assert logits.grad.tolist() == [[1.0, -0.5, -0.5]]


def test_one_minus_p__is_exact_near_1() -> None:
    found = one_minus_p(torch.tensor([-40.0, 0.0, 40.0]))
    assert found.tolist() == pytest.approx([1.0, 0.5, 4.248354e-18], rel=1e-6, abs=0)


class Returns(nn.Module):
    """Returns its input in the form that is asked for."""

    def __init__(self, wrap) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, a: Tensor, b: Tensor):
        return self.wrap(a - b)


def call(wrap, inputs: tuple[str, ...] = ("a", "b"), positional: bool = False) -> Tensor:
    batch = Batch(a=torch.ones(2, 3), b=torch.zeros(2, 3, dtype=torch.float64))
    return call_model(Forward(Returns(wrap), {}, {}), batch, inputs, positional)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: (t, None),
        lambda t: [t],
        lambda t: {"loss": None, "logits": t},
        lambda t: OrderedDict(logits=t),
        lambda t: SimpleNamespace(logits=t),
    ],
)
def test_call_model__finds_the_logits(wrap) -> None:
    assert torch.equal(call(wrap), torch.ones(2, 3, dtype=torch.float64))


def test_call_model__by_name_or_in_order() -> None:
    assert call(lambda t: t, ("b", "a"))[0, 0] == 1
    assert call(lambda t: t, ("b", "a"), positional=True)[0, 0] == -1


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_call_model__computes_in_float32_or_better(dtype, expected) -> None:
    assert call(lambda t: t.to(dtype)).dtype == expected


@pytest.mark.parametrize("wrap", [lambda t: None, lambda t: (), lambda t: {"logits": 3}])
def test_call_model__no_logits(wrap) -> None:
    with pytest.raises(ValueError, match=r"a tensor of logits.*got \w+ from the model"):
        call(wrap)
