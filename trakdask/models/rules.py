"""Compute per-sample gradients of single layers from their inputs and output gradients.

A rule takes the layer, its input x (batch, ...), the gradient delta of the model output with
respect to the layer's output (batch, ...), and the layer's buffers. It returns the gradient of one
parameter, (batch, numel), summed over positions inside a sample (tokens, pixels). The rules in
``SLICEABLE`` can also compute the gradient of only some rows of the weight, and those in
``WRITES_TO`` write it to a given tensor of the same dtype, if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trakdask.models.loading import State
from trakdask.models.reading import Reading
from trakdask.tensors import Scratch, turned

GradientRule = Callable[..., Tensor]
ALL_ROWS = slice(None)


_scratch = Scratch()  # of gradients: each is consumed before the next is computed
_PATCH_ELEMENTS = 1 << 21  # elements of the patches extracted at once: 8 MB


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
CHANNEL_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)

# Methods that a subclass of a layer may replace without changing what the layer computes.
_HARMLESS = {"reset_parameters", "extra_repr"}


def rules_of(module: Any) -> Mapping[str, GradientRule]:
    """Return the rules of a layer by parameter; none if no rules apply."""
    kind: Any = type(module)
    # Conv1D of transformers is a linear layer that stores its weight transposed.
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return _CONV1D
    layer = _layer_of(kind)
    # These embeddings divide gradients by counts, or change their weight in the forward pass.
    if layer is nn.Embedding and (module.scale_grad_by_freq or module.max_norm is not None):
        return {}
    return _RULES.get(layer, {})


def output_axis(module: nn.Module) -> int:
    """Return the axis of a layer's weight along which its outputs are.

    Examples
    --------
    >>> output_axis(nn.Linear(2, 3)), output_axis(nn.ConvTranspose2d(2, 3, 1))
    (0, 1)
    """
    return int(isinstance(module, TRANSPOSED) or rules_of(module) is _CONV1D)


@lru_cache(maxsize=1024)
def _layer_of(kind: Any) -> Any:
    """Return the layer of torch that a class is, or whose code it inherits unchanged, or None."""
    layer = next((base for base in kind.__mro__ if base in _RULES), None)
    if layer is None:
        return None
    below = kind.__mro__[: kind.__mro__.index(layer)]
    names = {name for base in below for name, value in vars(base).items() if callable(value)}
    replaced = {name for name in names & set(dir(layer)) if not name.startswith("__")}
    return layer if replaced <= _HARMLESS else None


def _positions(x: Tensor) -> Tensor:
    """Return (batch, positions, features)."""
    return x.reshape(len(x), -1, x.shape[-1])


def linear_weight(
    module: nn.Module,
    x: Tensor,
    delta: Tensor,
    buffers: State,
    rows: slice = ALL_ROWS,
    into: Tensor | None = None,
) -> Tensor:
    """Return δᵀx for some rows of a linear layer's weight, in ``into`` if it can be there."""
    delta, x = _positions(delta)[..., rows], _positions(x)
    shape = delta.shape[2], x.shape[2]
    if into is None or into.dtype != delta.dtype:
        out = _scratch.take("gradient", (len(delta), *shape), delta.dtype, delta.device)
    else:
        out = into.unflatten(1, shape)
    if delta.shape[1] == 1:
        return torch.mul(delta.mT, x, out=out).flatten(1)
    return torch.bmm(delta.mT, x, out=out).flatten(1)


def transposed_linear_weight(
    module: nn.Module, x: Tensor, delta: Tensor, buffers: State, *rows_and_into: Any
) -> Tensor:
    """Return xᵀδ, for a weight that is stored transposed."""
    return linear_weight(module, delta, x, buffers, *rows_and_into)


def last_bias(module: nn.Module, x: Tensor, delta: Tensor, buffers: State) -> Tensor:
    """Return δ, summed over positions: the rule of a bias that is added along the last axis."""
    return _positions(delta).sum(1)


