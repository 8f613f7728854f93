"""Compute per-sample gradients of the model output with one of several engines.

An engine takes a batch and passes the gradient of each selected parameter, (batch, numel), to the
sink. The gradient may be in a buffer that the next one overwrites, so a sink that needs it later
must copy it. Engines never compute gradients of other parameters, and store nothing themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from trakdask.models.coverage import HookableLayers, hookable_layers
from trakdask.models.hooks import (
    Axes,
    CallAxes,
    CallShapes,
    GradientCollector,
    caching,
    recorded_shapes,
    whole_parameters,
)
from trakdask.models.independence import (
    once_per_task,
    reads_values,
    repeated,
    require_same_alone,
    row_of,
    tolerance,
)
from trakdask.models.products import Products, TokenProductCollector
from trakdask.models.tasks import Batch, Forward, Task, TrakTask
from trakdask.models.tokens import TokenGradientCollector, number_of_tokens
from trakdask.models.torch_settings import no_fast_path

__all__ = [
    "ENGINES",
    "Engine",
    "Sink",
    "WeightedSum",
    "choose_engine",
    "elements_at_once",
    "engine_of",
    "hooks_gradients",
    "loop_gradients",
    "require_same_as_loop",
    "require_same_sum",
    "sample_weights",
    "summed_gradient",
    "token_gradients",
    "vmap_gradients",
]


class Sink(Protocol):
    """A function that receives the gradients."""

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Receive a parameter's gradient, or, in order, a slice that starts at ``first``."""


class Engine(Protocol):
    """A way to compute per-sample gradients."""

    def __call__(
        self, forward: Forward, task: Task, batch: Batch, names: Sequence[str], sink: Sink
    ) -> tuple[Tensor, Tensor]:
        """Pass gradients to the sink; return output and out_to_loss, both (batch,) float32."""


@no_fast_path()
def loop_gradients(
    forward: Forward, task: Task, batch: Batch, names: Sequence[str], sink: Sink
) -> tuple[Tensor, Tensor]:
    """Differentiate sample by sample with ``torch.autograd.grad``; the reference for other engines.

    Q is computed for the whole batch, or sample by sample if the model branches on values of its
    input. Cost: one forward and backward pass per sample. Memory: batch × parameters.
    """
    selected = {name: forward.parameters[name].detach().requires_grad_() for name in names}
    here = forward.with_parameters(selected)
    size = _size(batch)
    gradients = {n: t.new_empty(size, t.numel(), requires_grad=False) for n, t in selected.items()}
    outputs = torch.empty(size)
    for i in range(size):
        output = _require_per_sample(task.output(here, row_of(batch, i)), 1, "output")
        of_sample = torch.autograd.grad(output[0], list(selected.values()), materialize_grads=True)
        for name, gradient in zip(names, of_sample, strict=True):
            gradients[name][i] = gradient.reshape(-1)
        outputs[i] = output.detach()[0]
    for name in names:
        sink(name, gradients.pop(name))
    if reads_values(forward, task, batch):  # samples of a batch might share a branch
        alone = [_out_to_loss(forward, task, row_of(batch, i)) for i in range(size)]
        return outputs, torch.cat(alone)
    return outputs, _out_to_loss(forward, task, batch)


