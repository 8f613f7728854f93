"""Parts of tasks: their names, batches, models as functions, logits, and margins by hand."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections import OrderedDict
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

import trakdask as td
from trakdask.models.tasks import TASKS, Batch, Forward, Task, TrakTask, resolve_task, task_spec
from trakdask.models.tasks.logits import margin, one_minus_p
from trakdask.models.tasks.protocol import SampleError, reject_samples, rejecting_later


def test_forward__with_parameters_replaces_only_those() -> None:
    module = nn.Linear(2, 1)
    forward = Forward(module, dict(module.named_parameters()), {}, "c")
    zero = forward.with_parameters({"weight": torch.zeros(1, 2)})
    assert torch.equal(zero(torch.ones(3, 2)), module.bias.expand(3, 1))
    assert torch.equal(forward(torch.ones(3, 2)), module(torch.ones(3, 2)))
    assert zero.checkpoint == "c"


@pytest.mark.parametrize("name", TASKS)
def test_resolve_task__every_name_is_a_frozen_task(name: str) -> None:
    task = resolve_task(name)
    assert isinstance(task, Task)
    assert task.variables
    assert task == TASKS[name]()
    assert task_spec(task) == repr(task)
    with pytest.raises(AttributeError):
        task.label = "other"  # type: ignore[attr-defined]
    assert getattr(td.tasks, type(task).__name__) is type(task)


class _Trak:
    def __init__(self, temperature: float) -> None:
        self.loss_temperature = temperature
        self.softmax = object()

    def get_output(self) -> None: ...

    def get_out_to_loss_grad(self) -> None: ...


def test_task_spec__of_an_object_of_traker() -> None:
    task = resolve_task(_Trak(2.0))
    assert isinstance(task, TrakTask)
    assert task_spec(task) == "_Trak(loss_temperature=2.0)"


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


def call(wrap, inputs: tuple[str, ...] = ("a", "b"), **options: object) -> Tensor:
    batch = Batch(a=torch.ones(2, 3), b=torch.zeros(2, 3, dtype=torch.float64))
    task = td.tasks.Classification(inputs, **{"positional": False, **options})
    return task.logits(Forward(Returns(wrap), {}, {}), batch)


class Named(NamedTuple):
    hidden: Tensor
    scores: Tensor


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda t: t, None),
        (lambda t: (t, None), None),
        (lambda t: [t], None),
        (lambda t: {"loss": None, "logits": t}, None),
        (lambda t: OrderedDict(logits=t), None),
        (lambda t: SimpleNamespace(logits=t), None),
        (lambda t: {"hidden": -t, "scores": t}, "scores"),
        (lambda t: {"hidden": -t, "scores": t}, 1),
        (lambda t: {0: t, "logits": -t}, 0),
        (lambda t: ModelOutput(hidden=-t, scores=t), "scores"),
        (lambda t: Named(-t, t), "scores"),
        (lambda t: Named(-t, t), -1),
        (lambda t: SimpleNamespace(logits=-t, scores=t), "scores"),
    ],
)
def test_logits__finds_the_logits_or_what_is_named(wrap, name: str | int | None) -> None:
    assert torch.equal(call(wrap, output=name), torch.ones(2, 3, dtype=torch.float64))
    assert call(lambda t: wrap(t.bfloat16()), output=name).dtype == torch.float32


def test_logits__by_name_or_in_order() -> None:
    assert call(lambda t: t, ("b", "a"))[0, 0] == 1
    assert call(lambda t: t, ("b", "a"), positional=True)[0, 0] == -1


def test_task__with_an_output_by_name_is_a_value() -> None:
    task = td.tasks.Classification(output="scores")
    assert repr(task).endswith("positional=True, output='scores')")
    assert pickle.loads(pickle.dumps(task)) == task == dataclasses.replace(task)
    assert dataclasses.replace(task, temperature=2.0).returned == "scores"
    assert task != td.tasks.Classification()


def numbered(row: int) -> str:
    return f"row {row} is bad"


def rejected_later(*bad: list[bool], error: Exception | None = None, ever: bool = True) -> None:
    """Look at some samples after the others, and go on."""
    with rejecting_later(ever=ever):
        for each in bad:
            with rejecting_later():  # inside of another one, it does nothing
                reject_samples(torch.tensor(each), numbered)
        if error is not None:
            raise error


def test_rejecting_later__raises_the_first_at_the_end() -> None:
    with pytest.raises(SampleError, match="row 1"):
        rejected_later([False, False], [False, True], [True, False])
    rejected_later([False])
    with pytest.raises(SampleError, match="row 0"):  # it is over
        reject_samples(torch.tensor([True]), numbered)


def test_rejecting_later__tells_what_made_the_body_fail() -> None:
    with pytest.raises(SampleError, match="row 1"):
        rejected_later([False, True], error=IndexError("of a label"))
    with pytest.raises(IndexError):
        rejected_later([False, False], error=IndexError("of a label"))


def test_rejecting_later__samples_that_have_been_looked_at() -> None:
    rejected_later([True], ever=False)
