"""Find the task that an option names, and describe a task in one line."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trakdask.html_tables import HtmlTable
from trakdask.models.tasks.clip import Clip
from trakdask.models.tasks.language import CausalLM
from trakdask.models.tasks.protocol import Batch, Forward, Task
from trakdask.models.tasks.supervised import (
    BinaryClassification,
    Classification,
    ImageClassification,
    MultiLabel,
    Regression,
    TextClassification,
)

__all__ = ["TASKS", "TrakTask", "resolve_task", "task_spec"]

TASKS: dict[str, Callable[[], Task]] = {
    "classification": Classification,
    "image_classification": ImageClassification,
    "text_classification": TextClassification,
    "binary_classification": BinaryClassification,
    "multi_label": MultiLabel,
    "regression": Regression,
    "causal_lm": CausalLM,
    "clip": Clip,
}
"""The tasks that ``td.Model(task="...")`` knows by name."""


@dataclass(frozen=True)
class TrakTask(HtmlTable):
    """Adapt an object with TRAK's ``get_output`` and ``get_out_to_loss_grad``.

    ``get_output(model, weights, buffers, *sample)`` takes one sample without batch axis, in the
    order of the samples' variables, and is vectorised here; ``get_out_to_loss_grad(model, weights,
    buffers, batch)`` takes the batch and returns (batch,) or (batch, 1).
    """

    modelout: Any

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the output of each sample, (batch,)."""

        def one(*sample: Tensor) -> Tensor:
            output: Tensor = self.modelout.get_output(
                forward.module, forward.parameters, forward.buffers, *sample
            )
            return output.reshape(())

        samples = tuple(batch.values())
        if len(samples[0]) == 1:  # the loop engine must not depend on vmap
            return one(*(tensor[0] for tensor in samples))[None]
        return torch.func.vmap(one, randomness="different")(*samples)

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return TRAK's out-to-loss gradient of each sample, (batch,)."""
        samples = tuple(batch.values())
        result: Tensor = self.modelout.get_out_to_loss_grad(
            forward.module, forward.parameters, forward.buffers, samples
        )
        return result.reshape(-1) if result.numel() == len(samples[0]) else result


def resolve_task(task: str | Task | object) -> Task:
    """Return the task of a name, a task itself, or the adapter of a TRAK model output."""
    if isinstance(task, str):
        if task not in TASKS:
            near = difflib.get_close_matches(task, TASKS, n=1)
            raise ValueError(
                f"expected one of {list(TASKS)} as task, got {task!r}; try "
                f"task={(near or ['classification'])[0]!r}"
            )
        return TASKS[task]()
    if isinstance(task, type):
        raise TypeError(
            f"expected an instance as task, got the class {task.__name__}; try "
            f"task={task.__name__}()"
        )
    if isinstance(task, Task):
        return task
    if hasattr(task, "get_output") and hasattr(task, "get_out_to_loss_grad"):
        return TrakTask(task)
    raise TypeError(
        f"expected one of {list(TASKS)} as task, or an object with the methods output(forward, "
        f"batch) and out_to_loss(forward, batch), got {type(task).__name__}"
    )


def task_spec(task: Task) -> str:
    """Describe a task in one line that is equal for equal tasks in any process."""
    subject = task.modelout if isinstance(task, TrakTask) else task
    if dataclasses.is_dataclass(subject):
        return repr(subject)
    plain = (type(None), bool, int, float, str)
    values = {k: v for k, v in sorted(vars(subject).items()) if isinstance(v, plain)}
    inside = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return f"{type(subject).__qualname__}({inside})"
