"""Projection on NVIDIA GPUs: the kernels of ``kernels/``, compiled at run time through CuPy.

Has not run on a GPU yet: the tests compile the kernels, and run them on a CPU, thread by thread.
"""

from __future__ import annotations

from trakdask.projection.cuda.launch import Kernels, kernels_for, launched, missing
from trakdask.projection.cuda.projector import GpuProjector

__all__ = ["GpuProjector", "Kernels", "kernels_for", "launched", "missing"]
