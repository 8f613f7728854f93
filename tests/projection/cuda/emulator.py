"""The kernels as host code: compiled by g++, run thread by thread, called like kernels of a GPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from trakdask.projection.cuda.launch import (
    FAMILIES,
    Argument,
    Kernels,
    family_of,
    kernel_program,
    packed,
)

HEADER = Path(__file__).with_name("emulator.hpp")
COMPILER = shutil.which("g++")
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared"]

_one_at_a_time = threading.Lock()  # there is one set of fibers
_folder = tempfile.TemporaryDirectory()


def host_program(family: str) -> str:
    """Return a family's source as C++, with an entry for each kernel."""
    shared = re.compile(r"extern __shared__ ([\w ]+) (\w+)\[\];")
    source = shared.sub(r"\1* const \2 = (\1*)emulated::shared;", kernel_program(f"{family}.cu"))
    entries = (f"EMULATED({name})" for name in FAMILIES[family])
    return "\n".join([f'#include "{HEADER}"', source, *entries, ""])


@cache
def library(family: str) -> ctypes.CDLL:
    assert COMPILER
    source, built = (Path(_folder.name) / f"{family}{suffix}" for suffix in (".cpp", ".so"))
    source.write_text(host_program(family))
    command = [COMPILER, *FLAGS, "-Wall", "-Wno-unknown-pragmas", "-Wno-unused-function"]
    done = subprocess.run([*command, "-o", str(built), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(built))


class EmulatedKernels(Kernels):
    """The kernels on a CPU; ``reverse`` runs the threads of a block in the opposite order."""

    description = "emulated"

    def __init__(self, cache_bytes: int = 2**21, *, reverse: bool = False) -> None:
        self.cache_bytes = cache_bytes
        self.reverse = reverse
        self.launched: list[str] = []

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        # The limits of a GPU.
        assert 0 < grid[0] < 2**31
        assert 0 < grid[1] < 2**16
        assert 0 < threads <= 1024
        assert shared_bytes <= 2**16
        with _one_at_a_time:
            self.launched.append(name)
            error = self._run(name, (*grid, threads), packed(arguments))
        assert error is None, f"{name}: {error.decode()}"

    def _run(
        self, name: str, shape: tuple[int, int, int], arguments: Sequence[np.generic]
    ) -> bytes | None:
        numbers = [np.asarray(value) for value in arguments]
        places = (ctypes.c_void_p * len(numbers))(*(number.ctypes.data for number in numbers))
        sizes = (ctypes.c_uint * len(numbers))(*(number.nbytes for number in numbers))
        entry = library(family_of(name))[f"launch_{name}"]
        entry.restype = ctypes.c_char_p
        dims, reverse = (ctypes.c_uint * 3)(*shape), ctypes.c_bool(self.reverse)
        error: bytes | None = entry(dims, reverse, places, sizes, len(numbers))
        return error