def _channel_bias(module: nn.Module, x: Tensor, delta: Tensor, buffers: State) -> Tensor:
    return delta.reshape(*delta.shape[:2], -1).sum(2)


def _conv_weight(
    module: Any, x: Tensor, delta: Tensor, buffers: State, places: Tensor | None = None
) -> Tensor:
    """Multiply delta with patches of the input, per group; patches are (weights, positions).

    ``places`` rotates the places of a kernel.
    """
    n, groups = len(x), module.groups
    weights = math.prod(module.kernel_size) * x.shape[1] // groups
    delta = delta.reshape(n, groups, delta.shape[1] // groups, -1)
    shape = n, groups, delta.shape[2], weights
    out = _scratch.take("gradient", shape, delta.dtype, delta.device)
    step = max(1, _PATCH_ELEMENTS // (groups * weights * delta.shape[3]))
    for start in range(0, n, step):
        part = slice(start, start + step)
        view = _patches(module, x[part])
        patches = _scratch.take("patches", view.shape, x.dtype, x.device).copy_(view)
        if places is not None:
            patches = places.T @ patches.view(-1, len(places), delta.shape[3])
        patches = patches.view(-1, weights, delta.shape[3])
        torch.bmm(delta[part].flatten(0, 1), patches.mT, out=out[part].flatten(0, 1))
    return out.flatten(1)


def _patches(module: Any, x: Tensor) -> Tensor:
    """Return a view of the padded input, (batch, channels, kernel..., positions...)."""
    n_axes = len(module.kernel_size)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    if isinstance(module.padding, str):
        pairs = zip(module.kernel_size, module.dilation, strict=True)
        totals = [(n - 1) * step if module.padding == "same" else 0 for n, step in pairs]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(n, n) for n in module.padding]
    # ``functional.pad`` expects the last axis first.
    x = functional.pad(x, [n for pair in reversed(sides) for n in pair], mode)
    for axis in range(n_axes):
        reach = module.dilation[axis] * (module.kernel_size[axis] - 1) + 1
        x = x.unfold(2 + axis, reach, module.stride[axis])[..., :: module.dilation[axis]]
    return x.permute(0, 1, *range(2 + n_axes, 2 + 2 * n_axes), *range(2, 2 + n_axes))


def embedding_weight(
    module: nn.Embedding, x: Tensor, delta: Tensor, buffers: State, rows: slice = ALL_ROWS
) -> Tensor:
    """Return δ, added to the rows of the tokens that were looked up."""
    n, width = len(x), module.embedding_dim
    start, stop, _ = rows.indices(module.num_embeddings)
    n_rows, tokens = n * (stop - start), x.reshape(n, -1)
    used = (tokens >= start) & (tokens < stop)
    if module.padding_idx is not None:
        used &= tokens != module.padding_idx
    first = torch.arange(-start, n_rows - start, stop - start, device=x.device)[:, None]
    into, delta = torch.where(used, first + tokens, n_rows).flatten(), delta.reshape(-1, width)
    if x.device.type == "cpu":  # few tokens are in a slice; to look for them would wait for a GPU
        places = used.flatten().nonzero()[:, 0]
        into, delta = into[places], delta[places]
    # The last row takes what is not used. GPUs add floats in any order, so that the last bits of
    # tokens that come twice are not the same in each run.
    out = _scratch.take("gradient", (n_rows + 1, width), delta.dtype, delta.device).zero_()
    return out.index_add_(0, into, delta)[:n_rows].view(n, -1)


def _layer_norm_bias(module: Any, x: Tensor, delta: Tensor, buffers: State) -> Tensor:
    return delta.reshape(len(delta), -1, math.prod(module.normalized_shape)).sum(1)


def _layer_norm_weight(module: Any, x: Tensor, delta: Tensor, buffers: State) -> Tensor:
    return _layer_norm_bias(module, x, _normalized(module, x, buffers).mul_(delta), buffers)


def _channel_norm_weight(module: Any, x: Tensor, delta: Tensor, buffers: State) -> Tensor:
    return _channel_bias(module, x, _normalized(module, x, buffers).mul_(delta), buffers)


def _normalized(module: nn.Module, x: Tensor, buffers: State) -> Tensor:
    """Return x as the layer normalizes it, before its weight and bias."""
    with Reading(module).holding(buffers):
        parameters: dict[str, Any] = module._parameters
        for name, tensor in parameters.items():
            if tensor is not None:
                parameters[name] = x.new_full(tensor.shape, float(name == "weight"))
        normal: Tensor = module(x)
    return normal


def sides_turned(
    rule: GradientRule, module: Any, x: Tensor, delta: Tensor, blocks: Mapping[int, list[Tensor]]
) -> tuple[GradientRule, Tensor, Tensor]:
    """Return a rule and its arguments for a weight's gradient in other coordinates.

    Rotating both sides of a product costs far less than rotating the product, of all samples.

    Parameters
    ----------
    rule, module, x, delta
        One of ``TURNABLE``, and its arguments.
    blocks
        By the axis of the weight; one that is missing keeps its coordinates.
    """
    if rule is _conv_weight:
        x, delta = (
            _channels_turned(value, blocks[axis]) if axis in blocks else value
            for value, axis in ((x, 1), (delta, 0))
        )
        places = torch.block_diag(*blocks[2]).to(delta.dtype) if 2 in blocks else None
        return partial(_conv_weight, places=places), x, delta
    if rule is embedding_weight:
        if 0 in blocks:
            # A token is a row of the identity matrix: its coordinates are a row of the rotation.
            tokens, rule = x, transposed_linear_weight
            x = torch.block_diag(*blocks[0]).to(delta.dtype)[tokens]
            if module.padding_idx is not None:
                x[tokens == module.padding_idx] = 0
        return rule, x, turned(delta, blocks[1]) if 1 in blocks else delta
    axes = (1, 0) if rule is linear_weight else (0, 1)  # of the weight, of x and of delta
    x, delta = (
        turned(side, blocks[axis]) if axis in blocks else side
        for axis, side in zip(axes, (x, delta), strict=True)
    )
    return rule, x, delta


def _channels_turned(value: Tensor, blocks: list[Tensor]) -> Tensor:
    """Return (n, channel, ...) in other coordinates, channels first as convolutions want them."""
    parts = value.flatten(2).split([len(block) for block in blocks], 1)
    products = [b.T.to(value.dtype) @ part for part, b in zip(parts, blocks, strict=True)]
    return (torch.cat(products, 1) if len(products) > 1 else products[0]).view(value.shape)


_CONV1D: Mapping[str, GradientRule] = {"weight": transposed_linear_weight, "bias": last_bias}

_RULES: dict[Any, Mapping[str, GradientRule]] = {
    nn.Linear: {"weight": linear_weight, "bias": last_bias},
    nn.Embedding: {"weight": embedding_weight},
    nn.LayerNorm: {"weight": _layer_norm_weight, "bias": _layer_norm_bias},
    nn.RMSNorm: {"weight": _layer_norm_weight},
    **{kind: {"weight": _conv_weight, "bias": _channel_bias} for kind in CONVOLUTIONS},
    **{kind: {"weight": _channel_norm_weight, "bias": _channel_bias} for kind in CHANNEL_NORMS},
}

WRITES_TO: frozenset[GradientRule] = frozenset({linear_weight, transposed_linear_weight})

SLICEABLE: frozenset[GradientRule] = frozenset({*WRITES_TO, embedding_weight})

TURNABLE: frozenset[GradientRule] = frozenset({*SLICEABLE, _conv_weight})
"""Rules whose gradients are products of two sides that can be rotated first."""

BY_POSITION = frozenset({*SLICEABLE, last_bias, _layer_norm_weight, _layer_norm_bias})
"""Rules of layers that treat all positions alike, whatever the axes between batch and features."""
