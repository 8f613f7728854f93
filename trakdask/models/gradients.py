"""Per-sample gradients of the model output: engines that hand them on parameter by parameter.

An engine takes a batch and hands the sink the gradient of each selected parameter, (batch, numel),
which may lie in a buffer that the next one overwrites. It never forms gradients of other
parameters, and keeps nothing after it returns: what becomes of them is up to the sink.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trakdask.models.coverage import Coverage, cover
from trakdask.models.hooks import (
    Axes,
    CallAxes,
    CallShapes,
    Recorder,
    Remembering,
    recorded_shapes,
    whole_parameters,
)
from trakdask.models.tasks import Batch, Forward, Task, TrakTask

__all__ = [
    "ENGINES",
    "Engine",
    "Sink",
    "choose_engine",
    "elements_at_once",
    "hooks_gradients",
    "loop_gradients",
    "require_same_as_loop",
    "vmap_gradients",
]


class Sink(Protocol):
    """What takes the gradients."""

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Take all elements of a parameter's gradient, or, in order, those from ``first`` on."""


class Engine(Protocol):
    """A way to compute per-sample gradients."""

    def __call__(
        self, forward: Forward, task: Task, batch: Batch, names: Sequence[str], sink: Sink
    ) -> tuple[Tensor, Tensor]:
        """Feed the sink; return output and out_to_loss, both (batch,) float32."""


def loop_gradients(
    forward: Forward, task: Task, batch: Batch, names: Sequence[str], sink: Sink
) -> tuple[Tensor, Tensor]:
    """Differentiate sample by sample with ``torch.autograd.grad``: the oracle, and always right.

    Cost: one forward and backward of a single sample per sample. Memory: batch × parameters.
    """
    selected = {name: forward.parameters[name].detach().requires_grad_() for name in names}
    here = forward.with_parameters(selected)
    size = _size(batch)
    gradients = {n: t.new_empty(size, t.numel(), requires_grad=False) for n, t in selected.items()}
    outputs = torch.empty(size)
    for i in range(size):
        sample = Batch({name: value[i : i + 1] for name, value in batch.items()})
        output = _require_per_sample(task.output(here, sample), 1, "output")
        found = torch.autograd.grad(output[0], list(selected.values()), materialize_grads=True)
        for name, gradient in zip(names, found, strict=True):
            gradients[name][i] = gradient.reshape(-1)
        outputs[i] = output.detach()[0]
    for name in names:
        sink(name, gradients.pop(name))
    return outputs, _out_to_loss(forward, task, batch)


def vmap_gradients(
    forward: Forward, task: Task, batch: Batch, names: Sequence[str], sink: Sink
) -> tuple[Tensor, Tensor]:
    """Vectorise the gradient of one sample with ``torch.func``.

    Cost: a few batched forward and backward passes. Memory: batch × parameters. The model must not
    decide on values of its input, and must treat samples apart.
    """

    def output_of_one(selected: dict[str, Tensor], sample: dict[str, Tensor]) -> Tensor:
        alone = Batch({name: value[None] for name, value in sample.items()})
        output = task.output(forward.with_parameters(selected), alone)
        return _require_per_sample(output, 1, "output")[0]

    selected = {name: forward.parameters[name] for name in names}
    one = torch.func.grad_and_value(output_of_one)
    every = torch.func.vmap(one, in_dims=(None, 0), randomness="different")
    gradients, outputs = every(selected, dict(batch))
    size = _size(batch)
    for name in names:
        sink(name, gradients.pop(name).reshape(size, -1))
    return outputs.float(), _out_to_loss(forward, task, batch)


