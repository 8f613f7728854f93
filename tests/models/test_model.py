"""The model value: modules per thread, and parameters that are chosen by name."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from tests.waiting import Overlap
from trakdask.models.model import Model
from trakdask.models.modules import select_parameters
from trakdask.torch_internals import no_fast_path


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def state(seed: int = 0, build=mlp) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return build().state_dict()


def test_forward__threads_do_not_share_a_module() -> None:
    """One shared module gives wrong outputs silently: functional_call swaps its tensors."""
    model = Model(mlp, [state(0), state(1)])
    x = torch.randn(64, 4)
    expected = [model.forward(c)(x) for c in model.checkpoints]

    def is_right(i: int) -> bool:
        return torch.equal(model.forward(model.checkpoints[i % 2])(x), expected[i % 2])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_right, range(400)))


def test_model__is_the_module_inside_one_that_divides_batches() -> None:
    module = nn.Linear(4, 3)
    parallel = nn.DataParallel(module)
    x = torch.randn(2, 4)
    for model in (Model(parallel), Model(parallel, [parallel.state_dict()])):
        assert model.shapes == {"weight": (3, 4), "bias": (3,)}
        assert torch.equal(model.forward(model.checkpoints[0])(x), module(x))


def test_model__is_built_by_one_thread_at_a_time() -> None:
    """``from_pretrained`` changes global state while it builds."""
    overlap, begun = Overlap(), threading.Barrier(3)

    def build() -> nn.Module:
        with overlap.entered():
            return mlp()

    model = Model(build, [state()])
    with ThreadPoolExecutor(3) as pool:
        modules = list(pool.map(lambda _: (begun.wait(), model.meta_module()), range(3)))
    assert len({id(module) for _, module in modules}) == 3
    assert overlap.most == 1


def test_no_fast_path__the_last_user_restores_it() -> None:
    """As with two tasks, where the first one to begin is the first one to end."""
    get = torch.backends.mha.get_fastpath_enabled
    first, second = no_fast_path(), no_fast_path()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not get()
    second.__exit__(None, None, None)
    assert get()


def partly_frozen() -> nn.Module:
    module = mlp()
    module[0].requires_grad_(False)
    return module


@pytest.mark.parametrize("build", [partly_frozen, partly_frozen()])
def test_model__predicate_sees_which_parameters_are_frozen(build) -> None:
    model = Model(build, [state()], parameters=lambda _, parameter: parameter.requires_grad)
    assert list(model.shapes) == ["2.weight", "2.bias"]
    whole = Model(build, [state()])
    assert len(whole.shapes) == 4
    assert ["frozen" in repr(each) for each in (model, whole)] == [False, True]


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
