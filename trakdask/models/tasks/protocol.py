"""The contract of a task, and its arguments: a batch, and a model as a function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from trakdask.html_tables import HtmlTable
from trakdask.models.reading import Reading
from trakdask.torch_internals import tree_leaves, tree_map

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
        raise missing_variable(name, self)


def missing_variable(name: str, present: Iterable[str]) -> ValueError:
    """Return the error for a variable that a task reads and the samples lack."""
    return ValueError(
        f"expected the variable {name!r} in samples, got {list(map(str, present))}; try renaming a "
        "variable, or passing its name to the task"
    )


class SampleError(ValueError):
    """An error that one sample of a batch causes.

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


@dataclass(eq=False)
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
    others
        Tensors that the module has in other attributes than parameters and buffers.
    reading
        What was read of the module before it was called; by default it is read now.
    """

    module: torch.nn.Module
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    checkpoint: str | None = None
    dtype: torch.dtype | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    reading: Reading = field(default=cast(Reading, None), repr=False)

    def __post_init__(self) -> None:
        self.reading = self.reading or Reading(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a batch, with the arguments of the module's own ``forward``.

        The model gets copies of its inputs, so that a model that modifies them in place does not
        change the batch, which other passes read, too.
        """
        args, kwargs = tree_map(partial(_copied, dtype=self.dtype), (args, kwargs))
        return self.reading.call(self.module, self.tensors(), args, kwargs)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return {**self.parameters, **self.buffers, **self.others}

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> Forward:
        """Return the same model with some parameters replaced."""
        return replace(self, parameters={**self.parameters, **parameters})

    def to(self, dtype: torch.dtype) -> Forward:
        """Return the same model in another precision."""
        return replace(self.mapped(partial(_cast, dtype=dtype)), dtype=dtype)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Forward:
        """Return the same model with a function of each of its tensors."""
        parameters, buffers, others = (
            {name: function(tensor) for name, tensor in tensors.items()}
            for tensors in (self.parameters, self.buffers, self.others)
        )
        return replace(self, parameters=parameters, buffers=buffers, others=others)

    def caching(self) -> CachingForward:
        """Return the same model, which returns its last result again for the same inputs."""
        return CachingForward(**{name: getattr(self, name) for name in self.__match_args__})


@dataclass(eq=False)
class CachingForward(Forward):
    """A model that returns its last result again for the same inputs, so f and Q share one pass."""

    _last: tuple[list[Any], Any, Any] | None = field(default=None, init=False, repr=False)

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


def reject_samples(bad: Tensor, text_of: Callable[..., str]) -> None:
    """Raise an error for the first sample that is bad.

    This looks at values, so ``output``, which runs under vmap, must not call it.

    Parameters
    ----------
    bad
        Which values are bad, bool (batch, ...).
    text_of
        Called with the first place of a bad value; returns the text of a :class:`SampleError`.
    """
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise SampleError(text_of(*place), place[0])


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
    reads, so that they are checked before anything runs; and ``default_estimator``, ``"soft"`` or
    another short form, which is what ``"auto"`` stands for in :func:`trakdask.score`. Without it,
    that is ``"trak"``. ``default_damping`` is its rule for λ, and ``loss_kind = "squared error"``
    says that the loss has the same curvature everywhere.

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
            with _for_trak(forward) as model:
                output: Tensor = self.modelout.get_output(*model, *sample)
            return output.reshape(())

        samples = tuple(batch.values())
        if len(samples[0]) == 1:  # the loop engine must not depend on vmap
            return one(*(tensor[0] for tensor in samples))[None]
        return torch.func.vmap(one, randomness="different")(*samples)

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return TRAK's out-to-loss gradient of each sample, (batch,)."""
        samples = tuple(batch.values())
        with _for_trak(forward) as model:
            result: Tensor = self.modelout.get_out_to_loss_grad(*model, samples)
        return result.reshape(-1) if result.numel() == len(samples[0]) else result


@contextmanager
def _for_trak(forward: Forward) -> Iterator[tuple[Any, ...]]:
    """Give the first arguments of TRAK's methods: the model, its weights and its buffers.

    The weights are in the model, too, which is restored afterwards: ``functional_call`` leaves a
    tied weight changed where its module has two names.
    """
    with forward.reading.holding(forward.tensors()):
        yield forward.module, forward.parameters, forward.buffers


def task_spec(task: Task) -> str:
    """Describe a task in one line that is equal for equal tasks in any process."""
    subject = task.modelout if isinstance(task, TrakTask) else task
    if dataclasses.is_dataclass(subject):
        return repr(subject)
    plain = (type(None), bool, int, float, str)
    values = {k: v for k, v in sorted(vars(subject).items()) if isinstance(v, plain)}
    inside = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return f"{type(subject).__qualname__}({inside})"
