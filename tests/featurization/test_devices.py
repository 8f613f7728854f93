"""Where tasks run. No GPU is needed: what one would do is done by emulated kernels, or on ``meta``.

The device ``meta`` refuses to meet tensors of the CPU, as a GPU does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import dask
import numpy as np
import pytest
import torch
import xarray as xr
from distributed import Client, SpecCluster, Worker
from distributed.scheduler import Scheduler
from torch import Tensor, nn

import trakdask as td
from tests.projection.cuda.emulator import COMPILER, EmulatedKernels
from trakdask.featurization import devices
from trakdask.featurization.devices import (
    check_device,
    compute_options,
    device_of_task,
    on_device,
)
from trakdask.featurization.memory import available_bytes
from trakdask.featurization.precision import Precision
from trakdask.models import gradients
from trakdask.models.tasks import Batch
from trakdask.projection import stream
from trakdask.projection.cuda import projector as with_kernels

META = torch.device("meta")
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


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_check_device__accepted(device: str) -> None:
    assert check_device(device) == device


@pytest.mark.parametrize("device", ["gpu", "meta", 3, None, torch.device("cpu")])
def test_check_device__refused(device: object) -> None:
    with pytest.raises(ValueError, match=r"device is .*; needed 'auto', .*Type device='auto'"):
        td.featurize(samples(), model(), device=device)  # type: ignore[arg-type]


@NO_GPU
def test_device_of_task__automatic_is_the_cpu_where_there_is_no_gpu(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    assert device_of_task("auto") == torch.device("cpu")
    assert "tasks run on the CPU: torch" in caplog.text


def test_device_of_task__automatic_is_the_gpu_if_kernels_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "missing", lambda: None)
    assert device_of_task("auto") == torch.device("cuda")


@NO_GPU
def test_featurize__gpu_asked_for_and_not_there() -> None:
    features = td.featurize(samples(), model(), device="cuda")
    with pytest.raises(td.BlockError, match=r"samples .*torch.*needs a GPU on every worker"):
        features.compute(scheduler="sync")


def test_featurize__attrs_say_the_device() -> None:
    named = {td.featurize(samples(), model(), device=d).attrs["device"] for d in ("auto", "cuda")}
    assert named == {"auto", "cuda"}


def test_on_device__takes_all_tensors_along() -> None:
    here = model()
    forward = here.forward(here.checkpoints[0])
    assert on_device(forward, torch.device("cpu")) is forward
    there = on_device(forward, META)
    tensors = {**there.parameters, **there.buffers}
    assert set(tensors) == {*forward.parameters, "scale"}
    assert {tensor.device for tensor in tensors.values()} == {META}
    assert there(torch.zeros(2, 1, 6, 6, device=META)).shape == (2, 3)


@pytest.mark.parametrize("engine", ["vmap", "hooks"])
def test_engines__stay_on_the_device(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_reads_values", lambda *_: False)  # there are none on meta
    here, found = model(), {}
    forward = on_device(here.forward(here.checkpoints[0]), META)
    label = torch.zeros(4, dtype=torch.long, device=META)
    batch = Batch(image=torch.zeros(4, 1, 6, 6, device=META), label=label)

    def sink(name: str, gradient: Tensor, first: int | None = None) -> None:
        found[name] = gradient.device

    # The scalar that hooks hang the graph on is on the CPU, which other devices do not mind.
    with META if engine == "hooks" else nullcontext():
        run = gradients.ENGINES[engine]
        output, out_to_loss = run(forward, here.task, batch, list(here.shapes), sink)
    assert {*found.values(), output.device, out_to_loss.device} == {META}
    assert set(found) == set(here.shapes)


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize("projector", [td.Rademacher(16), td.SJLT(16), td.Mask(50)], ids=str)
def test_featurize__by_kernels_has_the_bits_of_the_cpu(
    projector: td.Projector, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = td.featurize(samples(), model(), projector=projector).compute(scheduler="sync")
    for module in (with_kernels, stream):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(with_kernels, "kernels_for", lambda device: EmulatedKernels())
    monkeypatch.setattr(with_kernels, "_proven", set())
    found = td.featurize(samples(), model(), projector=projector).compute(scheduler="sync")
    xr.testing.assert_identical(found, expected)


def test_available_bytes__of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr("trakdask.featurization.memory.CPU_COUNT", 4)
    assert available_bytes(torch.device("cuda")) == (600 + 200) // 4


def test_precision__autocast_for_gpus_is_seen() -> None:
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        assert Precision.here(None).autocast == str(torch.get_autocast_dtype("cuda"))[6:]
    finally:
        torch.set_autocast_enabled("cuda", before)


@pytest.fixture
def mixed_cluster() -> Iterator[Client]:
    """One worker that declares a GPU, and two that do not."""
    options = {"nthreads": 1, "dashboard_address": ":0"}
    workers = {
        name: {"cls": Worker, "options": {**options, "resources": resources}}
        for name, resources in (("cpu-0", None), ("gpu-0", {"GPU": 1}), ("cpu-1", None))
    }
    scheduler = {"cls": Scheduler, "options": {"dashboard_address": ":0"}}
    with SpecCluster(workers=workers, scheduler=scheduler) as cluster, Client(cluster) as client:
        yield client


def test_compute_options__tasks_go_to_workers_that_declare_a_gpu(mixed_cluster: Client) -> None:
    features = td.featurize(samples(), model(), projector=td.Rademacher(8))
    (kept,) = dask.persist(features, **compute_options(features.attrs["device"]))
    kept.compute()
    info = mixed_cluster.scheduler_info(n_workers=-1)["workers"]
    places = {address for found in mixed_cluster.who_has(kept).values() for address in found}
    assert {info[address]["name"] for address in places} == {"gpu-0"}


def test_compute_options__nothing_is_asked_for(client: Client) -> None:
    assert compute_options("auto") == {}
    workers = {"a": {"resources": {"GPU": 1}}}
    asked = SimpleNamespace(scheduler_info=lambda n_workers: {"workers": workers})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "get_client", lambda: asked)
        assert compute_options("cpu") == {}
        assert compute_options("cuda") == {"resources": {"GPU": 1}}
