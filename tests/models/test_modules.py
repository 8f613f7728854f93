"""Modules are prepared before they run, and their parameters are chosen by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trakdask as td
from trakdask.models.model import Model
from trakdask.models.modules import select_parameters


def compiled() -> nn.Module:
    return torch.compile(plain(), backend="eager")


def partly_compiled() -> nn.Module:
    module = plain()
    module[0] = torch.compile(module[0], backend="eager")
    return module


def compiled_in_place() -> nn.Module:
    module = plain()
    module.compile(backend="eager")
    return module


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


X = np.random.default_rng(0).standard_normal((6, 4)).astype("f4")


def features_of(model: td.Model, **variables: np.ndarray) -> np.ndarray:
    samples = td.from_arrays(variables, chunks=3)
    features = td.featurize(samples, model, projector=td.Identity())
    return features.compute(scheduler="sync").feature.values[:, :, 0]


def gradients_of(module: nn.Module, inputs: Tensor) -> np.ndarray:
    """Return the gradients of the output of each sample, by a loop of ``backward()``."""
    rows = []
    for i in range(len(inputs)):
        module.zero_grad()
        module(inputs[i : i + 1]).sum().backward()
        rows.append(torch.cat([p.grad.flatten() for p in module.parameters()]).numpy())
    return np.stack(rows)


@pytest.mark.parametrize("build", [compiled, partly_compiled, compiled_in_place])
def test_model__of_compiled_code_equals_backward(build) -> None:
    expected = gradients_of(plain(), torch.tensor(X))
    model = td.Model(build, [build().state_dict()], task="regression")
    found = features_of(model, x=X, y=np.zeros(6, "f4"))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def partly_frozen() -> nn.Module:
    module = plain()
    module[0].requires_grad_(False)
    return module


@pytest.mark.parametrize("build", [partly_frozen, partly_frozen()])
def test_model__predicate_sees_which_parameters_are_frozen(build) -> None:
    state = [plain().state_dict()]
    model = Model(build, state, parameters=lambda _, parameter: parameter.requires_grad)
    assert list(model.shapes) == ["2.weight", "2.bias"]
    whole = Model(build, state)
    assert len(whole.shapes) == 4
    assert ["frozen" in repr(each) for each in (model, whole)] == [False, True]


class SumOfEmbeddings(nn.Module):
    def __init__(self, max_norm: float | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 3, max_norm=max_norm)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids).square().sum((1, 2))[:, None]


def test_model__embeddings_with_max_norm_leave_the_checkpoint_alone() -> None:
    """``max_norm`` makes torch scale rows of the weight in the forward pass, in place."""
    ids = np.arange(8).reshape(4, 2)
    weight = torch.linspace(1, 2, 24).reshape(8, 3)
    variables = {"x": ids, "y": np.zeros(4, "f4")}
    gradients = {}
    for max_norm in (0.5, None):
        module = SumOfEmbeddings(max_norm)
        module.load_state_dict({"embedding.weight": weight})
        expected = gradients_of(module, torch.tensor(ids))
        model = td.Model(
            lambda max_norm=max_norm: SumOfEmbeddings(max_norm),
            [{"embedding.weight": weight.clone()}],
            task="regression",
        )
        gradients[max_norm] = features_of(model, **variables)
        np.testing.assert_allclose(gradients[max_norm], expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(gradients[0.5], gradients[None])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (None, ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ("2.*", ["2.weight", "2.bias"]),
        (["2.bias", "0.bias"], ["0.bias", "2.bias"]),
        ("*.weight", ["0.weight", "2.weight"]),
        (lambda name, tensor: tensor.ndim == 1, ["0.bias", "2.bias"]),
        (torch.nn.Sequential, ["0.weight", "0.bias", "2.weight", "2.bias"]),
    ],
)
def test_select_parameters__order_is_the_modules(selection, expected: list[str]) -> None:
    assert list(select_parameters(mlp(), selection)) == expected


def test_select_parameters__integers_have_no_gradient() -> None:
    module = mlp()
    module.codes = nn.Parameter(torch.arange(3), requires_grad=False)
    with pytest.raises(ValueError, match=r"'codes' with dtype torch\.int64"):
        select_parameters(module, "*")
    assert "codes" not in select_parameters(module, "[02].*")
