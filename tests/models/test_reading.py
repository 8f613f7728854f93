"""A model is read once, and calls leave it as it was: ties, state outside the state dict, modes.

The oracle is a loop of ``backward()`` over a module that is built anew for each sample, and has
loaded the checkpoint.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, cycle, product, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trakdask as td
from trakdask.models import reading
from trakdask.models.tasks import Batch, Forward

X = np.random.default_rng(0).integers(0, 9, (6, 4))
ENGINES = ("auto", "vmap", "loop")


class First:
    """The first of the outputs."""

    variables = ("x",)

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        return forward(batch["x"])[:, 0]

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        return forward(batch["x"])[:, 0].detach()


class Net(nn.Module):
    """Embeds tokens; subclasses add state, and what becomes of the last layer's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(9, 3), nn.Linear(3, 3)
        self.start()
        self.double()

    def start(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.layer(self.embed(x))).mean(1)

    def end(self, y: Tensor) -> Tensor:
        return y


def state_of(build: Callable[[], nn.Module], seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return build().state_dict()


def expected(build: Callable[[], nn.Module], state: dict[str, Any]) -> np.ndarray:
    rows = []
    for sample in torch.tensor(X):
        module = build().eval()
        module.load_state_dict(state)
        module(sample[None])[:, 0].sum().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
        rows.append(torch.cat([grad.flatten() for grad in grads]).numpy())
    return np.stack(rows)


def found(model: td.Model, how: Any = "sync", **options: Any) -> np.ndarray:
    samples = td.from_arrays({"x": X}, chunks=2)
    lazy = td.featurize(samples, model, projector=td.Identity(), **options)
    return lazy.compute(scheduler=how).feature.values[:, :, 0]


def same(actual: np.ndarray, wanted: np.ndarray) -> None:
    """Features are float32."""
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())


# --------------------------------------------------------------------------------------------- ties


class TwoNames(Net):
    """A submodule with two names, whose weight is that of the last layer, too."""

    def start(self) -> None:
        self.twice = self.embed
        self.head = nn.Linear(3, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.embed(x) + self.twice(x.flip(1))))).mean(1)


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = TwoNames()
        self.also = self.net.twice

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.also(x).sum((1, 2))[:, None]


class Shared(Net):
    """A layer without a rule, a bias and a buffer that are used twice, and a norm of one tensor."""

    def start(self) -> None:
        self.cells = nn.ModuleList([nn.RNN(3, 3, batch_first=True)] * 2)
        self.norm, self.scaled = nn.LayerNorm(3), nn.ModuleList([nn.Module(), nn.Module()])
        self.norm.bias = self.norm.weight
        self.layer.bias = self.norm.weight
        for part in self.scaled:
            part.register_buffer("scale", torch.full((3,), 2.0))
        self.scaled[1].scale = self.scaled[0].scale

    def end(self, y: Tensor) -> Tensor:
        for cell in self.cells:
            y = cell(y)[0]
        return self.norm(y * self.scaled[0].scale * self.scaled[1].scale)


class InList(Net):
    """A weight that is used by way of a list."""

    def start(self) -> None:
        self.hidden = [self.layer.weight]

    def end(self, y: Tensor) -> Tensor:
        return y @ self.hidden[0]


REFUSED = [(InList, "hooks"), (Shared, "vmap")]  # used elsewhere; recurrent
TIES = product((TwoNames, Inside, Shared, InList), (*ENGINES, "hooks"))
NAMES = ("embed.weight", "twice.weight", "head.weight")  # of one tensor


@pytest.mark.parametrize(
    ("build", "engine", "left_out"),
    [
        *((*pair, ()) for pair in TIES if pair not in REFUSED),
        *((TwoNames, "auto", {*NAMES} - {name}) for name in NAMES),
    ],
)
def test_forward__ties(build: Any, engine: str, left_out: Any, tmp_path: Path) -> None:
    """Tied tensors are one, also where a file has only one of their names."""
    whole = state_of(build)
    once = {name: tensor for name, tensor in whole.items() if name not in left_out}
    torch.save(once, tmp_path / "c.pt")
    model = td.Model(build, [tmp_path / "c.pt"], task=First())
    for _ in range(2):  # the second time the module has been called
        same(found(model, gradients=engine), expected(build, whole))


