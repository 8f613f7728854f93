"""Tasks: what is the scalar output of a model, and how much does the loss still care for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["TASKS", "Batch", "Forward", "ImageClassification", "Task", "resolve_task", "task_spec"]


class Batch(dict[str, Tensor]):
    """The variables of some samples by name, each a tensor (batch, ...)."""

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(
            f"the samples have the variables {list(self)}; the task needs {name!r}. Name the "
            "variable so in the samples, or give the task its name."
        )


class Forward:
    """A model at one set of weights, as a function of its inputs.

    Parameters
    ----------
    module
        The skeleton; its own tensors are not used where ``parameters`` and ``buffers`` name them.
    parameters, buffers
        Tensors by name.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
    ) -> None:
        self.module = module
        self.parameters = dict(parameters)
        self.buffers = dict(buffers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a batch, with the arguments of the module's own ``forward``."""
        tensors = {**self.parameters, **self.buffers}
        return torch.func.functional_call(self.module, tensors, args, kwargs)

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> Forward:
        """Return the same model with some parameters replaced."""
        return Forward(self.module, {**self.parameters, **parameters}, self.buffers)


@runtime_checkable
class Task(Protocol):
    """The contract of a task: two functions of a *batched* forward.

    A task may also have ``variables``, the names of the samples' variables that it reads: then they
    are checked before anything runs.

    Examples
    --------
    >>> class SquaredError:
    ...     variables = ("x", "y")
    ...
    ...     def output(self, forward, batch):
    ...         return forward(batch["x"])[:, 0]
    ...
    ...     def out_to_loss(self, forward, batch):
    ...         return 2 * (batch["y"] - forward(batch["x"])[:, 0])
    >>> isinstance(SquaredError(), Task)
    True
    """

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the model output f of each sample, shape (batch,); it is differentiated."""

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return Q = -dℓ/df of each sample, shape (batch,); it is not differentiated."""


@dataclass(frozen=True)
class ImageClassification:
    """Classification with one label per sample.

    The output is the margin log p/(1-p) of the correct class, f = logit_y - logsumexp(other
    logits); Q = 1 - p, with p the softmax at ``temperature`` (the margin has no temperature).

    Parameters
    ----------
    temperature
        Divides the logits in Q only.
    image, label
        Names of the variables: model input (batch, ...) and integer class (batch,).

    References
    ----------
    Park et al. 2023, section 3.3; traker's ``ImageClassificationModelOutput``.
    """

    temperature: float = 1.0
    image: str = "image"
    label: str = "label"

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables that the task reads."""
        return (self.image, self.label)

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the margin of the correct class, (batch,)."""
        logits, label = self._logits(forward, batch)
        correct = logits.gather(1, label[:, None])[:, 0]
        is_label = torch.arange(logits.shape[1], device=logits.device) == label[:, None]
        others = logits.masked_fill(is_label, -torch.inf)
        return correct - others.logsumexp(1)

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return 1 - p of the correct class, (batch,)."""
        logits, label = self._logits(forward, batch)
        log_p = torch.log_softmax(logits / self.temperature, dim=1)
        return -torch.expm1(log_p.gather(1, label[:, None])[:, 0])  # exact also where p is near 1

    def _logits(self, forward: Forward, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = forward(batch[self.image])
        if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(
                f"the model returned {found} for a batch of {len(batch[self.image])}; "
                "image_classification needs logits (batch, classes) with 2 classes or more. "
                "Wrap the model so that it returns bare logits, or write a task."
            )
        label = batch[self.label]
        if label.ndim != 1 or label.is_floating_point() or label.is_complex():
            raise ValueError(
                f"{self.label!r} is {label.dtype} of shape {tuple(label.shape)}; "
                "image_classification needs integer classes, one per sample. Use "
                "labels.astype(int) and drop other axes."
            )
        return logits if logits.dtype == torch.float64 else logits.float(), label.long()


@dataclass(frozen=True)
class TrakTask:
    """Adapter of an object with TRAK's ``get_output`` and ``get_out_to_loss_grad``.

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


TASKS: dict[str, Callable[[], Task]] = {"image_classification": ImageClassification}


def resolve_task(task: str | Task | object) -> Task:
    """Return the task of a name, a task itself, or the adapter of a TRAK model output."""
    if isinstance(task, str):
        if task not in TASKS:
            raise ValueError(
                f"task is {task!r}; needed one of {sorted(TASKS)}, or an object with the methods "
                "output(forward, batch) and out_to_loss(forward, batch)."
            )
        return TASKS[task]()
    if isinstance(task, type):
        raise TypeError(
            f"task is the class {task.__name__}; needed an instance. Type task={task.__name__}()."
        )
    if isinstance(task, Task):
        return task
    if hasattr(task, "get_output") and hasattr(task, "get_out_to_loss_grad"):
        return TrakTask(task)
    raise TypeError(
        f"task is a {type(task).__name__}; needed a name of {sorted(TASKS)}, or an object with the "
        "methods output(forward, batch) and out_to_loss(forward, batch)."
    )


def task_spec(task: Task) -> str:
    """Describe a task in one line that is equal for equal tasks in any process."""
    subject = task.modelout if isinstance(task, TrakTask) else task
    if dataclasses.is_dataclass(subject):
        return repr(subject)
    values = {k: v for k, v in sorted(vars(subject).items()) if _is_plain(v)}
    inside = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return f"{type(subject).__qualname__}({inside})"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
