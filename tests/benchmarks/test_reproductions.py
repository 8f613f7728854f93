"""What the reproductions compute from a definition of their own, against autograd and torch."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

HERE = Path(__file__).parent


@pytest.fixture
def wine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("reproduce_wine")


@pytest.fixture
def removal(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("reproduce_removal")


@pytest.mark.slow
def test_wine__exact_influences_by_autograd_one_by_one(wine: ModuleType) -> None:
    """The Hessian by differentiating the gradient of the mean loss, entry by entry."""
    data = wine.wine(24)
    net = wine.trained(data, 0, 2).double()
    parameters = list(net.parameters())
    x, y = torch.from_numpy(data.x).double(), torch.from_numpy(data.y)

    def gradient(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(net(inputs), labels)
        parts = torch.autograd.grad(loss, parameters, create_graph=True)
        return torch.cat([part.ravel() for part in parts])

    rows = [torch.autograd.grad(g, parameters, retain_graph=True) for g in gradient(x, y)]
    matrix = torch.stack([torch.cat([part.ravel() for part in row]) for row in rows])
    x_test, y_test = torch.from_numpy(data.x_test).double(), torch.from_numpy(data.y_test)
    of_target, of_sample = gradient(x_test[:1], y_test[:1]), gradient(x[3:4], y[3:4])
    damped = matrix + 0.1 * torch.eye(len(matrix), dtype=torch.float64)
    expected = float(of_sample.detach() @ torch.linalg.solve(damped, of_target.detach()))
    found = wine.exact_influences(net, data)["Hessian"]
    assert found.shape == (106, 54)
    assert found[3, 0] == pytest.approx(expected)


def test_wine__agrees_with_the_same_matrix(wine: ModuleType) -> None:
    found = wine.results(24, 20)
    assert found["Pearson, Gauss-Newton of f"] > 0.999999
    assert found["Pearson of means, Gauss-Newton of f"] > 0.999999
    assert 0 < found["Pearson, Hessian"] < 0.9999
    assert 0 <= found["AUC, self-influence"] <= 1


def test_removal__networks_side_by_side_are_networks(removal: ModuleType) -> None:
    data = removal.diabetes()
    networks = removal.trained(data.x, data.y, 0, 3, 2)
    x = torch.from_numpy(data.x_query)
    together = networks(x.expand(3, -1, -1))
    for i in range(3):
        net = removal.network()
        net.load_state_dict(networks.state(i))
        torch.testing.assert_close(together[i], net(x)[:, 0])
    assert not torch.allclose(together[0], together[1])
    again = removal.trained(data.x, data.y, 0, 3, 2)(x.expand(3, -1, -1))
    assert torch.equal(again, together)


def test_removal__one_network_is_trained_as_torch_does(removal: ModuleType) -> None:
    """Plain SGD on one network, in the order that the function draws."""
    data = removal.diabetes()
    found = removal.trained(data.x, data.y, 4, 1, 1)
    torch.manual_seed(4)
    net, x, y = removal.network(), torch.from_numpy(data.x), torch.from_numpy(data.y)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.03, weight_decay=1e-5)
    for rows in torch.rand(1, len(y)).argsort(1)[0].split(32):
        if len(rows) == 32:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(x[rows])[:, 0], y[rows]).backward()
            optimizer.step()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(found.state(0)[name], value)