def test_forward__task_of_traker_that_calls_the_module_itself() -> None:
    class Own:
        def get_output(self, model: Any, weights: Any, buffers: Any, x: Tensor) -> Tensor:
            call = torch.func.functional_call
            outputs = [call(model, (weights, buffers), (x[None],)) for _ in range(2)]
            return (outputs[0] + outputs[1])[0, 0] / 2

        def get_out_to_loss_grad(self, model: Any, weights: Any, buffers: Any, batch: Any) -> Any:
            return torch.func.functional_call(model, (weights, buffers), tuple(batch))[:, 0]

    whole = state_of(TwoNames)
    model = td.Model(TwoNames, [whole], task=Own())
    for engine in ("auto", "loop", "auto"):
        same(found(model, gradients=engine), expected(TwoNames, whole))
    with pytest.raises(td.errors.BlockError, match=r"try gradients='vmap'"):
        found(model, gradients="hooks")


# ------------------------------------------------------------ modules that change in a forward pass


class Remembers(Net):
    """Adds what the last batch has left, in an attribute, a list and an object."""

    def start(self) -> None:
        self.last, self.all, self.kept = None, [], SimpleNamespace(last=0.0)
        self.seen = Counter[int]()

    def end(self, y: Tensor) -> Tensor:
        mixed = y + self.kept.last + sum(self.all)
        if self.last is not None:
            mixed = mixed + self.last
        self.last = self.kept.last = y.detach().sum()
        self.all.append(self.last)
        self.seen.update([1])
        return mixed * self.seen[1]


class Counts(Net):
    def start(self) -> None:
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("m", torch.zeros(()), persistent=False)
        self.calls, self.plain = 0, torch.zeros(())

    def end(self, y: Tensor) -> Tensor:
        self.n += 1
        self.m.add_(1)
        self.plain.add_(1)
        self.calls += 1
        return y * (self.n + self.m + self.plain + self.calls)


class Makes(Net):
    """Makes a buffer, a parameter and a submodule in its first forward pass."""

    def end(self, y: Tensor) -> Tensor:
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.arange(1.0, 4))
            self.other = nn.Parameter(torch.arange(1.0, 4))
            self.drop = nn.Dropout(1.0).eval()
        return self.drop(y * self.made + self.other)


class Flips(Net):
    """Leaves training mode on, in which its next pass is another one."""

    def start(self) -> None:
        self.drop, self.handle = nn.Dropout(), None

    def end(self, y: Tensor) -> Tensor:
        self.handle = self.layer.register_forward_hook(lambda part, inputs, output: 2 * output)
        try:
            return self.drop(y)
        finally:
            self.train()


class Renormed(Net):
    """``max_norm`` scales rows of a weight in the forward pass, in place."""

    def start(self) -> None:
        self.embed = nn.Embedding(9, 3, max_norm=0.5)


def test_forward__a_checkpoint_is_left_alone_by_max_norm() -> None:
    whole = state_of(Renormed)
    for build in (Renormed, Net, Renormed):
        same(found(td.Model(build, [whole], task=First())), expected(build, whole))


def compiled() -> nn.Module:
    return torch.compile(Net(), backend="eager")


