"""The contribution of each token, against layers with a copy of their weights for each token.

Products of the contributions with vectors: ``test_part_scores.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import trakdask as td
from tests.models.engines import equal, run
from tests.models.token_oracle import contributions
from trakdask.models import rules
from trakdask.models.gradients import engine_of
from trakdask.models.layers import require_layers_of_tokens
from trakdask.models.model import Model
from trakdask.models.plans import has_pooled_layers
from trakdask.models.products import PRODUCTS, Products
from trakdask.models.tasks import Batch

VOCABULARY, LENGTH, WIDTH = 11, 7, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.out((q @ k.mT).masked_fill(later, -torch.inf).softmax(-1) @ v)


class Scaled(nn.Module):
    """A layer of the user's own, for which there is no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(self.weight) + self.weight


class Gpt(nn.Module):
    """One block, positions that all samples share, an output that is tied to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.attn, self.own = nn.LayerNorm(WIDTH), Attention(), Scaled()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))
        self.rms, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        x = x + self.attn(self.norm(x))
        return self.head(self.rms(self.own(x + self.mlp(x))))


TASK = td.tasks.CausalLM(inputs="input_ids", positional=True)


def drawn(n: int = 3, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(input_ids=torch.randint(0, VOCABULARY, (n, LENGTH), generator=generator))


def made(build: Callable[[], nn.Module] = Gpt) -> nn.Module:
    torch.manual_seed(0)
    return build().double().eval()


def by_engine(module: nn.Module, batch: Batch, task: object = TASK) -> dict[str, Tensor]:
    model = Model(lambda: copy.deepcopy(module), [module.state_dict()], task=task)
    n, length = batch["input_ids"].shape
    return {name: g.view(n, length, -1) for name, g in run(model, batch, "tokens")[0].items()}


@pytest.mark.parametrize(("n", "slice_bytes"), [(1, 2**22), (3, 2**9), (LENGTH, 2**22)])
def test_tokens__each_is_the_gradient_of_its_own_copy_of_the_weights(
    n: int, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trakdask.models.delivery._SLICE_BYTES", {"cpu": slice_bytes})
    module, batch = made(), drawn(n)
    expected = contributions(module, TASK, batch, LENGTH)
    assert all(gradient.any() for gradient in expected.values())
    equal(by_engine(module, batch), expected, rtol=1e-9)


class Pooled(nn.Module):
    """The head sees no tokens, only their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.wte(input_ids).mean(1))[:, None].expand(-1, LENGTH, -1)


def test_tokens__layer_without_tokens_has_gradients_of_samples() -> None:
    module, batch = made(Pooled), drawn(2)
    whole, *_ = run(Model(module, task=TASK), batch)
    found = by_engine(module, batch)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.sum(1), whole[name])
    assert found["wte.weight"].any(2).all()
    assert not found["head.weight"][:, 1:].any()


class ReadsValues(Pooled):
    """A model that does not run on tensors without values."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * int(input_ids.max() >= 0)


def test_has_pooled_layers__of_a_model_that_reads_values_is_not_known() -> None:
    model = Model(made(ReadsValues), task=TASK)
    one = {"input_ids": torch.zeros(1, LENGTH, dtype=torch.long)}
    assert not has_pooled_layers(model.meta_module(), TASK, one, tuple(model.shapes))


def test_products__layer_without_tokens_that_was_not_foreseen_is_named() -> None:
    module, batch = made(Pooled), drawn(2)
    vectors = {name: tensor[None] for name, tensor in module.named_parameters()}
    forward = Model(module, task=TASK)
    with pytest.raises(ValueError, match=r"each of 7 tokens at layer 'head'.*\(2, 6\)"):
        engine_of("tokens")(
            forward.forward(forward.checkpoints[0]), TASK, batch, tuple(vectors),
            Products(vectors, 2 * LENGTH),
        )  # fmt: skip


ACROSS = {
    "attention": nn.utils.parametrizations.weight_norm(
        nn.MultiheadAttention(4, 2), "in_proj_weight"
    ),
    "lstm": nn.LSTM(4, 4),
    "convolution": nn.Conv1d(4, 4, 3),
    "batch normalization": nn.BatchNorm1d(4),
    "group normalization": nn.GroupNorm(2, 4),
}


@pytest.mark.parametrize("layer", ACROSS.values(), ids=ACROSS)
def test_require_layers_of_tokens__names_the_layer(layer: nn.Module) -> None:
    module = nn.Sequential(nn.Linear(4, 4), layer)
    names = [name for name, _ in module.named_parameters()]
    with pytest.raises(ValueError, match=rf"'1', {type(layer).__name__}"):
        require_layers_of_tokens(module, names)
    require_layers_of_tokens(module, names[:2])


# ---------------------------------------------------- products with gradients that are never formed


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
