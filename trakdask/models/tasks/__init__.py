"""Tasks: the scalar output of a model that is attributed, and how much the loss depends on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trakdask.checks import require_choice
from trakdask.models.tasks.clip import Clip
from trakdask.models.tasks.language import (
    CausalLM,
    QuestionAnswering,
    Segmentation,
    Seq2Seq,
    TokenClassification,
)
from trakdask.models.tasks.preferences import Preference, Reward
from trakdask.models.tasks.protocol import Batch, Forward, Task
from trakdask.models.tasks.protocol import TrakTask as TrakTask
from trakdask.models.tasks.protocol import task_spec as task_spec
from trakdask.models.tasks.supervised import (
    BinaryClassification,
    Classification,
    ImageClassification,
    MultiLabel,
    MultiRegression,
    Regression,
    TextClassification,
)

__all__ = [
    "Batch",
    "BinaryClassification",
    "CausalLM",
    "Classification",
    "Clip",
    "Forward",
    "ImageClassification",
    "MultiLabel",
    "MultiRegression",
    "Preference",
    "QuestionAnswering",
    "Regression",
    "Reward",
    "Segmentation",
    "Seq2Seq",
    "Task",
    "TextClassification",
    "TokenClassification",
]


TASKS: dict[str, Callable[[], Any]] = {
    "classification": Classification,
    "image_classification": ImageClassification,
    "text_classification": TextClassification,
    "binary_classification": BinaryClassification,
    "multi_label": MultiLabel,
    "regression": Regression,
    "multi_regression": MultiRegression,
    "segmentation": Segmentation,
    "causal_lm": CausalLM,
    "token_classification": TokenClassification,
    "question_answering": QuestionAnswering,
    "seq2seq": Seq2Seq,
    "clip": Clip,
    "preference": Preference,
    "reward": Reward,
}
"""The tasks that ``td.Model(task="...")`` knows by name."""


def resolve_task(task: str | Task | object) -> Task:
    """Return the task of a name, a task itself, or the adapter of a TRAK model output."""
    if isinstance(task, str):
        require_choice("task", task, list(TASKS), remedy="try task='classification'")
        return TASKS[task]()
    if isinstance(task, type):
        raise TypeError(f"expected an instance as task, got a class; try {task.__name__}()")
    if isinstance(task, Task):
        return task
    if hasattr(task, "get_output") and hasattr(task, "get_out_to_loss_grad"):
        return TrakTask(task)
    raise TypeError(
        f"expected one of {list(TASKS)} as task, or an object with the methods output(forward, "
        f"batch) and out_to_loss(forward, batch), got {type(task).__name__}"
    )


def __dir__() -> list[str]:
    return __all__
