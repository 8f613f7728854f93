"""Compile kernels of ``kernels/`` once per device, and launch them on torch's stream and memory."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trakdask.errors import KernelError

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false")
"""Options of NVRTC: no product is fused with a sum, and no subnormal becomes zero."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "quantize": tuple(
        f"quantize_{dtype}_{n}" for dtype in ("float32", "float16", "bfloat16") for n in (1, 2, 3)
    ),
    "rademacher": ("rademacher_bits",),
    "sjlt": tuple(
        f"sjlt_{dtype}_{sums}"
        for dtype in ("float32", "float16", "bfloat16")
        for sums in ("int32", "int64")
    ),
    "combine": ("combine_int32", "combine_int64"),
}
"""File of ``kernels/`` without its suffix -> the kernels in it."""

Argument = Tensor | np.generic | None

_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
_MOST_SHARED_BYTES = 48 * 2**10  # a function must request more explicitly


def kernels_for(device: torch.device) -> Kernels | None:
    """Return the kernels of an NVIDIA GPU, which are compiled when first launched; else None.

    Raises
    ------
    ImportError
        If CuPy is missing; the message names the extra.
    """
    if device.type != "cuda" or torch.version.cuda is None:  # AMD's GPUs are named "cuda", too
        return None
    return _kernels(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _kernels(index: int) -> Kernels:
    return Kernels(index)


def missing() -> str | None:
    """Return why kernels cannot run on the NVIDIA GPU of this process; None if nothing is missing.

    On other accelerators nothing is, since there are no kernels for these.
    """
    try:
        if torch.cuda.is_available() and torch.version.cuda is not None:
            _cupy()
    except ImportError as err:
        return str(err)
    return None


@cache
def family_of(name: str) -> str:
    """Return the kernel file that has a kernel."""
    return next(family for family, names in FAMILIES.items() if name in names)


class Kernels:
    """The kernels of one GPU, through CuPy and NVRTC.

    Parameters
    ----------
    index
        Number of the device in this process.

    Attributes
    ----------
    description
        Model, driver and versions of the device, for messages.
    cache_bytes
        Size of the second-level cache, in which operands made on the fly should stay.

    Notes
    -----
    The first launch of a family compiles it, once per process and device. A launch that the driver
    rejects raises at once; a later failure of a kernel appears when results are read.
    """

    def __init__(self, index: int) -> None:
        self._cupy = _cupy()
        self._index = index
        self._functions: dict[str, Any] = {}
        self._compiling = Lock()
        properties: Any = torch.cuda.get_device_properties(index)
        self._architecture = f"sm_{properties.major}{properties.minor}"
        self.cache_bytes = int(properties.L2_cache_size)
        driver = self._cupy.cuda.runtime.driverGetVersion()
        self.description = (
            f"{properties.name} ({self._architecture}, CUDA driver {driver}, "
            f"torch {torch.__version__}, CuPy {self._cupy.__version__})"
        )

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        """Start a kernel, to run after the work that torch has started on the device.

        Parameters
        ----------
        name
            One of :data:`FAMILIES`.
        grid, threads
            Blocks of threads, and threads per block.
        arguments
            Tensors are passed as addresses, None as the null address, and numbers as they are;
            numbers must have the types that the kernel declares.
        shared_bytes
            Shared memory per block of threads.

        Raises
        ------
        KernelError
            If the kernel cannot be compiled, or the driver rejects the launch.
        torch.OutOfMemoryError
            If the driver has no memory for the kernel.
        """
        cuda, current = self._cupy.cuda, torch.cuda.current_stream(self._index)
        stream = _Stream(current.cuda_stream)
        # CuPy has a current device and stream of its own, which are not torch's.
        with cuda.Device(self._index), cuda.Stream.from_external(stream):
            try:
                function = self._function(name)
                if shared_bytes > max(_MOST_SHARED_BYTES, function.max_dynamic_shared_size_bytes):
                    function.max_dynamic_shared_size_bytes = shared_bytes
                function((*grid, 1), (threads,), packed(arguments), shared_mem=shared_bytes)
            except self._cupy.cuda.driver.CUDADriverError as err:
                # Out of memory, a micro-batch is halved.
                is_memory = "OUT_OF_MEMORY" in str(err)
                raise (torch.OutOfMemoryError if is_memory else KernelError)(
                    f"expected kernel {name} with grid {grid} and {shared_bytes} bytes of shared "
                    f"memory to start on {self.description}, got {err}; try device='cpu'"
                ) from err

    def _function(self, name: str) -> Any:
        # Else two threads would compile the same file.
        with self._compiling:
            if name not in self._functions:
                self._functions.update(self._family(family_of(name)))
            return self._functions[name]

    def _family(self, family: str) -> dict[str, Any]:
        code = machine_code(self._cupy.cuda.nvrtc, family, self._architecture)
        # CuPy compiles what it gets as text, and loads machine code from a file.
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{family}.cubin")
            path.write_bytes(code)
            module = self._cupy.RawModule(path=str(path))
            return {name: module.get_function(name) for name in FAMILIES[family]}  # loads them


def machine_code(nvrtc: Any, family: str, architecture: str) -> bytes:
    """Compile a family of kernels; needs CuPy's ``nvrtc``, but neither GPU nor driver.

    Raises
    ------
    KernelError
        If NVRTC is missing or does not know the architecture; the message contains NVRTC's log.

    Notes
    -----
    ``RawModule(code=...)`` is not used, because it would append ``-ftz=true`` to the options, which
    would turn subnormal gradients into zero.
    """
    program = None
    try:
        program = nvrtc.createProgram(kernel_program(f"{family}.cu"), f"{family}.cu", (), ())
        nvrtc.compileProgram(program, (*OPTIONS, f"-arch={architecture}"))
        code: bytes = nvrtc.getCUBIN(program)
    except (RuntimeError, OSError, ImportError) as err:  # NVRTCError, or no library
        log = nvrtc.getProgramLog(program) if program else ""
        raise KernelError(
            f"expected an NVRTC that compiles {family}.cu for {architecture}, got {err} {log}; try "
            "pip install -U nvidia-cuda-nvrtc, or device='cpu'"
        ) from err
    finally:
        if program:
            nvrtc.destroyProgram(program)
    return code


@dataclass(frozen=True)
class _Stream:
    """A stream of torch with the method that CuPy calls, which older versions of torch lack."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, and the address of the stream."""
        return 0, self.address


def packed(arguments: Sequence[Argument]) -> tuple[np.generic, ...]:
    """Return arguments in the form that a launch takes: numbers of the width of the kernel's."""
    return tuple(
        np.uint64(0 if value is None else value.data_ptr())
        if value is None or isinstance(value, Tensor)
        else value
        for value in arguments
    )


@cache
def _cupy() -> Any:
    try:
        import cupy  # optional: only needed on a GPU
    except ImportError as err:
        major = (torch.version.cuda or "13").partition(".")[0]
        extra = "cuda12" if major == "12" else "cuda"
        raise ImportError(
            "expected CuPy, which compiles the faster kernels for the GPU, got an import error "
            f"({err}); try pip install 'trakdask[{extra}]'"
        ) from err
    return cupy


def kernel_program(name: str) -> str:
    """Read a file of the kernel folder, with the files of the folder that it includes in place.

    Returns
    -------
    One text that can be compiled without reading other files, so the wheel may be a zip file.

    Examples
    --------
    >>> "#include" in kernel_program("quantize.cu")
    False
    """
    source = (kernel_folder() / name).read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda match: kernel_program(match[1]), source)


def kernel_folder() -> Traversable:
    """Return ``trakdask/_kernels`` of a wheel, or ``kernels`` of a checkout or editable install.

    Raises
    ------
    FileNotFoundError
        If neither folder exists.
    """
    packaged = files("trakdask") / "_kernels"
    if packaged.is_dir():
        return packaged
    root = Path(__file__).resolve().parents[3]
    # In site-packages a folder of this name would be another distribution's.
    if (root / "pyproject.toml").is_file() and (root / "kernels").is_dir():
        return root / "kernels"
    raise FileNotFoundError(
        "expected the kernel sources, which every wheel carries, got no _kernels folder in "
        f"{packaged} and no checkout around it; try pip install --force-reinstall --no-deps "
        "trakdask"
    )
