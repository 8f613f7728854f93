"""Let hooks see the projections of ``nn.MultiheadAttention``, which are no modules.

A projection is a linear layer, so that the gradient of its weight is a product of its input and
the gradient of its output. But torch computes projections in a function, where no hook is
called. So while hooks are needed, the module runs the same steps in the code below.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trakdask.models.rules import GradientRule, last_bias, linear_weight

_SEPARATE = ("q_proj", "k_proj", "v_proj")
_RULES: dict[str, dict[str, GradientRule]] = {
    "in_proj": {"in_proj_weight": linear_weight, "in_proj_bias": last_bias},
    **{name: {f"{name}_weight": linear_weight} for name in _SEPARATE},
    **{name: {name: last_bias} for name in ("bias_k", "bias_v")},
    "out_proj": {"out_proj.weight": linear_weight, "out_proj.bias": last_bias},
}


def projections(module: nn.Module) -> Mapping[str, Mapping[str, GradientRule]]:
    """Return the rules of an attention's parameters, by the projection that they belong to.

    Nothing for other modules, and for an attention whose code or weights have been replaced.
    """
    # By its function and not by its class: a subclass that inherits the function is known, too, and
    # one that overrides it may compute something else.
    is_torchs = getattr(module.forward, "__func__", None) is nn.MultiheadAttention.forward
    known = {name for of_projection in _RULES.values() for name in of_projection}
    return _RULES if is_torchs and known.issuperset(dict(module.named_parameters())) else {}


@contextmanager
def visible(module: nn.Module, hooks: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Call a hook at each projection, as if it were a module, while the ``with`` body runs."""
    # An attribute of the instance hides the method of the class, so no other attention is affected.
    module.forward = partial(_attend, module, hooks)
    try:
        yield
    finally:
        del module.forward


def _attend(
    module: Any,
    hooks: Mapping[str, Callable[..., Any]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,  # a hint, beside the mask itself
) -> tuple[Tensor, Tensor | None]:
    """Return the same as the module itself."""

    def seen(projection: str, x: Tensor, y: Tensor) -> Tensor:
        hook = hooks.get(projection)
        changed: Tensor | None = None if hook is None else hook(module, (x,), {}, y)
        return y if changed is None else changed

    def in_layout(x: Tensor) -> Tensor:
        """Change between the layout of the caller and (batch, length, width); its own inverse."""
        return x if module.batch_first or not is_batched else x.transpose(0, 1)

    # 1. One layout for all callers: (batch, length, width).
    is_batched = query.ndim == 3
    inputs = [in_layout(x if is_batched else x[None]) for x in (query, key, value)]
    if key_padding_mask is not None and not is_batched:
        key_padding_mask = key_padding_mask[None]
    # 2. As many projections as torch computes: one where all three inputs are the same tensor.
    # The caller's tensors are compared: those in one layout are new objects, even of one tensor.
    if module._qkv_same_embed_dim and key is value:
        spans = [(0, 3)] if query is key else [(0, 1), (1, 3)]
    else:
        spans = [(0, 1), (1, 2), (2, 3)]
    made = (_in_projection(module, seen, inputs[span[0]], *span) for span in spans)
    q, k, v = itertools.chain.from_iterable(made)
    # 3. Keys and values that the module adds to those of the caller.
    if module.bias_k is not None:
        of_samples = (len(k), -1, -1)
        k = torch.cat([k, seen("bias_k", inputs[1], module.bias_k.expand(of_samples))], 1)
        v = torch.cat([v, seen("bias_v", inputs[2], module.bias_v.expand(of_samples))], 1)
    if module.add_zero_attn:
        k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
    n_added = k.shape[1] - inputs[1].shape[1]
    # 4. Each head attends. The fused function gives no weights, so they take products of their own.
    q, k, v = (x.unflatten(2, (module.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    mask = _mask(q, attn_mask, key_padding_mask, n_added)
    weights = None
    if need_weights:
        # No dropout here or below: models are in evaluation mode.
        products = (q * q.shape[-1] ** -0.5) @ k.mT
        weights = (products if mask is None else products + mask).softmax(-1)
        mixed = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
        weights = weights if is_batched else weights[0]
    else:
        mixed = functional.scaled_dot_product_attention(q, k, v, mask)
    # 5. The last projection, and the layout of the caller.
    mixed = mixed.transpose(1, 2).flatten(2)
    out = functional.linear(mixed, module.out_proj.weight, module.out_proj.bias)
    out = seen("out_proj", mixed, out)
    return in_layout(out) if is_batched else out[0], weights


def _in_projection(
    module: Any, seen: Callable[..., Tensor], x: Tensor, start: int, stop: int
) -> Sequence[Tensor]:
    """Return as many of queries, keys and values as are made from x, by one product."""
    width = module.embed_dim
    rows, bias = slice(start * width, stop * width), module.in_proj_bias
    bias = None if bias is None else bias[rows]
    if module._qkv_same_embed_dim:
        y = functional.linear(x, module.in_proj_weight[rows], bias)
    else:
        # Weights of different widths are three parameters, and layers of their own. The bias is
        # one.
        name = _SEPARATE[start]
        y = seen(name, x, functional.linear(x, getattr(module, f"{name}_weight"), bias))
    # The rows of the whole matrix are one layer. Rows that are not used here get the gradient 0.
    if stop - start < 3:
        y = functional.pad(y, (rows.start, 3 * width - rows.stop))
    return seen("in_proj", x, y)[..., rows].chunk(stop - start, -1)


def _mask(
    q: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, n_added: int
) -> Tensor | None:
    """Return the mask to add to the products of queries and keys; 0 for keys that were added."""
    # Both as numbers to add, since booleans have opposite meanings: True forbids a key in the masks
    # of this module, and allows it in those of scaled_dot_product_attention.
    masks = []
    if attn_mask is not None:
        # (queries, keys), or (batch * heads, queries, keys).
        masks.append(attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, q.shape[:2]))
    if key_padding_mask is not None:
        # (batch, keys)
        masks.append(key_padding_mask[:, None, None])
    for i, mask in enumerate(masks):
        if mask.dtype == torch.bool:
            masks[i] = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -torch.inf)
    return functional.pad(sum(masks[1:], masks[0]), (0, n_added)) if masks else None
