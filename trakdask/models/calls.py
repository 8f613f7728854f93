"""Recorded calls of layers, and their gradients by autograd, for layers without a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trakdask.models.batch_axes import split_axis
from trakdask.models.layers import HookedLayer
from trakdask.torch_internals import tree_flatten, tree_leaves, tree_unflatten, version_of


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
    buffers: Mapping[str, Tensor]
    in_axes: list[int | None]
    out_axes: list[int | None]
    by_token: bool = False
    """Whether its gradients are divided among the tokens."""

    def input(self) -> Tensor:
        """Return the first input, which must still have the values that the layer used."""
        leaf: Tensor = first_leaf(*self.inputs)
        if version_of(leaf) != self.version:
            raise RuntimeError(
                f"expected the input of layer {self.layer.path!r} as it was used, got one that was "
                "changed in place; try x = x + y instead of x += y, or gradients='vmap'"
            )
        return leaf


def local_gradients(
    call: Call,
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
        returned = torch.func.functional_call(call.module, {**tensors, **selected}, args, kwargs)
        outputs = [y for y in tree_leaves(returned) if is_floating(y)]
        terms = [(outputs[i] * weight).sum() for i, weight in zip(used, weights, strict=True)]
        total: Tensor = torch.stack(terms).sum()
        return total

    selected = {inside: tensors[inside] for inside in call.layer.selected}
    one = torch.func.grad(weighted_output)
    try:
        with sdpa_kernel(SDPBackend.MATH):  # the only backend that vmap supports
            every = torch.func.vmap(one, in_dims=(None, call.in_axes, out_axes))
            gradients: dict[str, Tensor] = every(selected, inputs, weights)
            return gradients
    except RuntimeError:  # some operators, such as RNNs', cannot be vectorized
        # Slower, but of this layer alone; errors of the layer itself are raised again here.
        rows = [
            one(selected, _sample(inputs, call.in_axes, i), _sample(weights, out_axes, i))
            for i in range(n_samples)
        ]
        return {name: torch.stack([row[name] for row in rows]) for name in selected}


def _sample(values: Sequence[Any], axes: Sequence[int | None], i: int) -> list[Any]:
    return [x if a is None else x.select(a, i) for x, a in zip(values, axes, strict=True)]
