"""Regression against the derivative of half the squared error."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trakdask.models.tasks import Batch, Regression


def net(n_outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, n_outputs)).double()


def data(n: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return Batch(x=x, y=torch.randn(n, generator=generator, dtype=torch.float64))


def test_regression__q_is_minus_the_derivative_of_the_loss(run) -> None:
    batch = data()
    f = net()(batch["x"])[:, 0].detach().requires_grad_()
    (slope,) = torch.autograd.grad((0.5 * (batch["y"] - f) ** 2).sum(), f)
    _, output, q = run(net(), "regression", batch)
    torch.testing.assert_close(output, f.detach().float())
    torch.testing.assert_close(q, -slope.float())
    assert (q < 0).any()
    assert (q > 0).any()


def test_regression__gradients(check_gradients) -> None:
    def output(module: nn.Module, sample: Batch) -> Tensor:
        return module(sample["x"])[0, 0]

    check_gradients(net(), Regression(), data(), output)


def test_regression__shapes_of_one_number_per_sample(run) -> None:
    batch = data()
    flat = nn.Sequential(net(), nn.Flatten(0))
    column = Batch(batch, y=batch["y"][:, None])
    expected = run(net(), "regression", batch)
    for module, samples in ((flat, batch), (net(), column)):
        _, f, q = run(module, Regression("x"), samples)
        assert torch.equal(f, expected[1])
        assert torch.equal(q, expected[2])
