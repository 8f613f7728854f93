"""Every kernel is code that a GPU's compiler takes: by NVRTC where its wheel is installed, or nvcc.

Neither needs a GPU or a driver: pip install nvidia-cuda-nvrtc.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from trakdask.kernels import kernel_files, kernel_program
from trakdask.projection.cuda.launch import FAMILIES, OPTIONS

OF_CUPY = ["--device-as-default-execution-space"]  # what CuPy adds
ARCHITECTURES = ["sm_80", "sm_90a", "sm_100"]

pytestmark = pytest.mark.slow


@cache
def nvrtc() -> ctypes.CDLL | None:
    """Load NVRTC from its wheel; None if it is not installed."""
    for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name.startswith("libnvrtc.so"):
                return ctypes.CDLL(str(file.locate()))
    return None


def by_nvrtc(source: str, architecture: str) -> bytes:
    """Compile to machine code, and return it."""
    library, program = nvrtc(), ctypes.c_void_p()
    assert library
    code = source.encode()
    assert library.nvrtcCreateProgram(ctypes.byref(program), code, b"k.cu", 0, None, None) == 0
    try:
        given = [option.encode() for option in (*OPTIONS, *OF_CUPY, f"-arch={architecture}")]
        options = (ctypes.c_char_p * len(given))(*given)
        status = library.nvrtcCompileProgram(program, len(given), options)
        log = read(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
        assert (status, log.strip(b"\0")) == (0, b""), log.decode()
        return read(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def read(size_of: Any, get: Any, program: object) -> bytes:
    size = ctypes.c_size_t()
    assert size_of(program, ctypes.byref(size)) == 0
    buffer = ctypes.create_string_buffer(size.value)
    assert get(program, buffer) == 0
    return buffer.raw


def by_nvcc(source: str, architecture: str, folder: Path) -> bytes:
    """Compile to machine code, and return it."""
    (folder / "k.cu").write_text(source)
    command = ["nvcc", *OPTIONS, f"-arch={architecture}", "-cubin", "-o", "k.cubin", "k.cu"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stderr) == (0, "")
    return (folder / "k.cubin").read_bytes()


def compiled(source: str, architecture: str, folder: Path) -> bytes:
    if nvrtc() is not None:
        return by_nvrtc(source, architecture)
    if shutil.which("nvcc") is None:
        pytest.skip("neither nvidia-cuda-nvrtc nor nvcc is installed")
    return by_nvcc(source, architecture, folder)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels__compile_without_a_warning(family: str, architecture: str, tmp_path: Path) -> None:
    code = compiled(kernel_program(f"{family}.cu"), architecture, tmp_path)
    missing = [name for name in FAMILIES[family] if b"\0" + name.encode() + b"\0" not in code]
    assert not missing


def test_families__are_the_files_of_the_folder() -> None:
    files = {name.removesuffix(".cu") for name in kernel_files() if name.endswith(".cu")}
    assert files == set(FAMILIES)
