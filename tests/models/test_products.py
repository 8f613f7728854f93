"""Products of vectors with gradients that are never formed; of tokens: ``test_part_scores.py``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models.engines import run
from tests.models.test_tokens import TASK, drawn, made
from trakdask.models import rules
from trakdask.models.model import Model
from trakdask.models.products import PRODUCTS, Products


@pytest.mark.parametrize(("n_in", "n_out"), [(3, 8), (8, 3)])
def test_products__of_a_linear_layer_with_several_positions_per_row(n_in: int, n_out: int) -> None:
    layer = nn.Linear(n_in, n_out, dtype=torch.float64)
    x, delta, vectors = (
        torch.randn(*shape, dtype=torch.float64)
        for shape in ((5, 4, n_in), (5, 4, n_out), (2, n_out, n_in))
    )
    gradient = rules.linear_weight(layer, x, delta, {})
    products = PRODUCTS[rules.linear_weight](layer, x, delta, vectors)
    torch.testing.assert_close(products, gradient @ vectors.flatten(1).T)
    transposed = PRODUCTS[rules.transposed_linear_weight](layer, x, delta, vectors.mT)
    torch.testing.assert_close(transposed, products)


def test_products__padding_of_an_embedding_has_none() -> None:
    layer = nn.Embedding(6, 3, padding_idx=2, dtype=torch.float64)
    ids, delta = torch.tensor([[1], [2], [5]]), torch.randn(3, 1, 3, dtype=torch.float64)
    vectors = torch.randn(2, 6, 3, dtype=torch.float64)
    gradient = rules.embedding_weight(layer, ids, delta, {})
    products = PRODUCTS[rules.embedding_weight](layer, ids, delta, vectors)
    torch.testing.assert_close(products, gradient @ vectors.flatten(1).T)
    assert not products[1].any()
    assert products[[0, 2]].all()


def test_products__by_groups_of_parameters_and_in_slices() -> None:
    module, batch = made(), drawn(2)
    model, vectors = Model(module, task=TASK), {}
    for name, shape in model.shapes.items():
        vectors[name] = torch.randn(3, *shape, dtype=torch.float64)
    groups = {name: number % 2 for number, name in enumerate(model.shapes)}
    gradients, *_ = run(model, batch, "vmap")
    sink = Products(vectors, 2, groups, 2)
    for name, gradient in gradients.items():
        sink(name, gradient[:, :5], 0)
        sink(name, gradient[:, 5:], 5)
    for group in range(2):
        oracle = sum(
            gradients[name] @ vectors[name].flatten(1).T for name in groups if groups[name] == group
        )
        torch.testing.assert_close(sink.result()[:, group].double(), oracle, rtol=1e-5, atol=1e-5)
