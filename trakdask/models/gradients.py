"""Compute per-sample gradients of the model output with one of several engines.

An engine takes a batch and passes the gradient of each selected parameter, (batch, numel), to the
sink, ``sink(name, gradient)``, or, in order, slices of it, ``sink(name, gradient, first)``. The
gradient may be in a buffer that the next one overwrites, so a sink that needs it later must copy
it. By name, an engine takes ``rotations``: other coordinates in which the sink receives gradients.
It returns output and out_to_loss, (batch,) float32. Engines never compute gradients of other
parameters, and store nothing themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trakdask.models.hooks import GradientCollector, in_coordinates
from trakdask.models.independence import allowed_error, reads_values, require_same_alone, row_of
from trakdask.models.plans import hook_plan, with_copies
from trakdask.models.tasks import Batch, Forward, Task, TrakTask
from trakdask.models.tasks.logits import shape_of
from trakdask.models.tasks.protocol import SampleError, rejecting_later
from trakdask.tensors import Rotations, in_float64
from trakdask.torch_internals import math_attention, no_fast_path

SAFER = {
    "hooks": "gradients='vmap', or 'loop'",
    "vmap": "gradients='loop'",
    "tokens": "names of modules as parts=",
}
"""A remedy for each engine that is wrong, or fails."""

# Samples in a weighted sum: the errors of more would add up to a seemingly wrong gradient,
# and eight still show a gradient that belongs to another sample.
_MOST_IN_HALF_PRECISION = 8


@no_fast_path()
def loop_gradients(
    forward: Forward,
    task: Task,
    batch: Batch,
    names: Sequence[str],
    sink: Callable[..., None],
    rotations: Rotations | None = None,
) -> tuple[Tensor, Tensor]:
    """Differentiate sample by sample with ``backward()``; the reference for other engines.

    f and Q belong to each sample alone, too. Cost: one forward and backward pass per sample.
    Memory: batch × parameters.
    """
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    values, weights = [], torch.ones(1, device=next(iter(batch.values())).device)
    for i in range(batch.size):
        alone = row_of(batch, i)  # a batch of one, as models expect an axis of samples
        try:
            gradients, *f_and_q = summed_gradient(forward, task, alone, names, weights)
        except SampleError as err:  # which knows the sample as the first of its batch
            raise SampleError(err.text, i) from err.__cause__
        for name, gradient in gradients.items():
            rows[name].append(gradient.flatten())
        values.append(torch.cat(f_and_q))
    for name in names:
        sink(name, in_coordinates(torch.stack(rows.pop(name)), name, forward, rotations))
    f, q = torch.stack(values).float().unbind(1)
    return f, q


@no_fast_path()
@math_attention()
def vmap_gradients(
    forward: Forward,
    task: Task,
    batch: Batch,
    names: Sequence[str],
    sink: Callable[..., None],
    rotations: Rotations | None = None,
) -> tuple[Tensor, Tensor]:
    """Vectorize the gradient of one sample with ``torch.func``.

    Cost: a few batched forward and backward passes. Memory: batch × parameters. The model must not
    branch on values of its input, and must treat samples independently.
    """

    def output_of_one(selected: dict[str, Tensor], sample: dict[str, Tensor]) -> Tensor:
        alone = Batch({name: value[None] for name, value in sample.items()})
        output = task.output(forward.with_parameters(selected), alone)
        return require_per_sample(output, 1, "output")[0]

    selected = {name: forward.parameters[name] for name in names}
    one = torch.func.grad_and_value(output_of_one)
    every = torch.func.vmap(one, in_dims=(None, 0), randomness="different")
    gradients, outputs = every(selected, dict(batch))
    size = batch.size
    for name in names:
        gradient = gradients.pop(name).reshape(size, -1)
        sink(name, in_coordinates(gradient, name, forward, rotations))
    return outputs.float(), out_to_loss_of(forward, task, batch)


@no_fast_path()
def hooks_gradients(
    forward: Forward,
    task: Task,
    batch: Batch,
    names: Sequence[str],
    sink: Callable[..., None],
    rotations: Rotations | None = None,
    by_token: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute gradients layer by layer during one batched backward pass.

    The sink receives parameters in the order of the backward pass. Parameters that hooks cannot
    handle come last: where the model takes one copy of them for each sample, these have gradients
    in the same pass, and else :func:`vmap_gradients` runs. Cost: about one forward and one backward
    pass, or two.
    Memory: activations of the batch, and batch × the largest parameter (only 4 MB for linear and
    embedding layers). The model must treat samples independently.

    With ``by_token``, the sink receives what each token contributes, (batch * tokens, numel), all
    tokens of the first sequence first, whose sum is the gradient of the sequence. A sink of
    :class:`Products` receives products instead.

    Raises
    ------
    ValueError
        If a layer has no axis of tokens, and they are asked for.
    """
    if isinstance(task, TrakTask):
        raise ValueError(
            "expected a task that runs batches, got one that runs one sample at a time; try "
            "gradients='vmap', or td.tasks.CausalLM()"
        )
    # 1. Which layers to hook; parameters outside of these get a copy per sample, or wait for 6.
    layers, rest, by_sample = hook_plan(forward, task, batch, tuple(names))
    parameters = {name: tensor.detach() for name, tensor in forward.parameters.items()}
    once = with_copies(forward.with_parameters(parameters), by_sample, batch.size).caching()
    copies = {name: once.parameters[name].requires_grad_() for name in by_sample}
    # 2. One forward pass, in which hooks note the inputs of the layers.
    n_tokens = number_of_tokens(batch) if by_token else None
    collector = GradientCollector(once, layers, batch.size, sink, n_tokens, rotations)
    try:
        with collector.listening():  # f runs the model, and Q takes the same result
            output = require_per_sample(task.output(once, batch), batch.size, "output")
        out_to_loss = out_to_loss_of(once, task, batch)
        # 3. Where the model decides on values, what each layer saw of each sample is compared.
        if reads_values(forward, task, batch):
            # Each batch may take another branch, so the samples of every batch are compared.
            for row in range(batch.size):
                with collector.comparing(row):
                    values = output.detach(), out_to_loss, [row]
                    require_same_alone(forward, task, batch, *values)
        # 4. One backward pass: each layer's gradients go to the sink as soon as they are known.
        collector.differentiate(output)
        # 5. Copies have their gradients when the pass is over.
        for name, copy in copies.items():
            gradient = torch.zeros_like(copy) if copy.grad is None else copy.grad
            sink(name, in_coordinates(gradient.flatten(1), name, forward, rotations))
    finally:
        collector.release()
        once.forget()
    # 6. The rest, in a pass of its own, after the tensors of the first one are released.
    if rest:
        vmap_gradients(forward, task, batch, rest, sink, rotations)
    return output.detach().float(), out_to_loss


