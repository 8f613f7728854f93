"""What happens without CuPy, driver or GPU; and what is handed to CuPy, by a stand-in for it."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trakdask.errors import KernelError
from trakdask.projection.cuda import launch


@pytest.fixture(autouse=True)
def _forget() -> None:
    launch._cupy.cache_clear()
    launch._kernels.cache_clear()


@pytest.mark.parametrize(("version", "extra"), [("13.0", "cuda"), ("12.8", "cuda12")])
def test_missing__cupy(version: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setitem(sys.modules, "cupy", None)
    message = launch.missing()
    assert message
    assert message.startswith("expected CuPy")
    assert f"pip install 'trakdask[{extra}]'" in message


class _DriverError(RuntimeError):
    pass


class _Function:
    max_dynamic_shared_size_bytes = 0

    def __init__(self, calls: list[Any], name: str) -> None:
        self.calls, self.name = calls, name

    def __call__(self, grid: Any, block: Any, arguments: Any, *, shared_mem: int) -> None:
        if block == (4096,):
            raise _DriverError("CUDA_ERROR_INVALID_VALUE")
        self.calls.append((self.name, grid, block, arguments, shared_mem))


class _Nvrtc:
    """Compiles to the source itself."""

    NVRTCError = type("NVRTCError", (RuntimeError,), {})

    def __init__(self, calls: list[Any]) -> None:
        self.calls, self.open = calls, 0

    def createProgram(self, source: str, name: str, headers: Any, names: Any) -> str:
        self.open += 1
        return source

    def compileProgram(self, program: str, options: tuple[str, ...]) -> None:
        self.calls.append(("compiled", options))
        if "-arch=sm_99" in options:
            raise self.NVRTCError("NVRTC_ERROR_INVALID_OPTION (5)")

    def getProgramLog(self, program: str) -> str:
        return "invalid value for --gpu-architecture"

    def getCUBIN(self, program: str) -> bytes:
        return program.encode()

    def destroyProgram(self, program: str) -> None:
        self.open -= 1


class _Module:
    def __init__(self, calls: list[Any], path: str) -> None:
        self.calls, self.code = calls, Path(path).read_text()

    def get_function(self, name: str) -> _Function:
        # Names of some kernels are put together by the preprocessor.
        assert name.split("_")[0] in self.code
        return _Function(self.calls, name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand in for CuPy and for torch's view of a GPU, and keep what is called."""
    seen: list[Any] = []
    cupy = ModuleType("cupy")
    cupy.__version__ = "14.0"  # type: ignore[attr-defined]
    cupy.RawModule = lambda path: _Module(seen, path)  # type: ignore[attr-defined]
    cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        Device=lambda index: nullcontext(seen.append(("device", index))),
        Stream=SimpleNamespace(
            from_external=lambda given: nullcontext(seen.append(given.__cuda_stream__()))
        ),
        runtime=SimpleNamespace(driverGetVersion=lambda: 13000),
        driver=SimpleNamespace(CUDADriverError=_DriverError),
        nvrtc=_Nvrtc(seen),
    )
    properties = SimpleNamespace(name="H0", major=9, minor=0, L2_cache_size=2**25)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    stream = SimpleNamespace(cuda_stream=4711)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)
    return seen


def test_launch__on_torchs_stream_compiled_once(calls: list[Any]) -> None:
    kernels = launch.kernels_for(torch.device("cuda", 1))
    assert kernels is launch.kernels_for(torch.device("cuda", 1))
    assert kernels.cache_bytes == 2**25
    assert "H0 (sm_90, CUDA driver 13000, torch" in kernels.description
    tensor = torch.zeros(2)
    for n_bytes in (256, 60000, 100):
        kernels.launch(launch.Launch("combine_int32", (3, 2), 128, [tensor, np.int32(5)], n_bytes))
    place = [("device", 1), (0, 4711)]
    launches = [
        ("combine_int32", (3, 2, 1), (128,), (tensor.data_ptr(), 5), n_bytes)
        for n_bytes in (256, 60000, 100)
    ]
    compiled = ("compiled", (*launch.OPTIONS, "-arch=sm_90"))
    assert calls == [*place, compiled, launches[0], *place, launches[1], *place, launches[2]]


def test_launch__what_the_driver_refuses(calls: list[Any]) -> None:
    kernels = launch.kernels_for(torch.device("cuda", 0))
    with pytest.raises(KernelError, match=r"combine_int32 .*start on H0.*INVALID_VALUE"):
        kernels.launch(launch.Launch("combine_int32", (1, 1), 4096, []))


def test_machine_code__says_what_the_compiler_says() -> None:
    nvrtc = _Nvrtc([])
    message = r"sjlt.cu for sm_99.*gpu-architecture.*nvidia-cuda-nvrtc"
    with pytest.raises(KernelError, match=message):
        launch.machine_code(nvrtc, "sjlt", "sm_99")
    assert launch.machine_code(nvrtc, "sjlt", "sm_90").startswith(b"// Sums of rounded")
    assert not nvrtc.open
