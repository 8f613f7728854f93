"""Projection on NVIDIA GPUs: the kernels of ``kernels/``, compiled at run time through CuPy.

The kernels have not run on a GPU yet. The tests compile them, and run them on a CPU, thread by
thread.
"""

from __future__ import annotations

from trakdask.projection.cuda.launch import Argument, Kernels, kernels_for, missing
from trakdask.projection.cuda.products import GpuProjector

__all__ = ["Argument", "GpuProjector", "Kernels", "kernels_for", "missing"]