ENGINES: dict[str, Callable[..., Any]] = {
    "hooks": hooks_gradients,
    "vmap": vmap_gradients,
    "loop": loop_gradients,
}
"""The engines of gradients of whole samples, which users choose from."""


def engine_of(name: str) -> Callable[..., Any]:
    """Return one of the engines, or ``"tokens"``, the engine for gradients of single tokens."""
    return partial(hooks_gradients, by_token=True) if name == "tokens" else ENGINES[name]


def number_of_tokens(batch: Batch) -> int:
    """Return the number of tokens in the first input."""
    return int(next(iter(batch.values())).shape[1])


def out_to_loss_of(forward: Forward, task: Task, batch: Batch) -> Tensor:
    """Return Q of each sample, (batch,) float32."""
    # Not in torch.no_grad(), because models may differentiate themselves.
    with rejecting_later():
        value = task.out_to_loss(forward, batch)
    return require_per_sample(value, batch.size, "out_to_loss").detach().float()


def require_per_sample(value: object, size: int, method: str) -> Tensor:
    """Return a value of a task's method, which must be one number per sample."""
    if isinstance(value, Tensor) and value.shape == (size,):
        return value
    several = "a sum over the other axes, or, for several labels, td.tasks.MultiLabel()"
    is_one = isinstance(value, Tensor) and value.shape[:1] == (size,) and value.numel() == size
    raise ValueError(
        f"expected shape ({size},) from task.{method}, one number per sample for a batch of "
        f"{size}, got {shape_of(value)}; try {'.flatten()' if is_one else several}"
    )


