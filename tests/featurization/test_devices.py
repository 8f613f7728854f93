"""Where tasks run. No GPU is needed; what one computes: ``tests/devices``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import trakdask as td
from trakdask.errors import KernelError
from trakdask.featurization import devices
from trakdask.featurization.devices import device_of_task
from trakdask.models.tasks import Forward
from trakdask.projection import stream

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        features = torch.relu(self.norm(self.conv(image))).mean((2, 3))
        return self.head(features * self.scale)


def model() -> td.Model:
    torch.manual_seed(0)
    return td.Model(Net, [Net().state_dict()])


def samples(n: int = 10) -> xr.Dataset:
    image = np.random.default_rng(0).standard_normal((n, 1, 6, 6)).astype("f4")
    return td.from_arrays({"image": image}, coords={"label": np.arange(n) % 3}, chunks=4)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    devices._automatic.cache_clear()
    yield
    devices._automatic.cache_clear()


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
@pytest.mark.parametrize("why", ["try pip install CuPy", None])
def test_device_of_task__automatic_is_an_accelerator_and_says_so(
    kind: str, why: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "_number_of", lambda asked: int(asked == kind))
    monkeypatch.setattr(devices, "missing", lambda: why)
    assert [device_of_task("auto") for _ in range(2)] == [torch.device(kind)] * 2
    (record,) = caplog.records  # once
    assert record.levelname == "WARNING"
    assert f"tasks run on {kind}" in record.getMessage()
    assert ("faster" in record.getMessage()) == (why is not None)


def test_featurize__like_others_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for here, kind in [("xpu", "xpu:1"), ("cuda", "auto")]:  # this process has none of the first
        monkeypatch.setattr(devices, "_number_of", lambda asked, here=here: 2 * (asked == here))
        like = td.featurize(samples(), model(), device="xpu:1")
        assert td.featurize(samples(3), model(), like=like).attrs["device"] == kind
        asked = td.featurize(samples(3), model(), like=like, device="cpu")
        assert asked.attrs["device"] == "cpu"


def test_free_bytes__of_a_device_that_tells_and_of_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tells = {"mem_get_info": lambda _: (7, 9), "memory_reserved": lambda _: 5}
    xpu = SimpleNamespace(**tells, memory_allocated=lambda _: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda d: xpu if d.type == "xpu" else object())
    assert devices.free_bytes(torch.device("xpu")) == 10
    assert devices.free_bytes(torch.device("mps")) > 2**20

    def keeps_no_books(_: torch.device) -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    xpu.memory_reserved = keeps_no_books  # as where torch takes its memory from RMM
    assert devices.free_bytes(torch.device("xpu")) == 7


def test_applied__counts_who_needs_a_setting() -> None:
    """The first task that ends leaves the settings to the others."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    settings = {"autocast": "off", "float32_matmul_precision": "high", "cudnn_allow_tf32": "False"}
    first, second = (devices.applied(settings, torch.device("cpu")) for _ in range(2))
    with second:
        with first:
            pass
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (
            *("high", False),
        )
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_featurize__says_whether_convolutions_may_round() -> None:
    for allowed in (True, False):
        with torch.backends.cudnn.flags(allow_tf32=allowed):
            attrs = td.featurize(samples(), model()).attrs
        assert attrs["cudnn_allow_tf32"] == str(allowed)


def test_featurize__threads_share_what_was_moved_or_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[Forward] = []
    cast = Forward.to
    monkeypatch.setattr(
        Forward, "to", lambda forward, dtype: moves.append(forward) or cast(forward, dtype)
    )
    two = td.Model(Net, [Net().state_dict(), Net().state_dict()])
    options = {"projector": td.SJLT(8), "dtype": "float64"}
    found = td.featurize(samples(), two, **options).feature.compute(scheduler="threads")
    expected = td.featurize(samples(), two, **options).feature.compute(scheduler="sync")
    assert len(moves) == 2  # once per checkpoint, for 12 blocks
    np.testing.assert_array_equal(found, expected)


@NO_GPU
def test_featurize__gpu_asked_for_and_not_there() -> None:
    features = td.featurize(samples(), model(), device="cuda")
    with pytest.raises(td.errors.BlockError, match=r"samples \d+:\d+ .*GPU"):
        features.compute(scheduler="sync")


@pytest.mark.parametrize(
    "error",
    [
        *(KernelError, ImportError, torch.OutOfMemoryError),
        partial(RuntimeError, "MPS backend out of memory"),
    ],
)
def test_featurize__no_sample_is_blamed_for_its_device(
    error: Callable[[str], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error("of the machine")

    monkeypatch.setattr(stream.ProjectionStream, "add", fail)
    options = {"projector": td.Rademacher(8), "gradients": "loop", "on_error": "record"}
    features = td.featurize(samples(1), model(), **options)
    with pytest.raises(td.errors.BlockError, match="of the machine"):
        features.compute(scheduler="sync")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        *map(
            RuntimeError,
            [
                "CUBLAS_STATUS_ALLOC_FAILED",
                "[enforce fail] DefaultCPUAllocator: can't allocate memory",
                "std::bad_alloc: out_of_memory: RMM failure: Maximum pool size exceeded",
            ],
        ),
    ],
)
def test_featurize__micro_batch_is_halved_where_memory_runs_out(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"projector": td.Rademacher(8), "gradients": "loop"}
    expected = td.featurize(samples(), model(), **options).compute(scheduler="sync")
    add = stream.ProjectionStream.add

    def fail(self: stream.ProjectionStream, name: str, gradient: Tensor, *rest: Any) -> None:
        if len(gradient) > 1:
            raise error
        add(self, name, gradient, *rest)

    monkeypatch.setattr(stream.ProjectionStream, "add", fail)
    found = td.featurize(samples(), model(), **options).compute(scheduler="sync")
    # The loop takes each gradient alone, so the bits are ours; torch computes Q in batches.
    np.testing.assert_array_equal(found.feature, expected.feature)
    np.testing.assert_allclose(found.out_to_loss, expected.out_to_loss, rtol=1e-5)
    assert "out of memory: continuing with micro-batches of 1 samples" in caplog.text
