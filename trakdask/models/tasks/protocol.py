"""The contract of a task: a batch, the model as a function, and two functions of both."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from trakdask.models.torch_internals import tree_leaves, tree_map

__all__ = ["Batch", "CachingForward", "Forward", "SampleError", "Task"]


_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


class Batch(dict[str, Tensor]):
    """The variables of some samples by name, each a tensor (batch, ...).

    Unsigned integers of more than 8 bits become int64: torch can store but not use them.
    """

    def __init__(self, *args: Any, **kwargs: Tensor) -> None:
        super().__init__(*args, **kwargs)
        self.update({n: t.long() for n, t in self.items() if t.dtype in _UNSIGNED})

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(next(iter(self.values())))

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(
            f"expected the variable {name!r}, which the task reads, got samples with the variables "
            f"{list(self)}; try renaming a variable of the samples, or passing its name to the task"
        )


class SampleError(ValueError):
    """An error that is caused by one sample of a batch.

    Parameters
    ----------
    text
        The message, which contains ``{sample}`` in place of the sample's position.
    row
        Row of the sample in its batch.
    """

    def __init__(self, text: str, row: int) -> None:
        super().__init__(text.replace("{sample}", f"{row} of the batch"))
        self.text = text
        self.row = row

    def at(self, position: int) -> ValueError:
        """Return the error with the sample's position among all samples."""
        return ValueError(self.text.replace("{sample}", str(position)))

    def __reduce__(self) -> tuple[type[SampleError], tuple[str, int]]:
        return type(self), (self.text, self.row)


class Forward:
    """A model at one set of weights, as a function of its inputs.

    Parameters
    ----------
    module
        The architecture. ``parameters`` and ``buffers`` replace its tensors of the same names.
    parameters, buffers
        Tensors by name.
    checkpoint
        Name of the checkpoint that the tensors are from, for tasks that depend on the checkpoint.
    dtype
        Precision of the model, to which floating-point inputs are cast; None to leave them as they
        are.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        checkpoint: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.module = module
        self.parameters = dict(parameters)
        self.buffers = dict(buffers)
        self.checkpoint = checkpoint
        self.dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a batch, with the arguments of the module's own ``forward``.

        The model gets copies of its inputs, so that a model that modifies them in place does not
        change the batch, which other passes read, too.
        """
        tensors = {**self.parameters, **self.buffers}
        args, kwargs = tree_map(partial(_copied, dtype=self.dtype), (args, kwargs))
        return torch.func.functional_call(self.module, tensors, args, kwargs)

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> Forward:
        """Return the same model with some parameters replaced."""
        replaced = {**self.parameters, **parameters}
        return Forward(self.module, replaced, self.buffers, self.checkpoint, self.dtype)

    def to(self, dtype: torch.dtype) -> Forward:
        """Return the same model in another precision."""
        parameters, buffers = (
            {name: _cast(tensor, dtype) for name, tensor in tensors.items()}
            for tensors in (self.parameters, self.buffers)
        )
        return Forward(self.module, parameters, buffers, self.checkpoint, dtype)


class CachingForward(Forward):
    """A model that returns its last result again for the same inputs, so f and Q share one pass.

    Parameters
    ----------
    forward
        The model.
    """

    def __init__(self, forward: Forward) -> None:
        tensors = forward.parameters, forward.buffers
        super().__init__(forward.module, *tensors, forward.checkpoint, forward.dtype)
        self._last: tuple[list[Any], Any, Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a batch, or return the last result if the inputs are the same."""
        leaves = tree_leaves((args, kwargs))
        # Tensors are compared by identity, which holds as long as they are kept with the result.
        key = [id(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves] + sorted(kwargs)
        if self._last is None or self._last[0] != key:
            self._last = key, leaves, super().__call__(*args, **kwargs)
        return self._last[2]

    def forget(self) -> None:
        """Release the last result, and with it the autograd graph that produced it."""
        self._last = None


def _copied(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    cast = value if dtype is None else _cast(value, dtype)
    return cast.clone() if cast is value else cast


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_floating else value


@runtime_checkable
class Task(Protocol):
    """The contract of a task: two functions of a *batched* forward.

    A task may also have an attribute ``variables``, the names of the samples' variables that it
    reads, so that they are checked before anything runs.

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