def hooks_gradients(
    forward: Forward, task: Task, batch: Batch, names: Sequence[str], sink: Sink
) -> tuple[Tensor, Tensor]:
    """Form gradients layer by layer during one batched backward pass.

    The sink gets parameters in the order of the backward pass, those that hooks do not reach last,
    by :func:`vmap_gradients`. Cost: about one forward and one backward pass. Memory: activations of
    the batch, and batch × the largest parameter, but 4 MB where that is a linear or embedding
    layer. The model must treat samples apart.
    """
    if isinstance(task, TrakTask):
        raise ValueError(
            "the task hands the model one sample at a time; hooks need batches. "
            "Type gradients='vmap'."
        )
    size = _size(batch)
    known = _knowledge(forward, task, batch, tuple(names))
    reached = known.coverage
    parameters = {name: tensor.detach() for name, tensor in forward.parameters.items()}
    buffers = forward.buffers
    here = Remembering(forward.module, parameters, buffers, forward.checkpoint, forward.dtype)
    recorder = Recorder(here, reached.units, known.axes, size, sink)
    try:
        with recorder.listening():
            output = _require_per_sample(task.output(here, batch), size, "output")
        out_to_loss = _out_to_loss(here, task, batch)
        if known.reads_values:
            _require_same_alone(forward, task, batch, output.detach())
        recorder.differentiate(output)
    finally:
        recorder.release()
        here.forget()
    if reached.rest:
        vmap_gradients(forward, task, batch, reached.rest, sink)
    return output.detach().float(), out_to_loss


def choose_engine(module: torch.nn.Module, task: Task, names: Sequence[str]) -> tuple[str, str]:
    """Return the engine that ``gradients="auto"`` takes, and why."""
    if isinstance(task, TrakTask):
        return "vmap", "the task hands the model one sample at a time"
    reached = cover(module, names)
    if not reached.units:
        return "vmap", "no selected parameter belongs to a layer of its own"
    if reached.rest:
        return "hooks", f"{len(reached.rest)} of {len(names)} parameters by vmap: {reached.rest[0]}"
    return "hooks", "all selected parameters belong to layers"


def elements_at_once(engine: str, module: torch.nn.Module, sizes: Mapping[str, int]) -> int:
    """Return how many gradient elements of a sample an engine holds at once.

    Parameters
    ----------
    engine
        Name of the engine.
    module
        The model.
    sizes
        Number of elements of each selected parameter.
    """
    if engine != "hooks":
        return sum(sizes.values())
    reached = cover(module, tuple(sizes))
    held = [sizes[name] for name in whole_parameters(module, reached.units)]
    return max([*held, sum(sizes[name] for name in reached.rest)])


def require_same_as_loop(
    engine: str, forward: Forward, task: Task, batch: Batch, names: Sequence[str]
) -> None:
    """Check an engine on a few samples against one backward pass for each.

    Raises
    ------
    ValueError
        If a gradient differs by more than rounding can explain: the model mixes samples, or does
        something that the engine does not see.
    """
    found: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for name, into in ((engine, found), ("loop", expected)):
        ENGINES[name](forward, task, batch, names, partial(_keep, into))
    norms = torch.stack([g.double().norm(dim=1) for g in expected.values()]).norm(dim=0)
    tolerance = max(_tolerance(g.dtype, g.device.type) for g in expected.values())
    for name in names:
        error = (found[name].double() - expected[name].double()).norm(dim=1)
        if not bool((error <= tolerance * norms).all() | error.isnan().any()):
            raise ValueError(
                f"gradients={engine!r} gives {name!r} a gradient that differs from one backward "
                f"pass per sample by {float((error / norms).max()):.2g} of the gradient's norm; "
                "needed agreement up to rounding. Does the model mix samples of a batch, or use "
                "the parameter outside its layer? Type gradients='loop'."
            )


def _tolerance(dtype: torch.dtype, device: str) -> float:
    """Return the part of a gradient that rounding may explain."""
    coarse = torch.finfo(dtype).eps
    if torch.is_autocast_enabled(device):
        coarse = max(coarse, torch.finfo(torch.get_autocast_dtype(device)).eps)
    if device == "cuda":
        coarse = max(coarse, 2.0**-10)  # of TF32, which torch takes for convolutions unless told
    return max(1e-3, 8 * coarse)


