"""Attention against a loop of ``backward()``, in float64, over its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import trakdask as td
from tests.models.engines import equal, run
from tests.models.test_hooks import Net, Total, made, normal, oracle
from tests.models.token_oracle import contributions
from trakdask.models.attention import projections
from trakdask.models.layers import require_layers_of_tokens
from trakdask.models.model import Model
from trakdask.models.tasks import Batch

N, LENGTH, KEYS, WIDTH, HEADS = 3, 4, 5, 8, 2


@dataclass(frozen=True)
class Options:
    """What a call of attention looks like."""

    sources: str = "self"
    widths: tuple[int, int] = (WIDTH, WIDTH)
    batch_first: bool = True
    bias: bool = True
    bias_kv: bool = False
    zero: bool = False
    need_weights: bool = False
    average: bool = True
    mask: str | None = None
    pads: bool = False


class Attending(nn.Module):
    """Returns what attention returns, made from one input."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        kdim, vdim = options.widths
        self.attention = nn.MultiheadAttention(
            WIDTH, HEADS, bias=options.bias, add_bias_kv=options.bias_kv, kdim=kdim, vdim=vdim,
            add_zero_attn=options.zero, batch_first=options.batch_first,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        options, (kdim, vdim) = self.options, self.options.widths
        query, memory = x[:, :LENGTH, :WIDTH], x.cos()
        key = memory[..., :kdim]
        value = key if options.sources == "memory" else memory.sin()[..., :vdim]
        if options.sources == "self":
            key = value = query
        masked = key[..., 0] > 0.7 if options.pads else None
        if masked is not None:  # a query that sees no key has no weights
            masked = masked & (torch.arange(key.shape[1]) > 0)
        mask = self.mask(len(x), key.shape[1]).to(x.device)
        inputs = dict.fromkeys(map(id, (query, key, value)))
        for tensor in (query, key, value):  # the same tensor stays the same
            inputs[id(tensor)] = tensor if options.batch_first else tensor.transpose(0, 1)
        out, weights = self.attention(
            *(inputs[id(tensor)] for tensor in (query, key, value)),
            key_padding_mask=masked, need_weights=options.need_weights,
            attn_mask=mask if options.mask else None, average_attn_weights=options.average,
        )  # fmt: skip
        out = (out if options.batch_first else out.transpose(0, 1)).flatten(1)
        return out if weights is None else torch.cat([out, weights.flatten(1)], 1)

    def mask(self, n: int, n_keys: int) -> Tensor:
        mask = torch.linspace(-2, 2, LENGTH * n_keys, dtype=torch.float64).view(LENGTH, n_keys)
        if self.options.mask == "by head":
            mask = torch.stack([mask, mask.sin()]).repeat(n, 1, 1)
        hidden = (mask.cos() > 0.6) & (torch.arange(n_keys) > 0)
        return hidden if self.options.mask == "bool" else mask


@st.composite
def options(draw: st.DrawFn) -> Options:
    flags = {name: draw(st.booleans()) for name in Options.__annotations__ if name not in (
        "sources", "widths", "mask")}  # fmt: skip
    sources = draw(st.sampled_from(["self", "memory", "three"]))
    widths = [(WIDTH, WIDTH)]
    if sources != "self":
        widths.append((6, 6) if sources == "memory" else (6, 4))
    # torch warns of masks of two kinds.
    masks = [None, "bool"] if flags["pads"] else [None, "bool", "float", "by head"]
    mask = draw(st.sampled_from(masks))
    return Options(sources, draw(st.sampled_from(widths)), mask=mask, **flags)


def gradients(build: Callable[[], nn.Module], x: Tensor, engine: str = "hooks") -> dict:
    module = made(build)
    model = Model(lambda: build().double(), [module.state_dict()], task=Total())
    return run(model, Batch(x=x), engine)[0]


@given(options())
def test_attention__equals_backward(options: Options) -> None:
    build, x = (lambda: Attending(options)), normal(N, KEYS, WIDTH)
    expected = oracle(made(build), x)
    assert any(gradient.any() for gradient in expected.values())
    equal(gradients(build, x), expected)


class Own(nn.MultiheadAttention):
    def forward(self, *args: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        out, weights = super().forward(*args, **kwargs)
        return out * self.in_proj_bias.sum(), weights


def normalised() -> nn.Module:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    return nn.utils.parametrizations.weight_norm(layer, "in_proj_weight")


@pytest.mark.parametrize(
    "build", [lambda: Own(WIDTH, HEADS, batch_first=True), normalised], ids=["own", "weight norm"]
)
def test_attention__that_is_not_torchs_is_differentiated_whole(
    build: Callable[[], nn.Module],
) -> None:
    assert not projections(build())
    whole = lambda: Net(lambda m, x: m.layer(x, x, x)[0], layer=build())  # noqa: E731
    x = normal(N, LENGTH, WIDTH)
    equal(gradients(whole, x), oracle(made(whole), x))


def twice() -> nn.Module:
    def call(m: Net, x: Tensor) -> Tensor:
        y = m.layer(x, x, x, need_weights=False)[0].tanh()
        return m.layer(x, y, y)[0]

    return Net(call, layer=nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))


def in_two_places() -> nn.Module:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    call = lambda m, x: m.layer(x, x, x)[0]  # noqa: E731
    return nn.Sequential(Net(call, layer=layer), nn.Tanh(), Net(call, layer=layer))


MODELS = {
    "called twice": twice,
    "in two places": in_two_places,
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 12, batch_first=True), 2
    ),
    "decoder": lambda: Net(
        lambda m, x: m.layer(x, x.cos(), tgt_is_causal=False),
        layer=nn.TransformerDecoderLayer(WIDTH, HEADS, 12, batch_first=True),
    ),
    "causal": lambda: Net(
        lambda m, x: m.layer(x, nn.Transformer.generate_square_subsequent_mask(LENGTH).double()),
        layer=nn.TransformerEncoderLayer(WIDTH, HEADS, 12, batch_first=True),
    ),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of vmap
