"""Engines are tried until one runs the model right; the last one is a loop of backward passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import trakdask as td
from trakdask.errors import forget_warnings

N = 8


class First:
    """f is the first output, and Q is 1."""

    def __init__(self, *variables: str) -> None:
        self.variables = variables

    def output(self, forward, batch):
        return forward(*(batch[name] for name in self.variables))[:, 0]

    def out_to_loss(self, forward, batch):
        return torch.ones_like(self.output(forward, batch))


class Residual(nn.Module):
    """Differentiates itself, as a network that solves a differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        u = self.net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u + (du**2).sum(1, keepdim=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # without setup_context
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Doubled.apply(self.first(x)) * self.scale) @ self.second.weight


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 32), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.second(torch.tanh(self.first(x)))
        return y.float()


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ones(x.shape)
        y *= x * self.scale
        return self.second(torch.tanh(self.first(y)))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, length.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.head(self.rnn(packed)[1][0][-1])


class Graph(nn.Module):
    """Nodes of all graphs in one list, with the graph of each; a graph has any number of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        present = torch.arange(x.shape[1]) < length[:, None]
        batch = present.nonzero()[:, 0]
        nodes = torch.tanh(self.first(x[present]))
        return self.second(nodes.new_zeros(len(x), 5).index_add(0, batch, nodes))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(9, 5, mode="mean"), nn.Linear(5, 2)

    def forward(self, ids: Tensor, length: Tensor) -> Tensor:
        flat = ids[torch.arange(ids.shape[1]) < length[:, None]]
        return self.head(self.bag(flat, length.cumsum(0) - length))


def t5() -> nn.Module:
    import transformers

    config = transformers.T5Config(
        vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t5 = transformers.T5ForConditionalGeneration(config)

        def forward(self, ids: Tensor) -> Tensor:
            return self.t5(input_ids=ids, decoder_input_ids=ids).logits.mean(1)

    return Logits()


RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.standard_normal((N, 4)).astype("f4"),
    "rows": RNG.standard_normal((N, 6, 4)).astype("f4"),
    "ids": RNG.integers(1, 9, (N, 6)),
    "length": np.array([3, 6, 2, 1, 5, 4, 6, 2]),
}
KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "PINN": (Residual, ("x",)),
    "Function without setup_context": (Custom, ("x",)),
    "autocast": (Autocast, ("x",)),
    "T5": (t5, ("ids",)),
    "in place": (InPlace, ("x",)),
    "packed LSTM": (Packed, ("rows", "length")),
    "flat graphs": (Graph, ("rows", "length")),
    "offsets": (Bags, ("ids", "length")),
}


def backward(module: nn.Module, variables: tuple[str, ...], data=DATA) -> np.ndarray:
    """The gradients of single samples by a loop of backward()."""
    module.eval()
    rows = []
    for i in range(N):
        module.zero_grad()
        module(*(torch.tensor(data[name][i : i + 1]) for name in variables))[0, 0].backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
        rows.append(torch.cat([g.to_dense().flatten() for g in grads]))
    return torch.stack(rows).double().numpy()


def features(module: nn.Module, variables: tuple[str, ...], chunks: int = 4, **options) -> Any:
    data = td.from_arrays({name: DATA[name] for name in variables}, chunks=chunks)
    model = td.Model(module, task=First(*variables))
    lazy = td.featurize(data, model, projector=td.Identity(), **options)
    return lazy.compute(scheduler="sync").feature.values[:, :, 0]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap
@pytest.mark.parametrize("kind", KINDS)
def test_auto_ends_at_the_loop(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    build, variables = KINDS[kind]
    torch.manual_seed(0)
    module = build()
    found = features(module, variables)
    print(caplog.text)
    expected = backward(module, variables)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 1e-7
    assert caplog.text.count("gradients by ") == 1
