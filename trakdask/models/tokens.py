"""Compute what each token of a sequence contributes to the gradient of the sequence.

A layer that treats the tokens of a sequence one by one uses its weights once per token, so that the
gradient of a weight is a sum with one term per token: Σ_t δ_t x_tᵀ for a linear layer, where x_t is
what the layer took at token t and δ_t the gradient with respect to what it returned there. The
terms come from the same backward pass as the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from trakdask.models.coverage import Layer, hookable_layers
from trakdask.models.hooks import Axes, GradientCollector, Sink
from trakdask.models.local import Call, unfolded
from trakdask.models.tasks import Batch, Forward

__all__ = ["TokenGradientCollector", "number_of_tokens", "require_layers_of_tokens"]

_ACROSS_TOKENS = (nn.MultiheadAttention, nn.RNNBase, _ConvNd, _NormBase, nn.GroupNorm)
"""Layers whose result at one token depends on several, or that have no axis of tokens."""

_REMEDY = (
    "try td.Model(..., parameters=...) with the layers that treat tokens one by one, or names of "
    "modules as parts="
)


def number_of_tokens(batch: Batch) -> int:
    """Return the length of the sequences, which is that of the first input."""
    return int(next(iter(batch.values())).shape[1])


def require_layers_of_tokens(module: nn.Module, names: Sequence[str]) -> None:
    """Reject models whose gradients are known not to be sums over tokens.

    Raises
    ------
    ValueError
        If a selected parameter belongs to a layer that looks at several tokens at once, or to a
        module with further modules inside, of which hooks do not see how it uses the parameter.
    """
    hookable = hookable_layers(module, names)
    if hookable.rest:
        raise ValueError(
            "expected parameters of layers that treat tokens one by one, as parts='token' needs, "
            f"got {hookable.rest[0]!r}, which a module with further modules inside uses; {_REMEDY}"
        )
    for layer in hookable.layers:
        submodule = module.get_submodule(layer.path)
        if isinstance(submodule, _ACROSS_TOKENS):
            raise ValueError(
                "expected layers that treat tokens one by one, as parts='token' needs, got "
                f"{layer.path!r}, {type(submodule).__name__}, which looks at several tokens at "
                f"once, or has no axis of tokens; {_REMEDY}"
            )


class TokenGradientCollector(GradientCollector):
    """Record a batch of sequences, and compute one gradient for each of their tokens.

    Gradients are (batch * tokens, numel), all tokens of the first sequence first.

    Parameters
    ----------
    forward, layers, axes, n_samples, sink
        As for :class:`trakdask.models.hooks.GradientCollector`.
    n_tokens
        Length of the sequences.
    """

    def __init__(
        self,
        forward: Forward,
        layers: Sequence[Layer],
        axes: Axes,
        n_samples: int,
        sink: Sink,
        *,
        n_tokens: int,
    ) -> None:
        self._n_tokens = n_tokens
        super().__init__(forward, layers, axes, n_samples, sink)

    def _rows_of_sample(self) -> int:
        return self._n_tokens

    def _as_rows(self, call: Call, value: Tensor) -> Tensor:
        """Turn (batch, tokens, ...) into (batch * tokens, 1, ...): a batch of single tokens."""
        expected = (self._n_samples, self._n_tokens)
        if tuple(value.shape[:2]) != expected:
            raise ValueError(
                f"expected a value for each of {expected[1]} tokens at layer {call.layer.path!r}, "
                f"as parts='token' needs, got shape {tuple(value.shape)} for {expected[0]} "
                f"sequences; {_REMEDY}"
            )
        return value.reshape(-1, 1, *value.shape[2:])

    def _locally(self, call: Call, deltas: Sequence[Tensor | None], axes: Sequence[int]) -> None:
        leaves, spec = pytree.tree_flatten(call.inputs)
        leaves = [
            self._rows_of_input(call, leaf, axis)
            for leaf, axis in zip(leaves, call.in_axes, strict=True)
        ]
        in_axes = [0 if isinstance(leaf, Tensor) else None for leaf in leaves]
        rows = replace(call, inputs=pytree.tree_unflatten(leaves, spec), in_axes=in_axes)
        deltas = [
            None if delta is None else self._as_rows(call, self._by_sample(delta, axis))
            for delta, axis in zip(deltas, axes, strict=True)
        ]
        super()._locally(rows, deltas, [0] * len(deltas))

    def _rows_of_input(self, call: Call, leaf: Any, axis: int | None) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        by_sample = self._expanded(leaf) if axis is None else self._by_sample(leaf, axis)
        return self._as_rows(call, by_sample)

    def _by_sample(self, value: Tensor, axis: int) -> Tensor:
        return unfolded(value, axis, self._n_samples).movedim(axis, 0)