def compiled_in_place() -> nn.Module:
    module = Net()
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("build", [compiled, compiled_in_place])
def test_forward__of_compiled_code(build: Any) -> None:
    model = td.Model(build, [state_of(build)], task=First())
    same(found(model, gradients="hooks"), expected(Net, state_of(Net)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("build", [Remembers, Counts, Makes, Flips])
def test_forward__of_modules_that_change_themselves(build: type[Net], engine: str) -> None:
    whole = state_of(build)
    model = td.Model(build, [whole], task=First())
    inside = [name for name, _ in model.meta_module().named_parameters()]
    wanted = expected(build, whole)[:, -sum(map(math.prod, model.shapes.values())) :]
    same(found(model, gradients=engine), wanted)  # a new parameter is none of the model's
    assert [name for name, _ in model.meta_module().named_parameters()] == inside


@pytest.mark.parametrize(
    ("change", "engine"),
    [
        (lambda weight: weight.detach().clamp_(min=0), "auto"),
        (lambda weight: weight.data[0].mul_(0.5), "vmap"),
        (lambda weight: torch.add(weight.data, 1, out=weight.data), "auto"),
        (lambda weight: torch._foreach_neg_([weight.data]), "auto"),
    ],
)
def test_forward__a_parameter_that_is_changed_in_place_is_named(change: Any, engine: str) -> None:
    class Changes(Net):
        def forward(self, x: Tensor) -> Tensor:
            change(self.layer.weight)
            return super().forward(x)

    model = td.Model(Changes, [state_of(Net)], task=First())
    for _ in range(2):
        with pytest.raises(td.errors.BlockError, match=r"'layer\.weight' changed in place.*; try"):
            found(model, gradients=engine)
    whole = state_of(Net)  # the same weights, which others use, too
    same(found(td.Model(Net, [whole], task=First())), expected(Net, whole))


# --------------------------------------------------------------------- state outside the state dict


@dataclass
class Settings:
    scale: Any


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: Any) -> None:
        self.scale = scale


def closure(scale: Any) -> Callable[[], Any]:
    return lambda: scale


HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda t: t, lambda h: h),
    "list": (lambda t: [t], lambda h: h[0]),
    "tuple in dict": (lambda t: {"a": (1, t)}, lambda h: h["a"][1]),
    "object": (lambda t: SimpleNamespace(inner=Settings(t)), lambda h: h.inner.scale),
    "slots": (Slotted, lambda h: h.scale),
    "closure": (closure, lambda h: h()),
    "default": (lambda t: lambda scale=t: scale, lambda h: h()),
    "array": (lambda t: [t.numpy()], lambda h: torch.as_tensor(h[0])),
    "number": (lambda t: float(t[0]), lambda h: h),
    "numbers": (lambda t: t.tolist(), lambda h: torch.tensor(h)),
    "sparse": (lambda t: t.to_sparse(), lambda h: h.to_dense()),
}


def with_state(holder: str, draw: Callable[[], Tensor]) -> type[Net]:
    put, get = HOLDERS[holder]

    class Scaled(Net):
        def start(self) -> None:
            self.state = put(draw())

        def end(self, y: Tensor) -> Tensor:
            return y * get(self.state)

    return Scaled


def with_buffer(draw: Callable[[], Tensor]) -> type[Net]:
    class Scaled(Net):
        def start(self) -> None:
            self.layer.register_buffer("state", draw(), persistent=False)

        def end(self, y: Tensor) -> Tensor:
            return y * self.layer.state

    return Scaled


def drawn() -> Tensor:
    return torch.rand(3, dtype=torch.float64)


@pytest.mark.parametrize("holder", HOLDERS)
def test_model__state_that_each_build_draws_is_named(holder: str) -> None:
    build = with_state(holder, drawn)
    with pytest.raises(ValueError, match=r"difference in 'state'.*register_buffer.*manual_seed"):
        td.Model(build, [state_of(build)], task=First())
    fixed = with_state(holder, lambda: torch.arange(1, 4).double())
    whole = state_of(fixed)
    same(found(td.Model(fixed, [whole], task=First())), expected(fixed, whole))
    module, other = build(), build()  # which travel themselves
    same(found(td.Model(module, task=First())), gradients_of(module))
    other.load_state_dict(module.state_dict())
    codes = [td.Model(each).spec()["code"] for each in (module, module, other)]
    assert codes[0] == codes[1]
    assert codes[0] != codes[2] or holder in ("number", "numbers")


def gradients_of(module: nn.Module) -> np.ndarray:
    return expected(lambda: module.requires_grad_().zero_grad() or module, module.state_dict())