def _keep(into: dict[str, Tensor], name: str, gradient: Tensor, first: int | None = None) -> None:
    into[name] = torch.cat([into[name], gradient], 1) if first else gradient.clone()


@dataclass(frozen=True)
class _Knowledge:
    """What is found out about a model before it is hooked.

    Parameters
    ----------
    coverage
        The units, and what they do not reach.
    axes
        Batch axes of all that goes in and out of the units: those that change with the batch size.
        (A length alone tells nothing, since a sequence may be as long as the batch.)
    reads_values
        Whether the code decides on values, so that samples of one batch may share a decision.
    """

    coverage: Coverage
    axes: Axes
    reads_values: bool


_known: WeakKeyDictionary[torch.nn.Module, dict[Any, _Knowledge]] = WeakKeyDictionary()


def _knowledge(forward: Forward, task: Task, batch: Batch, names: tuple[str, ...]) -> _Knowledge:
    """Run the first sample two and three times over, once per module; kept with it."""
    kept = _known.setdefault(forward.module, {})
    key = (type(task), names)
    if key not in kept:
        coverage = cover(forward.module, names)
        runs = (partial(task.output, forward, _repeated(batch, n)) for n in (2, 3))
        two, three = (recorded_shapes(run, forward.module, coverage.units) for run in runs)
        axes = {
            path: [_axes_of(*calls) for calls in zip(two[path], three[path], strict=True)]
            for path in two
        }
        reads_values = _reads_values(forward, task, _repeated(batch, 2))
        kept[key] = _Knowledge(coverage, axes, reads_values)
    return kept[key]


def _reads_values(forward: Forward, task: Task, batch: Batch) -> bool:
    """Tell whether the model cannot run on tensors that have no values."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            fake = Batch({name: mode.from_tensor(value) for name, value in batch.items()})
            task.output(forward, fake)
    except Exception:  # whatever else is in the way: then values are checked, which is safe
        return True
    return False


def _require_same_alone(forward: Forward, task: Task, batch: Batch, output: Tensor) -> None:
    """Check that every sample has the output that it has alone."""
    with torch.no_grad():
        alone = torch.cat(
            [
                task.output(forward, Batch({n: v[i : i + 1] for n, v in batch.items()}))
                for i in range(_size(batch))
            ]
        )
    tolerance = max(1e-3, 8 * torch.finfo(output.dtype).eps)
    if not torch.allclose(output, alone, rtol=tolerance, atol=tolerance, equal_nan=True):
        raise ValueError(
            "the model decides on values of its input, and decides otherwise for samples of a "
            "batch than for each alone; needed the same. Type gradients='loop'."
        )


def _axes_of(two: CallShapes, three: CallShapes) -> CallAxes:
    inputs, outputs = (
        [_differing(a, b) for a, b in zip(*sides, strict=True)]
        for sides in zip(two, three, strict=True)
    )
    return inputs, outputs


def _repeated(batch: Batch, n: int) -> Batch:
    return Batch({name: value[:1].expand(n, *value.shape[1:]) for name, value in batch.items()})


def _differing(left: Any, right: Any) -> int | None:
    if left is None or right is None or len(left) != len(right):
        return None
    return next((axis for axis, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)


ENGINES: dict[str, Engine] = {
    "hooks": hooks_gradients,
    "vmap": vmap_gradients,
    "loop": loop_gradients,
}


def _out_to_loss(forward: Forward, task: Task, batch: Batch) -> Tensor:
    with torch.no_grad():
        value = task.out_to_loss(forward, batch)
    return _require_per_sample(value, _size(batch), "out_to_loss").float()


def _require_per_sample(value: object, size: int, method: str) -> Tensor:
    if isinstance(value, Tensor) and value.shape == (size,):
        return value
    found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise ValueError(
        f"task.{method} returned {found} for a batch of {size}; needed shape ({size},), one scalar "
        "per sample. Reduce the other axes, or index [:, 0]."
    )


def _size(batch: Batch) -> int:
    return len(next(iter(batch.values())))
