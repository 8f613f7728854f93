"""The contract of a task, and its arguments: a batch, and a model as a function."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import local
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from trakdask.checks import require_choice
from trakdask.html_tables import HtmlTable
from trakdask.models.reading import Reading
from trakdask.torch_internals import tree_leaves, tree_map

_local = local()

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

LOSSES = ("cross-entropy", "weighted cross-entropy", "squared error", "minus output", "other")
"""What a task can say of its loss; see :class:`Task`."""

DEFAULTS = ("default_estimator", "default_damping")
"""Attributes by which a task says how scores are made if nobody else does."""

_PLAIN = (type(None), bool, int, float, str)
_METHODS = ("output", "out_to_loss", "get_output", "get_out_to_loss_grad")


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
    caches
        Whether the last result is kept, and returned again for the same inputs.
    """

    module: torch.nn.Module
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    checkpoint: str | None = None
    dtype: torch.dtype | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    reading: Reading = field(default=cast(Reading, None), repr=False)
    caches: bool = False
    _last: tuple[list[Any], Any, Any] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.reading = self.reading or Reading(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a batch, with the arguments of the module's own ``forward``.

        The model gets copies of its inputs, so that a model that modifies them in place does not
        change the batch, which other passes read, too.
        """
        if not self.caches:
            return self._run(args, kwargs)
        leaves = tree_leaves((args, kwargs))
        # Tensors are compared by identity, which holds as long as they are kept with the result.
        key = [id(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves] + sorted(kwargs)
        if self._last is None or self._last[0] != key:
            self._last = key, leaves, self._run(args, kwargs)
        return self._last[2]

    def _run(self, args: Any, kwargs: Any) -> Any:
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
        cast = self.mapped(lambda t: t.to(dtype) if t.is_floating_point() else t)
        return replace(cast, dtype=dtype)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Forward:
        """Return the same model with a function of each of its tensors."""
        parameters, buffers, others = (
            {name: function(tensor) for name, tensor in tensors.items()}
            for tensors in (self.parameters, self.buffers, self.others)
        )
        return replace(self, parameters=parameters, buffers=buffers, others=others)

    def caching(self) -> Forward:
        """Return the same model, which returns its last result again for the same inputs.

        So f and Q share one pass.
        """
        return replace(self, caches=True)

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
    if (found := getattr(_local, "found", None)) is not None:
        found.append((bad, text_of))
    elif bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise SampleError(text_of(*place), place[0])


@contextmanager
def rejecting_later(*, ever: bool = True) -> Iterator[None]:
    """Let :func:`reject_samples` wait until the body ends, or fails: then one read serves all.

    Each read waits for the device. If not ``ever``, nothing is rejected: for samples that have been
    looked at. Inside of another one, this does nothing.
    """
    if getattr(_local, "found", None) is not None:
        yield
        return
    found: list[tuple[Tensor, Callable[..., str]]] = []
    _local.found = found
    try:
        yield
    finally:
        _local.found = None
        if ever and found and bool(torch.stack([bad.any() for bad, _ in found]).any()):
            # In the order in which the task asked, so that the first error is the same as without
            # waiting.
            for each in found:
                reject_samples(*each)


def _copied(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a copy of a tensor, of another precision if it is floating-point."""
    if not isinstance(value, Tensor):
        return value
    # A cast to another precision makes a copy anyway.
    is_cast = dtype is not None and value.is_floating_point() and value.dtype != dtype
    return value.to(dtype) if is_cast else value.clone()


@runtime_checkable
class Task(Protocol):
    """The contract of a task: two functions of a *batched* forward.

    A task may also say facts of itself, as attributes of its class. Features keep them in their
    ``attrs``, so that a store knows them without the task:

    - ``variables``, the names of the samples' variables that it reads, so that they are checked
      before anything runs.
    - ``loss_kind``, how the loss ℓ of a sample follows from f: ``"cross-entropy"``,
      ℓ = log(1 + exp(-f)), where f = log p/(1-p) is the margin of the right answer;
      ``"weighted cross-entropy"``, which is a constant of the sample times that, as is Q;
      ``"squared error"``, ℓ = ½ (y - f)² with Q = y - f;
      ``"minus output"``, f = -ℓ with Q = 1; or ``"other"``. Metrics such as
      ``td.evaluate.metric(..., "loss")`` need it. A subclass that has another ``output`` or
      ``out_to_loss`` does not inherit it, and says its own.
    - ``default_estimator``, ``"soft"`` or another short form, which is what ``"auto"`` stands for
      in :func:`trakdask.score`. Without it, that is ``"trak"``.
    - ``default_damping``, the rule for λ.
    - ``naming``, the settings that only name variables, or say where the output of a sample is.
      They do not count where features are compared.

    Examples
    --------
    >>> class SquaredError:
    ...     variables = ("x", "y")
    ...     loss_kind = "squared error"
    ...
    ...     def output(self, forward, batch):
    ...         return forward(batch["x"])[:, 0]
    ...
    ...     def out_to_loss(self, forward, batch):
    ...         return batch["y"] - forward(batch["x"])[:, 0]
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
    buffers, batch)`` takes the batch and returns (batch,) or (batch, 1). It is called
    only if ``has_q``; else Q is 0.
    """

    modelout: Any
    has_q: bool = True

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the output of each sample, (batch,)."""

        def one(*sample: Tensor) -> Tensor:
            with _for_trak(forward) as model:
                output: Tensor = self.modelout.get_output(*model, *sample)
            return output.reshape(())

        samples = tuple(batch.values())
        if len(samples[0]) == 1:  # the loop engine must not depend on vmap
            return one(*(tensor[0] for tensor in samples))[None]
        # By default, vmap raises an error of its own at random operations. A random model is
        # refused by the comparison of samples, which says what to try.
        return torch.func.vmap(one, randomness="different")(*samples)

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return TRAK's out-to-loss gradient of each sample, (batch,), or 0 for each."""
        samples = tuple(batch.values())
        if not self.has_q:
            return samples[0].new_zeros(len(samples[0]), dtype=torch.float32)
        with _for_trak(forward) as model:
            result: Tensor = self.modelout.get_out_to_loss_grad(*model, samples)
        # Another shape is reported by the engine, which knows what it should be.
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
    """Describe a task in one line, for people and messages."""
    subject = _subject(task)
    if dataclasses.is_dataclass(subject):
        return repr(subject)
    inside = ", ".join(f"{name}={value!r}" for name, value in _settings(subject).items())
    return f"{type(subject).__qualname__}({inside})"


def task_fields(task: Any) -> dict[str, Any]:
    """Return the class of a task, its settings, and which of them only name variables, as JSON.

    They are equal for equal tasks in any process.
    """
    subject = _subject(task)
    return {
        "class": type(subject).__qualname__,
        "fields": {name: _as_json(setting) for name, setting in _settings(subject).items()},
        "names": list(getattr(subject, "naming", ())),
    }


def task_facts(task: Task) -> dict[str, Any]:
    """Return what a task says about itself, as attrs of its features.

    ``label`` is the variable with the classes of which a cross-entropy has the margin.
    """
    subject = _subject(task)
    facts = {name: getattr(subject, name) for name in DEFAULTS if hasattr(subject, name)}
    loss = getattr(subject, "loss_kind", None)
    if loss is None:
        return facts
    # Only if no class has changed f or Q since it was said.
    # The number of a class in this order says which of two attributes is nearer to the task.
    classes = type(subject).__mro__

    def place(name: str) -> int:
        return next((i for i, kind in enumerate(classes) if name in vars(kind)), len(classes))

    # What an instance says itself is nearer than any class.
    said = -1 if "loss_kind" in getattr(subject, "__dict__", ()) else place("loss_kind")
    if said > min(map(place, _METHODS)):
        return facts
    require_choice("loss_kind", loss, LOSSES, remedy="try loss_kind='other'")
    label = getattr(subject, "label", None)
    of_classes = {"label": label} if loss == "cross-entropy" and isinstance(label, str) else {}
    return {**facts, "loss_kind": loss, **of_classes}


def _subject(task: Any) -> Any:
    return task.modelout if isinstance(task, TrakTask) else task


def _as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return task_fields(value)
    if isinstance(value, (tuple, list)):
        return [_as_json(item) for item in value]
    # JSON has no NaN and no infinity; their text is as good for a comparison.
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if isinstance(value, _PLAIN) and is_finite else repr(value)


def _settings(subject: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(subject):
        names = [field.name for field in dataclasses.fields(subject) if field.repr]
        return {name: getattr(subject, name) for name in names}
    return {k: v for k, v in sorted(vars(subject).items()) if isinstance(v, _PLAIN)}
