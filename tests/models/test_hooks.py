"""Every layer against a loop of ``backward()``, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.engines import Collected, backward, equal, run
from trakdask.models import delivery
from trakdask.models.gradients import ENGINES
from trakdask.models.model import Model
from trakdask.models.plans import hook_plan
from trakdask.models.rules import rules_of
from trakdask.models.tasks import Batch, Forward
from trakdask.tensors import Turning, factors_of, rotations


class Total:
    """The model output is a weighted sum of whatever the model returns."""

    variables = ("x",)

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        found = forward(batch["x"])
        weights = torch.linspace(-1, 1, found[0].numel(), dtype=torch.float64)
        return found.flatten(1).sin() @ weights

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        return self.output(forward, batch)


def oracle(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Differentiate sample by sample with ``backward()``."""
    buffers = dict(module.named_buffers())

    def output(module: nn.Module, sample: Batch) -> Tensor:
        return Total().output(Forward(module, dict(module.named_parameters()), buffers), sample)[0]

    return backward(module, output, Batch(x=x))[0]


class WithBuffer(Collected):
    """A sink that says where gradients are to be written, in blocks of 7 elements."""

    def __init__(self, n_rows: int, sizes: dict[str, int]) -> None:
        self._whole = {
            name: torch.full((n_rows, 2 * size), torch.nan, dtype=torch.float64)
            for name, size in sizes.items()
        }
        self.n_written = 0

    def buffer_for(self, name: str, first: int) -> Tensor:
        size = self._whole[name].shape[1] // 2
        return self._whole[name][:, first : min((first // 7 + 1) * 7, size)]

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        super().__call__(name, gradient, first)
        here = self._whole[name][:, first or 0 :]
        self.n_written += gradient.data_ptr() == here.data_ptr()


def by_hooks(
    build: Callable[[], nn.Module], module: nn.Module, x: Tensor, sink: Collected | None = None
) -> dict[str, Tensor]:
    model = Model(lambda: build().double(), [module.state_dict()], task=Total())
    found, output, q = run(model, Batch(x=x), sink=sink)
    assert torch.equal(output, q)
    return found


def made(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = build().double().eval()
    for tensor in module.parameters():
        nn.init.normal_(tensor, 0.5, 0.5)
    for name, tensor in module.named_buffers():
        if "running" in name:
            tensor.uniform_(0.5, 2)
    return module


def check(build: Callable[[], nn.Module], x: Tensor) -> None:
    module = made(build)
    expected = oracle(module, x)
    assert any(gradient.any() for gradient in expected.values())
    equal(by_hooks(build, module, x), expected)
    first = {name: gradient[:1] for name, gradient in expected.items()}
    equal(by_hooks(build, module, x[:1]), first)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def ones(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


def tokens(n: int, length: int, size: int) -> Tensor:
    return torch.randint(0, size, (n, length), generator=torch.Generator().manual_seed(5))


LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(6, 4), normal(5, 6)),
    "linear without bias": (lambda: nn.Linear(6, 4, bias=False), normal(5, 6)),
    "linear on tokens": (lambda: nn.Linear(6, 4), normal(5, 3, 6)),
    "linear, as many tokens as samples": (lambda: nn.Linear(6, 4), normal(5, 5, 6)),
    "linear on a grid": (lambda: nn.Linear(6, 4), normal(5, 3, 2, 6)),
    "bilinear": (
        lambda: Net(lambda m, x: m.layer(x, x.cos()), layer=nn.Bilinear(6, 6, 3)),
        normal(5, 6),
    ),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), normal(5, 4, 9)),
    "conv1d, stride, dilation, groups": (
        lambda: nn.Conv1d(4, 6, 3, stride=2, dilation=2, groups=2, padding=3),
        normal(5, 4, 11),
    ),
    "conv2d": (lambda: nn.Conv2d(3, 4, (3, 2), padding=(2, 1)), normal(5, 3, 7, 6)),
    "conv2d, stride that leaves rows out": (
        lambda: nn.Conv2d(3, 4, 3, stride=2),
        normal(5, 3, 8, 6),
    ),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), normal(5, 4, 5, 5)),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, dilation=2), normal(5, 4, 7, 7)),
    "conv2d, reflected": (
        lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        normal(5, 3, 5, 6),
    ),
    "conv2d, same, circular": (
        lambda: nn.Conv2d(3, 4, (4, 2), padding="same", padding_mode="circular", dilation=(1, 2)),
        normal(5, 3, 5, 6),
    ),
    "conv2d, same": (lambda: nn.Conv2d(3, 4, 4, padding="same"), normal(5, 3, 5, 6)),
    "conv2d, valid": (lambda: nn.Conv2d(3, 4, 2, padding="valid"), normal(5, 3, 5, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 3, (2, 3, 1), stride=(1, 2, 1)), normal(5, 2, 3, 5, 4)),
    "conv3d, dilation, groups": (
        lambda: nn.Conv3d(2, 4, 2, dilation=2, padding=1, groups=2),
        normal(5, 2, 3, 4, 5),
    ),
    "transposed conv": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), normal(5, 3, 3, 4)),
    "embedding": (lambda: nn.Embedding(7, 3), tokens(5, 4, 7)),
    "embedding with padding": (lambda: nn.Embedding(7, 3, padding_idx=2), tokens(5, 9, 7)),
    "embedding, as long as the batch": (lambda: nn.Embedding(7, 3), tokens(5, 5, 7)),
    "layer norm": (lambda: nn.LayerNorm(6), normal(5, 3, 6)),
    "layer norm over two axes": (lambda: nn.LayerNorm((3, 6)), normal(5, 3, 6)),
    "rms norm": (lambda: nn.RMSNorm(6), normal(5, 3, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), normal(5, 4, 3, 3)),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), normal(5, 4, 3, 3)),
    "instance norm with statistics": (
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        normal(5, 4, 3, 3),
    ),
    "batch norm 1d": (lambda: nn.BatchNorm1d(4), normal(5, 4)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(4), normal(5, 4, 3, 3)),
    "prelu": (lambda: nn.PReLU(4), normal(5, 4, 3)),
    "lstm": (
        lambda: Net(lambda m, x: m.layer(x)[0], layer=nn.LSTM(4, 3, batch_first=True)),
        normal(5, 6, 4),
    ),
    "gru, sequence first": (
        lambda: Net(lambda m, x: m.layer(x.movedim(1, 0))[0].movedim(0, 1), layer=nn.GRU(4, 3)),
        normal(5, 6, 4),
    ),
    "in-place activations": (
        lambda: nn.Sequential(
            nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.ReLU(inplace=True)
        ),
        normal(5, 6),
    ),
    "rows flattened": (lambda: flattened(nn.Linear(6, 4)), normal(5, 3, 6)),
    "rows flattened, without a rule": (lambda: flattened(gain()), normal(5, 3, 6)),
    "rows flattened, channels": (lambda: flattened(nn.Conv1d(2, 3, 2)), normal(5, 3, 2, 6)),
    "an output made from another": (lambda: two_outputs(), normal(5, 6)),
    "activation as a child": (lambda: gain(), normal(5, 3, 6)),
    "output made to require gradients": (lambda: requires(), normal(5, 6)),
    "groups called twice": (
        lambda: Net(
            lambda m, x: m.layer(m.layer(x).tanh()), layer=nn.Conv1d(4, 4, 3, padding=1, groups=2)
        ),
        normal(5, 4, 6),
    ),
    "module called twice": (
        lambda: Net(
            lambda m, x: m.norm(m.layer(m.norm(m.layer(x).tanh()))),
            layer=nn.Linear(6, 6),
            norm=nn.LayerNorm(6),
        ),
        normal(5, 6),
    ),
    "tied weights": (lambda: tied(), tokens(5, 4, 7)),
    "position embedding": (lambda: positions(2), tokens(5, 4, 7)),
    "position embedding, as long as the batch": (lambda: positions(1), tokens(5, 5, 7)),
    "parameter beside children": (
        lambda: Net(lambda m, x: m.layer(x) * m.scale, layer=nn.Linear(6, 4), scale=ones()),
        normal(5, 6),
    ),
    "class token and positions": (lambda: patches(), normal(5, 3, 6)),
    "class token and positions, as many as samples": (lambda: patches(), normal(3, 3, 6)),
    "scale of channels": (
        lambda: Net(lambda m, x: m.layer(x) * m.scale, layer=nn.Conv1d(4, 3, 1), scale=ones(3, 1)),
        normal(5, 4, 6),
    ),
    "weights beside children": (
        lambda: Net(lambda m, x: m.layer(x) @ m.weight, layer=nn.Linear(6, 5), weight=ones(5, 4)),
        normal(5, 3, 6),
    ),
    "weights beside children, of pairs": (
        lambda: Net(
            lambda m, x: m.layer(x) @ m.weight.mean(0), layer=nn.Linear(6, 5), weight=ones(2, 5, 4)
        ),
        normal(5, 6),
    ),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), normal(5, 6)),
    "unused parameter": (
        lambda: Net(lambda m, x: m.layer(x), layer=nn.Linear(6, 4), idle=nn.Linear(3, 2)),
        normal(5, 6),
    ),
    "called without effect": (
        lambda: Net(
            lambda m, x: (m.idle(x[:, :3]), m.layer(x))[1],
            layer=nn.Linear(6, 4),
            idle=nn.Linear(3, 2),
        ),
        normal(5, 6),
    ),
    "several outputs, one used": (
        lambda: Net(
            lambda m, x: m.layer(x)["first"],
            layer=Net(lambda m, x: {"first": x * m.a, "second": x * m.b}, a=ones(6), b=ones(6)),
        ),
        normal(5, 6),
    ),
    "keyword arguments": (
        lambda: Net(lambda m, x: m.layer(input=x), layer=nn.Linear(6, 4)),
        normal(5, 6),
    ),
    "subclass with its own forward": (lambda: Doubled(6, 4), normal(5, 6)),
}


