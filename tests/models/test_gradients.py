"""Engines against a loop of ``backward()`` on a plain module; tasks against the formulas."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from tests.models.engines import backward, equal, run
from trakdask.models.gradients import ENGINES, require_same_as_loop, vmap_gradients
from trakdask.models.layers import choose_engine
from trakdask.models.model import Model
from trakdask.models.tasks import Batch, Forward, ImageClassification


class Net(nn.Module):
    """Convolution, normalisation with running statistics, a scalar parameter, an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.idle = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().flatten(1)) * self.temperature


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    module = Net().to(dtype)
    module.norm.running_mean.normal_()
    module.norm.running_var.uniform_(0.5, 2)
    return module.eval()


def batch(n: int = 5, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(n, 1, 4, 4, generator=generator, dtype=dtype)
    return Batch(image=image, label=torch.arange(n) % 4)


def margin(logits: Tensor, label: int) -> Tensor:
    """log p/(1-p), written as in the paper."""
    p = logits.softmax(0)[label]
    return (p / (1 - p)).log()


def output_of(module: nn.Module, sample: Batch) -> Tensor:
    return margin(module(sample["image"])[0], int(sample["label"]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("n", [1, 5])
def test_engine__equals_backward(engine: str, n: int) -> None:
    data = batch(n)
    found, output, q = run(Model(net()), data, engine)
    gradients, outputs = backward(net(), output_of, data)
    equal(found, gradients)
    torch.testing.assert_close(output, outputs.float())
    p = net()(data["image"]).softmax(1)[torch.arange(n), data["label"]]
    torch.testing.assert_close(q, (1 - p).float().detach())


class _Weighted(torch.autograd.Function):
    """x * weight, which refuses to give the gradient of its weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad: Tensor):
        if ctx.needs_input_grad[1]:
            raise AssertionError("the gradient of an unselected parameter was asked for")
        return grad * ctx.saved_tensors[0], None


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.guarded = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_Weighted.apply(self.first(x), self.guarded))


@pytest.mark.parametrize("engine", ENGINES)
def test_engine__never_differentiates_unselected_parameters(engine: str) -> None:
    data = Batch(image=torch.randn(3, 4), label=torch.arange(3))
    found, *_ = run(Model(Guarded(), parameters="first.weight"), data, engine)
    assert found["first.weight"].shape == (3, 16)
    with pytest.raises(AssertionError, match="unselected"):
        run(Model(Guarded(), parameters="guarded"), data, engine)  # the guard works


def test_hooks__one_pass_for_gradients_output_and_q() -> None:
    model, data, sizes = Model(net(), parameters="*.*"), batch(), list[int]()
    model.meta_module().register_forward_hook(lambda part, args, out: sizes.append(len(out)))
    run(model, data)
    assert sizes.count(5) == 1
    assert sum(sizes) <= 5 + 2 + 3 + 2  # the plan of the hooks takes passes once
    run(model, data)
    assert sizes.count(5) == 2
    assert sum(sizes) <= 2 * 5 + 2 + 3 + 2


def test_hooks__leave_nothing_behind() -> None:
    """Cycles would keep a batch's activations until the next garbage collection."""
    model, data = Model(net()), batch()
    run(model, data)
    alive: list[weakref.ref[Tensor]] = []
    handles = [
        part.register_forward_hook(lambda part, args, out: alive.append(weakref.ref(out)))
        for part in model.meta_module().modules()
    ]
    gc.collect()
    gc.disable()
    try:
        run(model, data)
        assert len(alive) >= 4
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()
        for handle in handles:
            handle.remove()


class SortsIfPositive(nn.Module):
    """Branches on values, and then lets its layer see the samples in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if x.max() < 0:
            return self.head(x)
        order = torch.argsort(x[:, 0], descending=True)
        return self.head(x[order])[torch.argsort(order)]


def test_hooks__rows_of_a_model_that_decides_on_values_are_compared() -> None:
    """f and Q of each sample are right, and so is the number of rows: only their order is not."""
    data = batch(dtype=torch.float32)
    data["image"][:, 0, 0, 0] = torch.arange(5)
    with pytest.raises(ValueError, match=r"same rows.*'loop'"):
        run(Model(SortsIfPositive()), data)
    data["image"][:, 0, 0, 0] = -torch.arange(5)
    model = Model(SortsIfPositive())
    expected = run(model, data, "loop")[0]
    torch.testing.assert_close(run(model, data)[0], expected)


def test_choose_engine() -> None:
    module, task = net(), ImageClassification()
    names = [name for name, _ in module.named_parameters()]
    assert choose_engine(module, task, names)[0] == "hooks"
    assert choose_engine(module, task, ["temperature"])[0] == "vmap"


@pytest.mark.parametrize("engine", ["hooks", "vmap"])
def test_require_same_as_loop__finds_a_wrong_gradient(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = Model(net()), batch(2)
    forward, names = model.forward(model.checkpoints[0]), tuple(model.shapes)
    require_same_as_loop(engine, forward, model.task, data, names)

    def wrong(forward: Forward, task, data: Batch, names, sink):
        def falsify(name: str, gradient: Tensor) -> None:
            sink(name, gradient * 1.1 if name == "conv.weight" else gradient)

        return vmap_gradients(forward, task, data, names, falsify)

    monkeypatch.setitem(ENGINES, engine, wrong)
    with pytest.raises(ValueError, match=rf"{engine}' .*differ from .*most in 'conv.weight'"):
        require_same_as_loop(engine, forward, model.task, data, names)
