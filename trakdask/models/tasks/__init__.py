"""Tasks: the scalar output of a model that is attributed, and how much the loss depends on it."""

from __future__ import annotations

from trakdask.models.tasks.clip import Clip, clip_embeddings
from trakdask.models.tasks.language import CausalLM, expand_tokens
from trakdask.models.tasks.protocol import Batch, Forward, Task
from trakdask.models.tasks.resolve import TASKS, TrakTask, resolve_task, task_spec
from trakdask.models.tasks.supervised import (
    BinaryClassification,
    Classification,
    ImageClassification,
    MultiLabel,
    Regression,
    TextClassification,
)

__all__ = [
    "TASKS",
    "Batch",
    "BinaryClassification",
    "CausalLM",
    "Classification",
    "Clip",
    "Forward",
    "ImageClassification",
    "MultiLabel",
    "Regression",
    "Task",
    "TextClassification",
    "TrakTask",
    "clip_embeddings",
    "expand_tokens",
    "resolve_task",
    "task_spec",
]


def __dir__() -> list[str]:
    return __all__