class Net(nn.Module):
    """A module with these parts, and a function of it and of its input."""

    def __init__(self, call: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def flattened(layer: nn.Module) -> nn.Module:
    """Calls a layer on the rows of all samples at once, as models do in front of experts."""
    call = lambda m, x: m.layer(x.flatten(0, 1)).unflatten(0, (len(x), -1))  # noqa: E731
    return Net(call, layer=layer)


def gain() -> nn.Module:
    """A parameter of its own beside a child that has none."""
    scale = nn.Parameter(torch.ones(6))
    return Net(lambda m, x: m.activation(x * m.scale), scale=scale, activation=nn.Tanh())


def tied() -> nn.Module:
    head, embedding = nn.Linear(6, 7, bias=False), nn.Embedding(7, 6)
    head.weight = embedding.weight
    return Net(lambda m, x: m.head(m.embedding(x).tanh()), embedding=embedding, head=head)


def two_outputs() -> nn.Module:
    """Returns, as a router does, a tensor and what it made from it."""

    def route(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = x @ m.weight
        return logits, logits.softmax(-1)

    def call(m: Any, x: Tensor) -> Tensor:
        logits, scores = m.router(m.first(x))
        return logits.sin() * scores

    return Net(call, first=nn.Linear(6, 6), router=Net(route, weight=ones(6, 6)))


def requires() -> nn.Module:
    """Makes an output require gradients, as PEFT does for gradient checkpointing."""
    first = nn.Linear(6, 4)
    first.register_forward_hook(lambda module, x, y: y.requires_grad_())
    return Net(lambda m, x: m.second(m.first(x).tanh()), first=first, second=nn.Linear(4, 3))


def positions(n_axes: int) -> nn.Module:
    """Embeddings of positions: one row for all samples, or no batch axis at all."""

    def call(m: Any, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        return m.norm(m.words(x) + m.positions(places[None] if n_axes == 2 else places))

    words, positions = nn.Embedding(7, 6), nn.Embedding(9, 6)
    return Net(call, words=words, positions=positions, norm=nn.LayerNorm(6))


def patches() -> nn.Module:
    """A token and positions that all samples share, beside layers, as in vision transformers."""

    def call(m: Any, x: Tensor) -> Tensor:
        x = torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.norm(m.positions)
        return m.layer(x * x.softmax(1))

    shared = {"token": ones(1, 1, 6), "positions": ones(1, 4, 6)}
    return Net(call, **shared, norm=nn.LayerNorm(6), layer=nn.Linear(6, 6))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x) + self.bias


class Initialised(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Standardised(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean(), bias)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # aten::_trilinear
@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("layer", LAYERS)
def test_hooks__equal_backward(layer: str) -> None:
    check(*LAYERS[layer])


@pytest.mark.parametrize(
    "layer",
    [name for name in LAYERS if name.startswith(("linear", "embedding"))]
    + ["rows flattened", "module called twice", "tied weights", "unused parameter", "weight norm"],
)
def test_hooks__large_gradients_in_parts(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(delivery._SLICE_BYTES, "cpu", 300)
    check(*LAYERS[layer])


@pytest.mark.parametrize(
    "layer",
    ["linear", "linear on tokens", "conv2d", "embedding", "tied weights", "unused parameter"],
)
def test_hooks__gradients_written_where_the_sink_says(layer: str) -> None:
    build, x = LAYERS[layer]
    module = made(build)
    sink = WithBuffer(len(x), {name: p.numel() for name, p in module.named_parameters()})
    equal(by_hooks(build, module, x, sink), oracle(module, x))
    assert bool(sink.n_written) == (layer not in ("conv2d", "embedding", "tied weights"))


@pytest.mark.parametrize(
    "layer",
    ["linear", "conv2d", "groups called twice", "rows flattened, channels", "lstm", "embedding"],
)
@pytest.mark.parametrize("block", [None, 2])
def test_hooks__coordinates_are_those_of_the_loop(layer: str, block: int | None) -> None:
    build, x = LAYERS[layer]
    model, turning = Model(made(build), task=Total()), Turning({}, block)
    places = [place for *_, place in factors_of(model.shapes, turning)]
    vectors = normal(places[-1].stop).numpy()
    matrices = rotations(vectors, model.shapes, torch.device("cpu"), turning)
    found = {engine: Collected() for engine in ("hooks", "loop")}
    for engine, sink in found.items():
        forward, names = model.forward(model.checkpoints[0]), list(model.shapes)
        ENGINES[engine](forward, model.task, Batch(x=x), names, sink, rotations=matrices)
    equal(found["hooks"], found["loop"])


def test_hooks__no_part_is_larger_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(delivery._SLICE_BYTES, "cpu", 400)
    sizes: list[int] = []
    sink = lambda name, gradient, *_: sizes.append(gradient.nbytes)  # noqa: E731
    run(Model(tied().double(), task=Total()), Batch(x=tokens(3, 4, 5)), sink=sink)
    assert max(sizes) <= 400 < sum(sizes)


@pytest.mark.parametrize(
    ("layer", "copied", "rest"),
    [
        ("class token and positions", {"token", "positions"}, set()),
        ("weights beside children", {"weight"}, set()),
        ("weights beside children, of pairs", set(), {"weight"}),
        ("parameter beside children", set(), {"scale"}),
    ],
)
def test_hook_plan__copies_of_parameters_only_where_they_change_nothing(
    layer: str, copied: set[str], rest: set[str]
) -> None:
    build, x = LAYERS[layer]
    model = Model(made(build), task=Total())
    forward = model.forward(model.checkpoints[0])
    _, others, by_sample = hook_plan(forward, model.task, Batch(x=x), tuple(model.shapes))
    assert (set(by_sample), set(others)) == (copied, rest)


def test_rules_of__no_rule_for_what_it_does_not_know() -> None:
    assert not rules_of(nn.Embedding(5, 3, scale_grad_by_freq=True))
    assert rules_of(nn.Linear(2, 2)) is rules_of(Initialised(2, 2))
    assert not rules_of(Standardised(2, 2, 1))


def test_hooks__input_changed_in_place() -> None:
    def careless() -> nn.Module:
        def call(m: nn.Module, x: Tensor) -> Tensor:
            x = m.first(x)
            return m.second(x) + x.mul_(2)

        return Net(call, first=nn.Linear(6, 6), second=nn.Linear(6, 6))

    with pytest.raises(ValueError, match=r"'second'.*changed in place.*gradients='vmap'"):
        by_hooks(careless, made(careless), normal(3, 6))