@pytest.mark.parametrize("engine", ["hooks", "vmap"])
@pytest.mark.parametrize("name", MODELS)
def test_attention__in_models(name: str, engine: str) -> None:
    x = normal(N, LENGTH, WIDTH)
    equal(gradients(MODELS[name], x, engine), oracle(made(MODELS[name]), x))


class Linears(nn.Module):
    """Attention that calls linear layers, as the oracle of tokens needs."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.in_proj(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = ((q @ k.mT) * (WIDTH // HEADS) ** -0.5 + mask).softmax(-1) @ v
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class Language(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.wte, self.attention = nn.Embedding(11, WIDTH), attention
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(x)
        if isinstance(self.attention, Linears):
            return self.head(x + self.attention(x, mask))
        return self.head(x + self.attention(x, x, x, attn_mask=mask, is_causal=True)[0])


def test_attention__contributions_of_tokens() -> None:
    task = td.tasks.CausalLM(inputs="input_ids", positional=True)
    module = made(lambda: Language(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)))
    require_layers_of_tokens(module, [name for name, _ in module.named_parameters()])
    plain = made(lambda: Language(Linears()))
    state = zip(plain.state_dict(), module.state_dict().values(), strict=True)
    plain.load_state_dict(dict(state))
    ids = torch.randint(0, 11, (N, 6), generator=torch.Generator().manual_seed(0))
    found, *_ = run(Model(module, task=task), Batch(input_ids=ids), "tokens")
    expected = contributions(plain, task, Batch(input_ids=ids), 6)
    expected = {name.replace("in_proj.", "in_proj_"): g for name, g in expected.items()}
    equal({name: g.view(N, 6, -1) for name, g in found.items()}, expected, rtol=1e-9)
