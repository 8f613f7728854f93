"""The version, read by the build and written into every result; and those of other packages."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__", "show_versions"]

__version__ = "0.1.0.dev0"

_PACKAGES = (
    *("torch", "numpy", "dask", "distributed", "xarray", "zarr", "pandas", "scipy", "fsspec"),
    *("numba", "cupy-cuda13x", "cupy-cuda12x", "matplotlib", "panel", "transformers", "peft"),
)


def show_versions() -> None:
    """Print the versions of trakdask, Python and other packages, and the devices of torch.

    For reports of errors: paste what this prints. It imports torch, to ask it for GPUs, and names
    no folder, user or host.

    Examples
    --------
    >>> import trakdask as td
    >>> td.show_versions()
    trakdask ...
    Python ... on ..., ... cores
    devices of torch: cpu...
    torch ...
    """
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"trakdask {__version__}")
    print(f"Python {sys.version.split()[0]} on {platform.platform()}, {os.cpu_count()} cores")
    print("devices of torch:", ", ".join(["cpu", *devices]))
    for package in _PACKAGES:
        try:
            print(package, version(package))
        except PackageNotFoundError:
            continue
