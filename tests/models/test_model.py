"""The model value: modules per thread, shapes that fit, parameters chosen by name."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from tests.waiting import Overlap
from trakdask.models.model import Model
from trakdask.torch_internals import no_fast_path


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def state(seed: int = 0, build=mlp) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return build().state_dict()


class Tied(nn.Module):
    """Two names for one matrix, and a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("shift", torch.full((4,), 2.0), persistent=False)
        self.register_buffer("scale", torch.full((4,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self.scale + self.shift


@pytest.mark.parametrize("names", [["a.weight", "b.weight"], ["a.weight"], ["b.weight"]])
def test_forward__tied_weights_and_buffers(names: list[str]) -> None:
    whole = state(build=Tied)
    partial = {n: t for n, t in whole.items() if n in [*names, "scale"]}  # safetensors drops twins
    model = Model(Tied, [partial])
    module = Tied()
    module.load_state_dict(whole)
    x = torch.randn(5, 4)
    assert model.shapes == {"a.weight": (4, 4)}
    torch.testing.assert_close(model.forward(model.checkpoints[0])(x), module(x), rtol=0, atol=0)


def test_forward__threads_do_not_share_a_module() -> None:
    """One shared module gives wrong outputs silently: functional_call swaps its tensors."""
    model = Model(mlp, [state(0), state(1)])
    x = torch.randn(64, 4)
    expected = [model.forward(c)(x) for c in model.checkpoints]

    def is_right(i: int) -> bool:
        return torch.equal(model.forward(model.checkpoints[i % 2])(x), expected[i % 2])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_right, range(400)))


def test_model__weights_of_a_module_are_pickled_once_and_apart() -> None:
    big = nn.Linear(1000, 1000)
    model = Model(big)
    assert len(cloudpickle.dumps(model.at_checkpoints(()))) < 10_000
    pickled = cloudpickle.dumps(model)
    assert len(pickled) < 1.01 * 4_004_000
    again = cloudpickle.loads(pickled)
    x = torch.randn(2, 1000)
    torch.testing.assert_close(again.forward(again.checkpoints[0])(x), big(x))


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