@no_fast_path()
def vmap_gradients(
    forward: Forward, task: Task, batch: Batch, names: Sequence[str], sink: Sink
) -> tuple[Tensor, Tensor]:
    """Vectorize the gradient of one sample with ``torch.func``.

    Cost: a few batched forward and backward passes. Memory: batch × parameters. The model must not
    branch on values of its input, and must treat samples independently.
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
    """Compute gradients layer by layer during one batched backward pass.

    The sink receives parameters in the order of the backward pass. Parameters that hooks cannot
    handle come last, from :func:`vmap_gradients`. Cost: about one forward and one backward pass.
    Memory: activations of the batch, and batch × the largest parameter (only 4 MB for linear and
    embedding layers). The model must treat samples independently.
    """
    return _recorded_gradients(GradientCollector, forward, task, batch, names, sink)


def token_gradients(
    forward: Forward, task: Task, batch: Batch, names: Sequence[str], sink: Sink
) -> tuple[Tensor, Tensor]:
    """Compute what each token contributes to the gradients, as :func:`hooks_gradients` does.

    The sink receives (batch * tokens, numel), all tokens of the first sequence first. Their sum is
    the gradient of the sequence. A sink of :class:`Products` receives products instead.

    Raises
    ------
    ValueError
        If a layer has no axis of tokens.
    """
    kind = TokenProductCollector if isinstance(sink, Products) else TokenGradientCollector
    collector = partial(kind, n_tokens=number_of_tokens(batch))
    return _recorded_gradients(collector, forward, task, batch, names, sink)


@no_fast_path()
def _recorded_gradients(
    make: Callable[..., GradientCollector],
    forward: Forward,
    task: Task,
    batch: Batch,
    names: Sequence[str],
    sink: Sink,
) -> tuple[Tensor, Tensor]:
    if isinstance(task, TrakTask):
        raise ValueError(
            "expected a task that runs batches, as gradients='hooks' needs, got one that runs one "
            "sample at a time; try gradients='vmap'"
        )
    size = _size(batch)
    plan = _hook_plan(forward, task, batch, tuple(names))
    hookable = plan.hookable
    parameters = {name: tensor.detach() for name, tensor in forward.parameters.items()}
    once = caching(forward.with_parameters(parameters))
    collector = make(once, hookable.layers, plan.axes, size, sink)
    try:
        with collector.listening():
            output = _require_per_sample(task.output(once, batch), size, "output")
        out_to_loss = _out_to_loss(once, task, batch)
        if reads_values(forward, task, batch):
            # Each batch may take another branch, so the samples of every batch are compared.
            for row in range(size):
                with collector.comparing(row):
                    values = output.detach(), out_to_loss, [row]
                    require_same_alone(forward, task, batch, *values)
        collector.differentiate(output)
    finally:
        collector.release()
        once.forget()
    if hookable.rest:
        vmap_gradients(forward, task, batch, hookable.rest, sink)
    return output.detach().float(), out_to_loss


def choose_engine(module: torch.nn.Module, task: Task, names: Sequence[str]) -> tuple[str, str]:
    """Return the engine that ``gradients="auto"`` chooses, and the reason."""
    if isinstance(task, TrakTask):
        return "vmap", "the task hands the model one sample at a time"
    hookable = hookable_layers(module, names)
    if not hookable.layers:
        return "vmap", "no selected parameter belongs to a layer of its own"
    if hookable.rest:
        return (
            "hooks",
            f"{len(hookable.rest)} of {len(names)} parameters by vmap: {hookable.rest[0]}",
        )
    return "hooks", "all selected parameters belong to layers"


def elements_at_once(engine: str, module: torch.nn.Module, sizes: Mapping[str, int]) -> int:
    """Return how many gradient elements of a sample an engine holds in memory at once.

    Parameters
    ----------
    engine
        Name of the engine.
    module
        The model.
    sizes
        Number of elements of each selected parameter.
    """
    if engine not in ("hooks", "tokens"):
        return sum(sizes.values())
    hookable = hookable_layers(module, tuple(sizes))
    held = [sizes[name] for name in whole_parameters(module, hookable.layers)]
    return max([*held, sum(sizes[name] for name in hookable.rest)])


class WeightedSum:
    """A sink that adds up the gradients of samples, each times a weight, and passes them on.

    Parameters
    ----------
    weights
        Of consecutive samples of a batch.
    size
        Number of samples of the batch.
    first
        The first sample that has a weight.
    sink
        Receives the gradients, too.
    """

    def __init__(
        self, weights: Tensor, size: int, first: int = 0, sink: Sink | None = None
    ) -> None:
        self.sums: dict[str, list[Tensor]] = defaultdict(list)
        self.buffer_for = getattr(sink, "buffer_for", None)
        self._weights, self._size, self._first, self._sink = weights, size, first, sink

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Add the gradients of a parameter, (rows, n), or a slice of them."""
        k = len(gradient) // self._size  # rows of a sample: its tokens, or 1
        rows = gradient[self._first * k :][: len(self._weights) * k]
        weights = self._weights.to(rows.device).repeat_interleave(k)
        # A gradient of zero is one number expanded to all rows, which a product would copy.
        is_expanded = rows.stride(0) == 0
        total = rows[0] * weights.sum() if is_expanded else weights @ rows.to(weights.dtype)
        self.sums[name].append(total)
        if self._sink is not None:
            self._sink(name, gradient, first)  # last, because a sink may overwrite the gradient


