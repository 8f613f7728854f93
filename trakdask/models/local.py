"""Compute per-sample gradients of a module without rules by differentiating its recorded call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from trakdask.models.coverage import Layer

__all__ = ["Call", "first_leaf", "is_floating", "local_gradients", "unfolded"]


def first_leaf(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the first of the inputs of a module, or None; mostly without torch's slow search."""
    if args and isinstance(args[0], Tensor):
        return args[0]
    return next(iter(pytree.tree_leaves((args, kwargs))), None)


@dataclass(frozen=True)
class Call:
    """One recorded call of a layer: its inputs, buffers and batch axes."""

    layer: Layer
    module: nn.Module
    inputs: Any  # (args, kwargs)
    version: int
    buffers: Mapping[str, Tensor | None]
    in_axes: list[int | None]
    out_axes: list[int | None]

    def input(self, n_samples: int) -> Tensor:
        """Return the first input, with the batch axis first, or as it is if it has none."""
        leaf: Tensor = first_leaf(*self.inputs)
        axis = self.in_axes[0]
        if leaf._version != self.version:
            raise RuntimeError(
                f"expected the input of layer {self.layer.path!r} as the layer used it, got one "
                "that was changed in place afterwards; try x = x + y instead of x += y, or "
                "gradients='vmap'"
            )
        return leaf if axis is None else unfolded(leaf, axis, n_samples).movedim(axis, 0)


def local_gradients(
    call: Call,
    tensors: Mapping[str, Tensor],
    deltas: Sequence[Tensor | None],
    axes: Sequence[int | None],
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
    used = [i for i, delta in enumerate(deltas) if delta is not None]
    out_axes = [axes[i] for i in used]
    leaves, spec = pytree.tree_flatten(call.inputs)
    leaves, kept_in = _unfolded(leaves, call.in_axes, n_samples)
    known, kept_out = _unfolded([deltas[i] for i in used], out_axes, n_samples)

    def weighted_output(
        selected: Mapping[str, Tensor], inputs: list[Any], deltas: list[Tensor]
    ) -> Tensor:
        args, kwargs = pytree.tree_unflatten(_batched(inputs, kept_in), spec)
        returned = torch.func.functional_call(call.module, {**tensors, **selected}, args, kwargs)
        outputs = [y for y in pytree.tree_leaves(returned) if is_floating(y)]
        weights = _batched(deltas, kept_out)
        terms = [(outputs[i] * w).sum() for i, w in zip(used, weights, strict=True)]
        total: Tensor = torch.stack(terms).sum()
        return total

    selected = {inside: tensors[inside] for inside in call.layer.selected}
    in_dims = (None, call.in_axes, out_axes)
    every = torch.func.vmap(torch.func.grad(weighted_output), in_dims=in_dims)
    try:
        with sdpa_kernel(SDPBackend.MATH):  # the only backend that vmap supports
            gradients: dict[str, Tensor] = every(selected, leaves, known)
            return gradients
    except RuntimeError:  # some operators, such as those of RNNs, cannot be vectorized
        return _looped(
            weighted_output, selected, (leaves, call.in_axes), (known, out_axes), n_samples
        )


def unfolded(value: Tensor, axis: int, n_samples: int) -> Tensor:
    """Return a tensor with one entry per sample along its batch axis, and all others behind it.

    Models flatten batch and positions into one axis, for example in front of experts.

    Examples
    --------
    >>> unfolded(torch.zeros(6, 4), 0, 2).shape, unfolded(torch.zeros(2, 4), 0, 2).shape
    (torch.Size([2, 3, 4]), torch.Size([2, 4]))
    """
    length = value.shape[axis]
    if length % n_samples:
        raise RuntimeError(
            f"expected as many rows of a layer's input or output for every sample, got {length} "
            f"rows for {n_samples} samples; try gradients='loop'"
        )
    return value if length == n_samples else value.unflatten(axis, (n_samples, -1))


def _unfolded(
    values: Sequence[Any], axes: Sequence[int | None], n_samples: int
) -> tuple[list[Any], list[int | None]]:
    """Unfold the batch axes; also return at which axis the model needs a single sample's own."""
    pairs = list(zip(values, axes, strict=True))
    found = [x if a is None else unfolded(x, a, n_samples) for x, a in pairs]
    kept = [a if new is old else None for new, (old, a) in zip(found, pairs, strict=True)]
    return found, kept


def _looped(
    weighted_output: Callable[..., Tensor],
    selected: Mapping[str, Tensor],
    inputs: tuple[list[Any], list[int | None]],
    deltas: tuple[list[Tensor], list[int | None]],
    n_samples: int,
) -> dict[str, Tensor]:
    rows = []
    with torch.enable_grad():
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in selected.items()}
        for i in range(n_samples):
            total = weighted_output(leaves, _sample(*inputs, i), _sample(*deltas, i))
            rows.append(torch.autograd.grad(total, list(leaves.values()), materialize_grads=True))
    stacked = (torch.stack(column) for column in zip(*rows, strict=True))
    return dict(zip(leaves, stacked, strict=True))


def _batched(values: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
    """Restore the batch axis of single samples."""
    return [x if a is None else x.unsqueeze(a) for x, a in zip(values, axes, strict=True)]


def _sample(values: Sequence[Any], axes: Sequence[int | None], i: int) -> list[Any]:
    return [x if a is None else x.select(a, i) for x, a in zip(values, axes, strict=True)]


def is_floating(value: object) -> bool:
    """Return whether a value is a tensor that can have a gradient."""
    return isinstance(value, Tensor) and value.is_floating_point()
