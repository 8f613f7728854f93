"""Every kernel is code that a GPU's compiler takes: NVRTC, which needs no GPU and no driver.

It is in a wheel: pip install nvidia-cuda-nvrtc.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from trakdask.projection.cuda.launch import FAMILIES, OPTIONS, kernel_folder, kernel_program

ARCHITECTURES = ["sm_80", "sm_100"]

pytestmark = pytest.mark.slow


@cache
def nvrtc() -> ctypes.CDLL | None:
    """Load NVRTC from its wheel; None if it is not installed."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvrtc") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    libraries = [str(file.locate()) for file in files]
    for builtins in (path for path in libraries if "libnvrtc-builtins.so" in path):
        ctypes.CDLL(builtins)  # of some versions, NVRTC does not find it beside itself
    return ctypes.CDLL(next(path for path in libraries if "libnvrtc.so" in path))


def compiled(source: str, options: Sequence[str], kind: str) -> bytes:
    """Compile to machine code (``"CUBIN"``) or to text (``"PTX"``), and return it."""
    library, program = nvrtc(), ctypes.c_void_p()
    if library is None:
        pytest.skip("nvidia-cuda-nvrtc is not installed")
    code = source.encode()
    assert library.nvrtcCreateProgram(ctypes.byref(program), code, b"k.cu", 0, None, None) == 0
    try:
        given = [option.encode() for option in options]
        array = (ctypes.c_char_p * len(given))(*given)
        status = library.nvrtcCompileProgram(program, len(given), array)
        log = read(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
        assert (status, log.strip(b"\0")) == (0, b""), log.decode()
        of = getattr(library, f"nvrtcGet{kind}Size"), getattr(library, f"nvrtcGet{kind}")
        return read(*of, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def read(size_of: Any, get: Any, program: object) -> bytes:
    size = ctypes.c_size_t()
    assert size_of(program, ctypes.byref(size)) == 0
    buffer = ctypes.create_string_buffer(size.value)
    assert get(program, buffer) == 0
    return buffer.raw


def assembly(source: str, options: Sequence[str]) -> bytes:
    return compiled(source, (*options, "-arch=compute_90"), "PTX")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels__compile_without_a_warning(family: str, architecture: str) -> None:
    options = (*OPTIONS, f"-arch={architecture}")
    code = compiled(kernel_program(f"{family}.cu"), options, "CUBIN")
    missing = [name for name in FAMILIES[family] if b"\0" + name.encode() + b"\0" not in code]
    assert not missing


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels__no_subnormal_becomes_zero(family: str) -> None:
    # Options that come later win: who adds -ftz=true (CuPy's RawModule does) changes bits.
    code = assembly(kernel_program(f"{family}.cu"), OPTIONS)
    assert b".entry" in code
    assert b".ftz" not in code
    if family == "quantize":
        flushing = [option.replace("ftz=false", "ftz=true") for option in OPTIONS]
        assert b".ftz" in assembly(kernel_program(f"{family}.cu"), flushing)


def test_families__are_the_files_of_the_folder() -> None:
    names = [file.name for file in kernel_folder().iterdir()]
    files = {name.removesuffix(".cu") for name in names if name.endswith(".cu")}
    assert files == set(FAMILIES)
