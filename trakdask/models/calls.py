"""Calls of layers by sample, and their gradients by autograd, for layers without a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trakdask.models.layers import HookedLayer
from trakdask.models.loading import State
from trakdask.models.reading import Reading
from trakdask.tensors import in_float64
from trakdask.torch_internals import (
    math_attention,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    version_of,
)

# Relative error that no reordering stays below: other rows are as far away as they are long.
# Rounding errors are far below, but can grow from layer to layer, and in half precision a layer's
# input is known to three digits.
_ROUGHLY = 0.05


def is_by_token(value: Tensor, axis: int | None, n_samples: int, n_tokens: int) -> bool:
    """Return whether a tensor that a layer took or returned has a value for each token."""
    return by_sample(value, axis, n_samples).shape[:2] == (n_samples, n_tokens)


def by_sample(value: Tensor, axis: int | None, n_samples: int) -> Tensor:
    """Return a tensor of a call, (samples, ...); one that all samples share is expanded."""
    if axis is not None:
        return batch_first(value, axis, n_samples)
    # A first axis of length 1 stands for the samples already, as in class tokens and positions.
    alone = value if value.shape[:1] == (1,) else value[None]
    return alone.expand(n_samples, *alone.shape[1:])


def batch_first(value: Tensor, axis: int, n_samples: int) -> Tensor:
    """Return a tensor with one entry per sample along its first axis.

    Models flatten batch and positions into one axis, for example in front of experts.

    Examples
    --------
    >>> batch_first(torch.zeros(6, 4), 0, 2).shape, batch_first(torch.zeros(4, 2), 1, 2).shape
    (torch.Size([2, 3, 4]), torch.Size([2, 4]))
    """
    if value.shape[axis] != n_samples:
        value = split_axis(value, axis, n_samples)
    return value.movedim(axis, 0) if axis else value


def split_axis(value: Tensor, axis: int, n_samples: int) -> Tensor:
    """Split the batch axis into two: the samples, and the rows of each sample, mostly one."""
    if value.shape[axis] % n_samples:
        raise ValueError(
            f"expected as many rows of a layer's input or output for every sample, got "
            f"{value.shape[axis]} for {n_samples} samples; try gradients='vmap', or 'loop'"
        )
    # The rows of a sample are taken to be neighbours, as flatten(0, 1) makes them. A model that
    # interleaves samples gets wrong gradients here, which the comparison with autograd finds.
    return value.unflatten(axis, (n_samples, -1))


def first_leaf(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the first of the inputs of a module, or None; mostly without torch's slow search."""
    if args and isinstance(args[0], Tensor):
        return args[0]
    return next(iter(tree_leaves((args, kwargs))), None)


def is_floating(value: object) -> bool:
    """Return whether a value is a tensor that can have a gradient."""
    return isinstance(value, Tensor) and value.is_floating_point()


@dataclass(frozen=True)
class Call:
    """One recorded call of a layer: its inputs, buffers and batch axes."""

    layer: HookedLayer
    module: nn.Module
    inputs: Any  # (args, kwargs)
    version: int
    buffers: State
    in_axes: list[int | None]
    out_axes: list[int | None]
    by_token: bool = False
    """Whether its gradients are divided among the tokens."""

    def input(self) -> Tensor:
        """Return the first input, which must still have the values that the layer used."""
        leaf: Tensor = first_leaf(*self.inputs)
        if version_of(leaf) != self.version:
            raise ValueError(
                f"expected the input of layer {self.layer.path!r} as it was used, got one that was "
                "changed in place; try x = x + y instead of x += y, or gradients='vmap'"
            )
        return leaf

    def has_row(self, row: int, alone: Any, n_samples: int) -> bool:
        """Return whether a row of the first input is the first input of the sample alone."""
        axis = self.in_axes[0]
        if axis is None:
            return True
        in_batch = batch_first(self.input(), axis, n_samples)[row].detach()
        alone = batch_first(alone, axis, 1)[0]
        if alone.shape != in_batch.shape:
            return False
        alone = in_float64(alone)
        error = (alone - in_float64(in_batch)).norm()
        return bool(error <= _ROUGHLY * alone.norm())


def local_gradients(
    call: Call,
    read: Reading,
    tensors: Mapping[str, Tensor],
    deltas: Sequence[Tensor | None],
    axes: Sequence[int],
    n_samples: int,
) -> dict[str, Tensor]:
    """Differentiate one module sample by sample, for modules of any kind.

    Parameters
    ----------
    call
        The recorded call of the module.
    read
        What was read of the module.
    tensors
        The parameters and buffers of the module by name.
    deltas, axes
        The gradient of the model output with respect to each tensor that the module returned (None
        for a tensor without effect on the output), and the batch axes of these gradients.
    n_samples
        Batch size.

    Returns
    -------
    The gradient of each selected parameter, (batch, *shape).
    """
    used = {i: delta for i, delta in enumerate(deltas) if delta is not None}
    out_axes = [axes[i] for i in used]
    leaves, spec = tree_flatten(call.inputs)
    # A sample that is taken out along an axis that was split keeps this axis, as the module needs.
    inputs = [
        leaf if axis is None else split_axis(leaf, axis, n_samples)
        for leaf, axis in zip(leaves, call.in_axes, strict=True)
    ]
    weights = [split_axis(delta, axes[i], n_samples) for i, delta in used.items()]

    def weighted_output(
        selected: Mapping[str, Tensor], inputs: list[Any], weights: list[Tensor]
    ) -> Tensor:
        args, kwargs = tree_unflatten(inputs, spec)
        returned = read.call(call.module, {**tensors, **selected}, args, kwargs)
        # Numbered as the deltas are: the collector taps the floating-point tensors in this order.
        outputs = [y for y in tree_leaves(returned) if is_floating(y)]
        # Its gradient is deltaᵀ · ∂output/∂parameter, as in a backward pass that arrives with
        # delta.
        terms = [(outputs[i] * weight).sum() for i, weight in zip(used, weights, strict=True)]
        return torch.stack(terms).sum()

    selected = {inside: tensors[inside] for inside in call.layer.selected}
    one = torch.func.grad(weighted_output)
    try:
        with math_attention():
            every = torch.func.vmap(one, in_dims=(None, call.in_axes, out_axes))
            return every(selected, inputs, weights)
    except RuntimeError:  # some operators, such as RNNs', cannot be vectorized
        # Slower, but of this layer alone; errors of the layer itself are raised again here.
        rows = [
            one(selected, _sample(inputs, call.in_axes, i), _sample(weights, out_axes, i))
            for i in range(n_samples)
        ]
        return {name: torch.stack([row[name] for row in rows]) for name in selected}


def _sample(values: Sequence[Any], axes: Sequence[int | None], i: int) -> list[Any]:
    return [x if a is None else x.select(a, i) for x, a in zip(values, axes, strict=True)]