# ---------------------------------------------------------------------------------------- checks
#
# Gradients are added up, each times a weight of its own, and compared with autograd's gradient of
# the weighted sum of f. An engine that hands a sample the gradient of another one, or overlooks a
# use of a parameter, gives another sum.


class WeightedSum:
    """A sink that adds up the gradients of samples, each times a weight, and passes them on.

    Parameters
    ----------
    weights
        Weights of consecutive samples of a batch.
    size
        Number of samples of the batch.
    first
        The first sample that has a weight.
    sink
        Receives the gradients, too.
    """

    def __init__(
        self, weights: Tensor, size: int, first: int = 0, sink: Callable[..., None] | None = None
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
    once = forward.with_parameters(selected).caching()
    with forward.reading.keeping():
        output = require_per_sample(task.output(once, batch), batch.size, "output")
        out_to_loss = out_to_loss_of(once, task, batch)
        once.forget()
        if not output.requires_grad:
            raise ValueError(
                "expected an output that is computed from the selected parameters, got one that "
                "has no gradient; try task.output and a model without torch.no_grad(), .detach(), "
                ".item() and numpy between parameters and output"
            )
        # Not torch.autograd.grad, with which torch.utils.checkpoint(use_reentrant=True) fails.
        (output * weights.to(output)).sum().backward()
    dense = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.to_dense()
        for name, leaf in selected.items()
    }
    return dense, output.detach(), out_to_loss


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
    """Compare weighted sums of an engine's gradients with autograd's.

    Parameters
    ----------
    engine
        Name of the engine.
    sums
        The sums of a :class:`WeightedSum`.
    expected
        The sum by autograd, by name of the parameter.
    least
        As in :func:`allowed_error`.

    Raises
    ------
    ValueError
        If a sum differs by more, relative to the norm of all parameters together. (A parameter
        alone may have almost no gradient, and then only rounding errors.)
    """
    flat = in_float64(torch.cat([gradient.flatten() for gradient in expected.values()]))
    errors = torch.cat([part for name in expected for part in sums[name]]).to(flat.device) - flat
    norm, error = flat.norm(), errors.norm()
    # With weights from a normal distribution, the sum is about as long as one gradient times the
    # root of their number, so rounding stays as small in the sum as in each of them.
    wrong = (error > allowed_error(expected.values(), least) * norm) & error.isfinite()
    if wrong:  # a gradient that is not finite fails by itself
        sizes = [gradient.numel() for gradient in expected.values()]
        of_parameters = torch.stack([part.norm() for part in errors.split(sizes)])
        name = list(expected)[int(of_parameters.argmax())]
        raise ValueError(
            f"gradients={engine!r} gives gradients that differ from one backward pass per sample "
            f"by {float(error / norm):.2g} of their norm, most in {name!r}: the model may reorder "
            f"or mix samples, or use a parameter outside its layer; try {SAFER[engine]}"
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
    weights = sample_weights(forward, batch.size)
    seen, alone = WeightedSum(weights, batch.size), WeightedSum(weights, batch.size)
    engine_of(engine)(forward, task, batch, names, seen)
    loop_gradients(forward, task, batch, names, alone)
    require_same_sum(engine, seen.sums, {name: total for name, (total,) in alone.sums.items()})
