"""Parts of tasks: their names, batches, models as functions, logits, and margins by hand."""

from __future__ import annotations

import math
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
        (lambda t: SimpleNamespace(logits=t), None),
        (lambda t: {"hidden": -t, "scores": t}, "scores"),
        (lambda t: {"hidden": -t, "scores": t}, 1),
        (lambda t: ModelOutput(hidden=-t, scores=t), "scores"),
        (lambda t: Named(-t, t), "scores"),
        (lambda t: SimpleNamespace(logits=-t, scores=t), "scores"),
    ],
)
def test_logits__finds_the_logits_or_what_is_named(wrap, name: str | int | None) -> None:
    assert torch.equal(call(wrap, output=name), torch.ones(2, 3, dtype=torch.float64))
    assert call(lambda t: wrap(t.bfloat16()), output=name).dtype == torch.float32


def test_logits__by_name_or_in_order() -> None:
    assert call(lambda t: t, ("b", "a"))[0, 0] == 1
    assert call(lambda t: t, ("b", "a"), positional=True)[0, 0] == -1


def rejected_later(*bad: list[bool], error: Exception | None = None, ever: bool = True) -> None:
    """Look at some samples after the others, and go on."""
    with rejecting_later(ever=ever):
        for each in bad:
            with rejecting_later():  # inside of another one, it does nothing
                reject_samples(torch.tensor(each), "row {} is bad".format)
        if error is not None:
            raise error


def test_rejecting_later__raises_the_first_at_the_end_or_what_made_the_body_fail() -> None:
    with pytest.raises(SampleError, match="row 1"):
        rejected_later([False, False], [False, True], [True, False])
    rejected_later([False])
    with pytest.raises(SampleError, match="row 0"):  # it is over
        reject_samples(torch.tensor([True]), "row {} is bad".format)
    for bad, expected in (([False, True], SampleError), ([False, False], IndexError)):
        with pytest.raises(expected):
            rejected_later(bad, error=IndexError("of a label"))
    rejected_later([True], ever=False)  # they have been looked at