def test_model__other_state_that_each_build_draws_is_named() -> None:
    def hooked() -> nn.Module:
        module, noise = Net(), torch.rand(3)
        module.layer.register_forward_hook(lambda part, inputs, output: output + noise)
        return module

    def beside(part: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Linear(3, 3), part())

    activations = cycle([nn.ReLU, nn.Tanh, nn.GELU])
    layers = (lambda: nn.LayerNorm(3, eps=random.random()), lambda: next(activations)())
    for build, name in (
        *((beside(layer), "the layers and their options") for layer in layers),
        (with_buffer(drawn), r"layer\.state"),
        (hooked, r"layer\._forward_hooks"),
    ):
        with pytest.raises(ValueError, match=f"difference in '{name}'"):
            td.Model(build, [state_of(build)])


def helper(layer: Any) -> Any:
    return layer.kept


NUMBERED: dict[str, tuple[Callable[[Any, Tensor], Any], bool]] = {
    "unused": (lambda net, y: y, True),
    "of another function": (lambda net, y: y * id(net) / id(net), True),
    "by name": (lambda net, y: y * getattr(net, "kept"), False),  # noqa: B009
    "by a function": (lambda net, y: y * helper(net), False),
    "by a function inside": (lambda net, y: y * sum(part.kept for part in [net]), False),
}


@pytest.mark.parametrize("case", NUMBERED)
def test_model__numbers_that_no_call_reads_may_differ(case: str) -> None:
    end, is_label = NUMBERED[case]
    numbers = iter(range(1, 99))

    class Numbered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.id = self.kept = next(numbers)
            self.names = {"first": self.id, "second": float(self.id)}

        def extra_repr(self) -> str:
            return f"{self.id} {self.kept} {self.names}"

    Numbered.end = end  # type: ignore[method-assign]
    state = state_of(Numbered)
    if is_label:
        same(found(td.Model(Numbered, [state], task=First()), "threads"), expected(Numbered, state))
    else:
        with pytest.raises(ValueError, match="difference in 'kept'"):
            td.Model(Numbered, [state])


def test_model__a_build_that_differs_in_another_thread_is_named() -> None:
    builds = chain([1.0, 1.0], repeat(2.0))  # threads may fail one after the other
    build = with_state("tensor", lambda: torch.full((3,), next(builds)))
    state = state_of(with_state("tensor", lambda: torch.ones(3)))
    model = td.Model(build, [state], task=First())
    with pytest.raises(td.errors.BlockError, match="difference in 'state'"):
        found(model, "threads")


@pytest.mark.parametrize("hide", [lambda weight: (weight,), lambda weight: weight.data[:2]])
def test_model__a_parameter_where_none_can_be_put_is_named(hide: Callable[[Tensor], Any]) -> None:
    class Hidden(Net):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = hide(self.layer.weight)

    with pytest.raises(ValueError, match=r"'layer\.weight' also in 'hidden.*; try"):
        td.Model(Hidden())


class Saves(Net):
    """Extra state that is a tensor."""

    def start(self) -> None:
        self.phase = drawn()

    def end(self, y: Tensor) -> Tensor:
        return y * self.phase

    def get_extra_state(self) -> Any:
        return self.phase

    def set_extra_state(self, state: Any) -> None:
        self.phase = state


class SavesMore(Saves):
    def get_extra_state(self) -> Any:
        return {"phase": [self.phase], "version": "2"}

    def set_extra_state(self, state: Any) -> None:
        assert state["version"] == "2"
        (self.phase,) = state["phase"]


