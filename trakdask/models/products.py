"""Multiply gradients with a few known vectors, instead of projecting them.

The product of a token's gradient Σ δ xᵀ with a matrix U is δᵀ(U x). So the products of all tokens
take one multiplication of each layer's input per vector, as a forward pass does, and the gradient
of a single token is never formed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trakdask.models.rules import (
    Rule,
    embedding_weight,
    linear_weight,
    transposed_linear_weight,
)

__all__ = ["PRODUCTS", "Products", "wide"]

Product = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Takes a layer, x (rows, positions, ...), delta likewise, and vectors (m, *shape of the weight);
returns the products of the gradients of the rows with the vectors, (rows, m)."""


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
    """

    def __init__(
        self,
        vectors: Mapping[str, Tensor],
        n_rows: int,
        groups: Mapping[str, int] | None = None,
        n_groups: int = 1,
    ) -> None:
        self._vectors, self._groups = vectors, groups or {}
        first = next(iter(vectors.values()))
        shape = (n_rows, n_groups, len(first))
        self._sums = torch.zeros(shape, dtype=torch.float64, device=first.device)

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Add the products of a parameter's gradients, (rows, n), or of a slice of them."""
        start, gradient = first or 0, wide(gradient)
        vectors = self.vectors(name, gradient.dtype).flatten(1)
        self.add(name, gradient @ vectors[:, start : start + gradient.shape[1]].mT)

    def add(self, name: str, products: Tensor) -> None:
        """Add products of a parameter, (rows, m), that are known already."""
        self._sums[:, self._groups.get(name, 0)] += products

    def vectors(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the vectors of a parameter, (m, *shape)."""
        return self._vectors[name].to(dtype)

    def result(self) -> Tensor:
        """Return the sums, (rows, groups, m) float32."""
        return self._sums.float()


def wide(value: Tensor) -> Tensor:
    """Return a tensor in float32 or better."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _linear(module: nn.Linear, x: Tensor, delta: Tensor, vectors: Tensor) -> Tensor:
    return _bilinear(delta, x, vectors)


def _transposed_linear(module: nn.Module, x: Tensor, delta: Tensor, vectors: Tensor) -> Tensor:
    return _bilinear(x, delta, vectors)


def _bilinear(left: Tensor, right: Tensor, matrices: Tensor) -> Tensor:
    """Return Σ leftᵀ U right over the positions of each row, (rows, m), for U of (m, a, b)."""
    flat = left.flatten(0, -2), right.flatten(0, -2)
    # The result of the matrix product is the larger one of the two arrays, so keep it small.
    left_first = matrices.shape[1] >= matrices.shape[2]
    near, far = flat if left_first else flat[::-1]
    sums = [(near @ (matrix if left_first else matrix.mT)).mul_(far).sum(1) for matrix in matrices]
    return torch.stack(sums, 1).view(len(left), -1, len(matrices)).sum(1)


def _embedding(module: nn.Embedding, x: Tensor, delta: Tensor, vectors: Tensor) -> Tensor:
    ids, delta = x.flatten(), delta.reshape(-1, module.embedding_dim)
    sums = torch.stack([(table[ids] * delta).sum(1) for table in vectors], 1)
    if module.padding_idx is not None:
        sums[ids == module.padding_idx] = 0
    return sums.view(len(x), -1, len(vectors)).sum(1)


PRODUCTS: dict[Rule, Product] = {
    linear_weight: _linear,
    transposed_linear_weight: _transposed_linear,
    embedding_weight: _embedding,
}
"""By the rule that would form the gradient; those of other rules are small, and are formed."""
