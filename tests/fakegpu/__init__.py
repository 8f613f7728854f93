"""A device of host memory, "fakegpu", that torch treats as an accelerator.

As on CUDA, tensors of two devices do not mix, numpy cannot see the memory, generators belong to the
device, backward passes run in a thread of it, and recurrent layers have no gradients in evaluation
mode. As on Apple's GPUs, float64 can be forbidden. Operators have the bits of the CPU; they, copies
and reads are counted. Not imitated: TF32, additions in any order, streams, limits of memory.

A process that has the device keeps it, and cannot get it after its first backward pass, which
starts the threads of all devices. So tests with it have a run of their own: `make unit-fakegpu`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
import torchgen
from filelock import FileLock

SOURCE = Path(__file__).parent / "fakegpu.cpp"
COMPILER = os.environ.get("CXX", "g++")
WAITING = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select"}
"""Operators whose result, or its size, the host waits for; the first is ``x.item()``."""


def missing() -> str:
    """Return why there can be no such device, or nothing."""
    return "" if shutil.which(COMPILER) else f"{COMPILER}, which builds the fake GPU, is missing"


@cache
def start() -> None:
    """Give this process the device, and build it once per version of torch: half a minute."""
    torch.ops.load_library(built())
    torch.utils.rename_privateuse1_backend("fakegpu")
    ops, module = torch.ops.fakegpu, ModuleType("torch.fakegpu")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": ops.device,
        "set_device": lambda device: ops.set_device(torch.device(device).index or 0),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
    }
    vars(module).update(functions)
    torch._register_device_module("fakegpu", module)
    ops.start(takes_numbers())


def built() -> str:
    """Return the path of the library, which is compiled once for all processes and checkouts."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = cache_home / "trakdask-tests" / f"fakegpu-{torch.__version__}-{key}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            part, home = library.with_suffix(".part"), Path(torch.__file__).parent
            subprocess.run(
                [
                    *(COMPILER, "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(part)),
                    *(f"-isystem{home}/include", f"-isystem{home}/include/torch/csrc/api/include"),
                    *(f"-L{home}/lib", "-ltorch_cpu", "-ltorch", "-lc10"),
                ],
                check=True,
            )
            part.replace(library)
    return str(library)


def takes_numbers() -> list[str]:
    """Return the operators that take numbers of the CPU beside tensors of a GPU, as torch lists."""
    listed = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = re.split(r"^- func: ", listed.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return ["aten::" + e.partition("(")[0] for e in entries if "device_check: NoCheck" in e]


def allow_float64(allowed: bool) -> None:
    """Let the device have float64, or refuse it as Apple's GPUs do."""
    torch.ops.fakegpu.allow_float64(allowed)


def calls() -> dict[str, int]:
    """Return what has been called since the last time, by name, with how often, and forget it."""
    return dict(torch.ops.fakegpu.calls())


def counts() -> Counter[str]:
    """Return numbers of operators, reads, copies and bytes since the last time, and forget them."""
    found: Counter[str] = Counter()
    for name, n in calls().items():
        found[name if name.startswith(("copies", "bytes")) else "operators"] += n
        found["reads"] += n * (name in WAITING)
    return found
