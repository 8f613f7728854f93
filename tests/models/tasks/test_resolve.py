"""Names of tasks, tasks of users, and the line that tells two tasks apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import trakdask as td
from trakdask.models.tasks import TASKS, Task, TrakTask, resolve_task, task_spec


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


def test_task__of_a_user_takes_less_than_ten_lines() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how_to" / "own_model.md").read_text("utf-8")
    (code,) = re.findall(r"```{code-cell}\n(class SquaredError:.*?)```", page, flags=re.DOTALL)
    assert len(code.splitlines()) < 10
    namespace: dict = {}
    exec(code, namespace)
    assert isinstance(namespace["SquaredError"](), Task)