class Renames(Net):
    """Saves and loads under other names, one of them transposed before version 2."""

    _version = 2

    def start(self) -> None:
        self.register_state_dict_post_hook(rename)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        state[f"{prefix}layer.weight"] = state.pop(f"{prefix}w")
        if metadata.get("version", 1) < 2:
            state[f"{prefix}layer.weight"] = state[f"{prefix}layer.weight"].T
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def rename(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    state[f"{prefix}w"] = state.pop(f"{prefix}layer.weight")


class RenamesOld(Net):
    """Knows old names; before version 3 a weight was transposed."""

    _version = 3

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        for name in ("weight", "bias"):
            if f"{prefix}linear.{name}" in state:
                state[f"{prefix}layer.{name}"] = state.pop(f"{prefix}linear.{name}")
        if metadata.get("version", 1) < 3:
            state[f"{prefix}layer.weight"] = state[f"{prefix}layer.weight"].T
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = RenamesOld()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize(
    ("build", "prefix", "options", "old"),
    [
        (RenamesOld, "", {}, True),
        *((Within, "module.", {}, old) for old in (False, True)),
        (RenamesOld, "model.net.", {}, False),
        (RenamesOld, "model.net.", {"prefix": "model.net"}, True),
        (Within, "a.module._orig_mod.", {"prefix": "a.module"}, False),
    ],
)
def test_forward__versions_of_modules_are_those_below_a_prefix(
    build: Any, prefix: str, options: Any, old: bool, tmp_path: Path
) -> None:
    state = state_of(build)
    saved, versions = type(state)(state), state._metadata
    if old:
        saved = {name.replace("layer.", "linear."): tensor for name, tensor in state.items()}
    saved = type(state)((prefix + name, tensor) for name, tensor in saved.items())
    saved._metadata = {f"{prefix}{n}".removesuffix("."): version for n, version in versions.items()}
    torch.save({"state_dict": saved, "epoch": 1}, tmp_path / "1.ckpt")
    for given in (saved, tmp_path / "1.ckpt"):
        model = td.Model(build, [given], task=First(), **options)
        same(found(model), expected(build, state))
    if build is Within and not old:  # tensors of a module inside of the model
        alone = td.Model(Within, [state_of(RenamesOld)], task=First())
        same(found(alone), expected(Within, state))


@pytest.mark.parametrize("build", [Saves, SavesMore, Renames])
def test_forward__of_modules_that_load_themselves(build: type[Net], tmp_path: Path) -> None:
    states = [state_of(build, seed) for seed in range(3)]
    torch.save(states[1], tmp_path / "1.pt")
    model = td.Model(build, [states[0], tmp_path / "1.pt", states[2]], task=First())
    for how in ("sync", "threads"):
        samples = td.from_arrays({"x": X}, chunks=2)
        features = td.featurize(samples, model, projector=td.Identity()).compute(scheduler=how)
        for i, state in enumerate(states):
            same(features.feature.values[:, :, i], expected(build, state))
    module = build()
    same(found(td.Model(module, task=First())), expected(build, module.state_dict()))


@pytest.mark.slow
@pytest.mark.usefixtures("process_client")
def test_featurize__state_outside_is_the_same_wherever_it_runs() -> None:
    for module in (with_state("object", drawn)(), SavesMore()):
        model, wanted = td.Model(module, task=First()), gradients_of(module)
        for how in ("sync", "threads", None):
            same(found(model, how), wanted)


def test_featurize__a_module_is_read_once_in_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[reading.Reading] = []
    digests = reading.Reading.digests

    def counted(self: reading.Reading, *arguments: Any, **options: Any) -> dict[str, str]:
        calls.append(self)
        return digests(self, *arguments, **options)

    monkeypatch.setattr(reading.Reading, "digests", counted)
    model = td.Model(TwoNames, [state_of(TwoNames), state_of(TwoNames, 1)], task=First())
    lazy = td.featurize(td.from_arrays({"x": X}, chunks=1), model, projector=td.Identity())
    n = len(calls)
    lazy.compute(scheduler="sync")
    assert len(calls) == n


# ------------------------------------------------------------------------------- other surroundings


@pytest.mark.parametrize(
    ("mode", "engine"),
    [(torch.no_grad, "auto"), *((torch.inference_mode, e) for e in (*ENGINES, "hooks"))],
)
def test_featurize__where_gradients_are_switched_off(mode: Any, engine: str) -> None:
    state = state_of(Net)
    with mode():
        copies = {name: tensor.clone() for name, tensor in state.items()}
        inside = found(td.Model(Net, [copies], task=First()), gradients=engine)
        module = with_buffer(lambda: torch.ones(3))()
        module.load_state_dict(state)
    same(inside, expected(Net, state))
    model = td.Model(Net, [copies], task=First())
    same(found(model, gradients=engine), expected(Net, state))
    same(found(td.Model(module, task=First()), gradients=engine), expected(Net, state))
