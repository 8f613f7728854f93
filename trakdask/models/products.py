"""Multiply gradients with a few vectors instead of projecting them.

The product of a token's gradient Σ δ xᵀ with a matrix U is δᵀ(U x). So the products of all tokens
take one multiplication of each layer's input per vector, as a forward pass does, and the gradient
of a single token is never formed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from trakdask.models.rules import (
    GradientRule,
    embedding_weight,
    linear_weight,
    transposed_linear_weight,
)
from trakdask.tensors import float64_device


class Products:
    """A sink of gradients that adds up their products with some vectors.

    Parameters
    ----------
    vectors
        (m, *shape) for each parameter, on the device of the gradients.
    n_rows
        Number of rows of each gradient: samples, or samples × tokens.
    groups
        Number of the part of each parameter; None if all parameters belong to one.
    n_groups
        Number of parts that parameters are divided into.
    n_others
        Number of samples, if layers that do not see tokens have gradients of whole samples, which
        are a part of their own, behind the tokens.
    """

    def __init__(
        self,
        vectors: Mapping[str, Tensor],
        n_rows: int,
        groups: Mapping[str, int] | None = None,
        n_groups: int = 1,
        n_others: int = 0,
    ) -> None:
        self._vectors, self._groups = vectors, groups or {}
        first = next(iter(vectors.values()))
        shape = (n_rows, n_groups, len(first))
        # (sample or token, part, vector), in float64, as many small terms are added one by one.
        self._sums = torch.zeros(shape, dtype=torch.float64, device=float64_device(first.device))
        self._others = self._sums.new_zeros(n_others, 1, len(first))
        self.has_others = n_others > 0

    def __call__(
        self, name: str, gradient: Tensor, first: int | None = None, /, *, by_token: bool = False
    ) -> None:
        """Add the products of a parameter's gradients, (rows, n), or of a slice of them."""
        start, gradient = first or 0, wide(gradient)
        vectors = self.vectors(name, gradient.dtype).flatten(1)
        products = gradient @ vectors[:, start : start + gradient.shape[1]].mT
        self.add(name, products, by_token=by_token)

    def add(self, name: str, products: Tensor, *, by_token: bool) -> None:
        """Add products of a parameter, (rows, m), that are known already."""
        sums = self._others if self.has_others and not by_token else self._sums
        sums[:, self._groups.get(name, 0)] += products.to(sums.device)

    def vectors(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the vectors of a parameter, (m, *shape)."""
        return self._vectors[name].to(dtype)

    def result(self) -> Tensor:
        """Return the sums, (rows, groups, m) float32; with others, (samples, parts, m)."""
        if not self.has_others:
            return self._sums.float()
        # (sample * token, 1, vector) becomes (sample, token, vector).
        tokens = self._sums.view(len(self._others), -1, self._sums.shape[2])
        return torch.cat([tokens, self._others], 1).float()


def wide(value: Tensor) -> Tensor:
    """Return a tensor in float32 or better."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _embedding(module: nn.Embedding, x: Tensor, delta: Tensor, vectors: Tensor) -> Tensor:
    ids, delta = x.flatten(), delta.reshape(-1, module.embedding_dim)
    sums = torch.stack([(table[ids] * delta).sum(1) for table in vectors], 1)
    # torch gives the row of padding no gradient.
    if module.padding_idx is not None:
        sums[ids == module.padding_idx] = 0
    return sums.view(len(x), -1, len(vectors)).sum(1)


def _linear(module: nn.Module, x: Tensor, delta: Tensor, vectors: Tensor) -> Tensor:
    """Return Σ δᵀ U x over the positions of each row, (rows, m), for U of (m, a, b)."""
    flat = delta.flatten(0, -2), x.flatten(0, -2)
    # The result of the matrix product is the larger one of the two arrays, so keep it small.
    delta_first = vectors.shape[1] >= vectors.shape[2]
    near, far = flat if delta_first else flat[::-1]
    sums = [(near @ (u if delta_first else u.mT)).mul_(far).sum(1) for u in vectors]
    return torch.stack(sums, 1).view(len(x), -1, len(vectors)).sum(1)


def _transposed_linear(module: nn.Module, x: Tensor, delta: Tensor, vectors: Tensor) -> Tensor:
    return _linear(module, delta, x, vectors)


PRODUCTS: dict[GradientRule, Callable[..., Tensor]] = {
    linear_weight: _linear,
    transposed_linear_weight: _transposed_linear,
    embedding_weight: _embedding,
}
"""By the rule that would form the gradient; gradients of other rules are small, and are formed.

Each function takes a layer, x (rows, positions, ...), delta likewise, and vectors (m, *shape of the
weight); it returns the products of the gradients of the rows with the vectors, (rows, m).
"""