def summed_gradient(
    forward: Forward, task: Task, batch: Batch, names: Sequence[str], weights: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return autograd's gradient of the weighted sum of f over a batch, f and Q, by one pass."""
    selected = {name: forward.parameters[name].detach().requires_grad_() for name in names}
    once = caching(forward.with_parameters(selected))
    output = _require_per_sample(task.output(once, batch), _size(batch), "output")
    out_to_loss = _out_to_loss(once, task, batch)
    once.forget()
    total = (output * weights.to(output)).sum()
    gradients = torch.autograd.grad(total, list(selected.values()), materialize_grads=True)
    return dict(zip(names, gradients, strict=True)), output.detach(), out_to_loss


def sample_weights(forward: Forward, size: int) -> Tensor:
    """Return a different weight for each sample, so that a sum shows which gradient is whose.

    A sum over many samples in half precision would lose the digits that are compared, so there the
    weights of most of them are zero.
    """
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(size, generator=generator, dtype=torch.float64)
    if any(t.is_floating_point() and t.dtype.itemsize < 4 for t in forward.parameters.values()):
        weights[_MOST_IN_HALF_PRECISION:] = 0
    is_double = all(t.dtype == torch.float64 for t in forward.parameters.values())
    return weights if is_double else weights.float()


def require_same_sum(
    engine: str,
    sums: Mapping[str, Sequence[Tensor]],
    expected: Mapping[str, Tensor],
    least: float = 0.0,
) -> None:
    """Compare weighted sums of an engine's gradients with those of autograd.

    An engine that hands a sample the gradient of another one, or overlooks a use of a parameter,
    gives another sum, because every sample has a weight of its own.

    Parameters
    ----------
    engine
        Name of the engine.
    sums
        Of :class:`WeightedSum`.
    expected
        Of :func:`summed_gradient`.
    least
        Relative error that is allowed at least, if the sums are of a batch and of samples alone,
        between which rounding errors may grow. By default that of :func:`tolerance`.

    Raises
    ------
    ValueError
        If a sum differs by more, relative to the norm of all parameters together. (A parameter
        alone may have almost no gradient, and then only rounding errors.)
    """
    flat = torch.cat([gradient.flatten() for gradient in expected.values()]).double()
    errors = torch.cat([part for name in expected for part in sums[name]]) - flat
    norm, error = flat.norm(), errors.norm()
    # With weights drawn from a normal distribution, the norm of the sum is about that of a sample's
    # gradient times the root of their number, so rounding stays as small in the sum as in each.
    kinds = {(g.dtype, g.device.type) for g in expected.values()}
    allowed = max(tolerance(*kind) for kind in kinds)
    if error > (max(least, 4 * allowed) if least else allowed) * norm:
        sizes = [gradient.numel() for gradient in expected.values()]
        of_parameters = torch.stack([part.norm() for part in errors.split(sizes)])
        name = list(expected)[int(of_parameters.argmax())]
        raise ValueError(
            f"gradients={engine!r} gives gradients that differ from those of one backward pass per "
            f"sample by {float(error / norm):.2g} of their norm, most in {name!r}: the model may "
            "reorder or mix the samples of a batch, or use a parameter outside its layer; try "
            f"gradients={_SAFER[engine]}"
        )


def require_same_as_loop(
    engine: str, forward: Forward, task: Task, batch: Batch, names: Sequence[str]
) -> None:
    """Check an engine on a few samples against one backward pass for each.

    Raises
    ------
    ValueError
        If gradients differ by more than rounding error.
    """
    size = _size(batch)
    weights = sample_weights(forward, size)
    seen = WeightedSum(weights, size)
    engine_of(engine)(forward, task, batch, names, seen)
    alone = [
        summed_gradient(forward, task, row_of(batch, i), names, weights[i])[0] for i in range(size)
    ]
    expected = {name: torch.stack([of_one[name] for of_one in alone]).sum(0) for name in names}
    require_same_sum(engine, seen.sums, expected)


_SAFER = {"hooks": "'vmap', or 'loop'", "vmap": "'loop'", "tokens": "'loop'"}
"""Engines to try where another one is wrong."""


_MOST_IN_HALF_PRECISION = 8


@dataclass(frozen=True)
class _HookPlan:
    """Where the gradients of a model come from, determined before it is hooked.

    Parameters
    ----------
    hookable
        The layers, and the parameters that hooks cannot handle.
    axes
        Batch axes of all inputs and outputs of the layers: the axes whose length changes with the
        batch size. (A length alone is not enough, since a sequence may be as long as the batch.)
    """

    hookable: HookableLayers
    axes: Axes


def _hook_plan(forward: Forward, task: Task, batch: Batch, names: tuple[str, ...]) -> _HookPlan:
    """Run the first sample repeated two and three times; the plan is cached."""

    def find() -> _HookPlan:
        hookable = hookable_layers(forward.module, names)
        # Not one and two samples: models may squeeze the axis of a single one.
        runs = (partial(task.output, forward, repeated(batch, n)) for n in (2, 3))
        two, three = (recorded_shapes(run, forward.module, hookable.layers) for run in runs)
        _require_equal_calls(two, three)
        axes = {
            path: [_axes_of(*calls) for calls in zip(two[path], three[path], strict=True)]
            for path in two
        }
        return _HookPlan(hookable, axes)

    return once_per_task("hook plan", forward, task, batch, names, find)


def _require_equal_calls(two: Mapping[str, list[Any]], three: Mapping[str, list[Any]]) -> None:
    for path, calls in two.items():
        if len(calls) != len(three[path]):
            raise ValueError(
                f"expected as many calls of layer {path!r} for a batch of any size, as "
                f"gradients='hooks' needs, got {len(calls)} for two samples and "
                f"{len(three[path])} for three (does the model loop over samples?); try "
                "gradients='loop'"
            )


def _axes_of(two: CallShapes, three: CallShapes) -> CallAxes:
    inputs, outputs = (
        [_differing(a, b) for a, b in zip(*sides, strict=True)]
        for sides in zip(two, three, strict=True)
    )
    return inputs, outputs


def _differing(left: Any, right: Any) -> int | None:
    if left is None or right is None or len(left) != len(right):
        return None
    return next((axis for axis, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)


ENGINES: dict[str, Engine] = {
    "hooks": hooks_gradients,
    "vmap": vmap_gradients,
    "loop": loop_gradients,
}
"""The engines of gradients of whole samples, which users choose from."""


def engine_of(name: str) -> Engine:
    """Return one of the engines, or ``"tokens"``, the one whose gradients are those of tokens."""
    return token_gradients if name == "tokens" else ENGINES[name]


def _out_to_loss(forward: Forward, task: Task, batch: Batch) -> Tensor:
    with torch.no_grad():
        value = task.out_to_loss(forward, batch)
    return _require_per_sample(value, _size(batch), "out_to_loss").float()


def _require_per_sample(value: object, size: int, method: str) -> Tensor:
    if isinstance(value, Tensor) and value.shape == (size,):
        return value
    returned = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise ValueError(
        f"expected shape ({size},) from task.{method}, one number per sample for a batch of "
        f"{size}, got {returned}; try a sum over the other axes, or [:, 0]"
    )


def _size(batch: Batch) -> int:
    return len(next(iter(batch.values())))
